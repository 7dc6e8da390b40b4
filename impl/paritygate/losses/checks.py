"""Bad input of a loss, said in one sentence that names the place."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where any input is float64, float32 otherwise: no loss is returned in half precision."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def as_float(values: object, name: str) -> Tensor:
    """`values` as a floating tensor; lists become float64 and None in them NaN. ValueError for complex numbers."""
    if not isinstance(values, Tensor):
        values = torch.as_tensor(_without_none(values), dtype=torch.float64)
    if values.is_complex():
        raise ValueError(f"{name} is complex")
    return values if values.is_floating_point() else values.double()


def _without_none(values: object) -> object:
    if isinstance(values, list | tuple):
        return [_without_none(value) for value in values]
    return float("nan") if values is None else values


def as_mask(values: object, like: Tensor, name: str, *, validate: bool = True) -> Tensor:
    """`values` as a boolean tensor on the device of `like`; with `validate` ValueError naming an entry not 0 or 1."""
    mask = torch.as_tensor(values, device=like.device)
    if mask.dtype == torch.bool:
        return mask
    if validate:
        refuse_where((mask != 0) & (mask != 1), mask, f"{name}: the mask", "; it is 0 or 1")
    return mask == 1


def same_shape(name: str, **tensors: Tensor) -> None:
    """ValueError listing the shapes where they differ."""
    if len({tuple(t.shape) for t in tensors.values()}) > 1:
        shapes = ", ".join(f"{key} {tuple(t.shape)}" for key, t in tensors.items())
        raise ValueError(f"{name}: shapes differ: {shapes}")


def refuse_where(bad: Tensor, values: Tensor, what: str, hint: str = "") -> None:
    """ValueError at the first True of `bad`: `what`, its position and the value there."""
    if bool(bad.any()):
        position = bad.nonzero()[0].tolist()
        raise ValueError(f"{what} at position {place(position)} is {values[tuple(position)].item()}{hint}")


def place(position: Sequence[int]) -> str:
    """A position for a person: `3` in one dimension, `(0, 3)` in more."""
    return str(position[0]) if len(position) == 1 else str(tuple(position))


def rows_are_distributions(logits: Tensor, name: str, rows: Tensor | None = None) -> None:
    """ValueError naming the first row of (N, V) logits with NaN, +inf or all -inf; `rows` (N, d) names them."""
    top = logits.detach().amax(dim=-1)
    bad = ~torch.isfinite(top)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        where = i if rows is None else place(rows[i].tolist())
        raise ValueError(no_distribution(f"{name} row {where}", float(top[i])))


def no_distribution(row: str, maximum: float) -> str:
    """Why the row of logits with this maximum (NaN, +inf or -inf) is no distribution, as a sentence about `row`."""
    if math.isnan(maximum):
        return f"{row} holds NaN"
    return f"{row} holds +inf" if maximum > 0 else f"{row} is all -inf: it is no distribution"
