"""Bad input of a definition, refused in one sentence that names the place; what comes out holds no bad number."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Row = Sequence[float | None] | NDArray[np.floating]
Mask = Sequence[int] | NDArray[np.generic]


def rewards(name: str, values: ArrayLike) -> Array:
    """One group of finite rewards (G,), G at least 1."""
    group = np.asarray(values, dtype=np.float64)
    if group.ndim != 1:
        raise ValueError(f"{name}: rewards have shape {group.shape}; one group of shape (G,) is expected")
    if group.size == 0:
        raise ValueError(f"{name}: the group is empty")
    for i, reward in enumerate(group):
        if not math.isfinite(reward):
            raise ValueError(f"{name}: the reward at position {i} is {reward}")
    return group


def policy_rows(
    name: str,
    logprobs: Row,
    sampler_logprobs: Row,
    advantages: Row,
    *,
    finite: bool = False,
    everywhere: bool = False,
    mask: NDArray[np.bool_] | None = None,
) -> tuple[Array, Array, Array]:
    """Three rows (T,). A position is looked at where the advantage is not 0, the mask is 1, or `everywhere`.

    Elsewhere both logprobs come out as 0. A logprob of -inf is refused where the loss needs a `finite` one.
    """
    p, q, advantage = (
        _row(name, values, what)
        for values, what in (
            (logprobs, "logprobs"),
            (sampler_logprobs, "sampler_logprobs"),
            (advantages, "advantages"),
        )
    )
    if not p.shape == q.shape == advantage.shape:
        raise ValueError(
            f"{name}: shapes differ: logprobs {p.shape}, sampler_logprobs {q.shape}, advantages {advantage.shape}"
        )
    if mask is not None and mask.shape != p.shape:
        raise ValueError(f"{name}: shapes differ: logprobs {p.shape}, sequence_ratio_mask {mask.shape}")
    used = (advantage != 0.0) | everywhere | (False if mask is None else mask)
    for t in np.flatnonzero(used):
        if not math.isfinite(advantage[t]):
            raise ValueError(f"{name}: the advantage at position {t} is {advantage[t]}")
        if math.isnan(p[t]) or p[t] == math.inf or (finite and p[t] == -math.inf):
            raise ValueError(f"{name}: the logprob at position {t} is {p[t]}")
        if not math.isfinite(q[t]):
            raise ValueError(f"{name}: the sampler logprob at position {t} is {q[t]}")
    return np.where(used, p, 0.0), np.where(used, q, 0.0), advantage


def sequence_rows(
    name: str, logprobs: Row, sampler_logprobs: Row, advantages: Row, sequence_ratio_mask: Mask
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """`policy_rows` of finite logprobs and a mask of 0 and 1, (T,) each."""
    mask = zero_or_one(name, np.asarray(sequence_ratio_mask))
    return *policy_rows(name, logprobs, sampler_logprobs, advantages, finite=True, mask=mask), mask


def bounds(name: str, low: float, high: float) -> tuple[float, float]:
    """0 <= low <= high; high may be +inf."""
    if not 0.0 <= low <= high or low == math.inf:
        raise ValueError(f"{name}: clip_low_threshold {low} and clip_high_threshold {high} are no interval of ratios")
    return low, high


def not_negative(name: str, what: str, value: float) -> float:
    """A finite number, 0 or more."""
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{name}: {what} is {value}; it is finite and not negative")
    return value


def _row(name: str, values: Row, what: str) -> Array:
    row = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    if row.ndim != 1:
        raise ValueError(f"{name}: {what} have shape {row.shape}; one row of shape (T,) is expected")
    return row


def masked_logprobs(
    name: str, teacher_logprobs: Row, student_logprobs: Row, mask_T: Mask
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Teacher, student and mask, (T,); at mask 0 nothing is looked at and both logprobs are 0."""
    if not len(teacher_logprobs) == len(student_logprobs) == len(mask_T):
        raise ValueError(
            f"{name}: shapes differ: teacher {len(teacher_logprobs)}, student {len(student_logprobs)}, "
            f"mask {len(mask_T)}"
        )
    mask = zero_or_one(name, np.asarray(mask_T))
    teacher, student = np.zeros(len(mask)), np.zeros(len(mask))
    for t in np.flatnonzero(mask).tolist():
        for who, values, row in (("teacher", teacher_logprobs, teacher), ("student", student_logprobs, student)):
            value = values[t]
            if value is None or math.isnan(value) or value == math.inf or (who == "student" and value == -math.inf):
                raise ValueError(f"{name}: the {who} logprob at position {t} is {value}")
            row[t] = value
    return teacher, student, mask


def zero_or_one(name: str, mask: NDArray[np.generic]) -> NDArray[np.bool_]:
    """A mask of 0 and 1 as booleans."""
    for position in np.argwhere((mask != 0) & (mask != 1)):
        raise ValueError(f"{name}: the mask at position {place(position)} is {mask[tuple(position)]}; it is 0 or 1")
    return mask == 1


def place(position: Sequence[int] | NDArray[np.intp]) -> str:
    """A position for a person: `3` in one dimension, `(0, 3)` in more."""
    return str(int(position[0])) if len(position) == 1 else str(tuple(int(i) for i in position))


def ratios(name: str, importance_ratio: ArrayLike, mask: NDArray[np.bool_]) -> Array:
    """Finite ratios of the mask's shape, not negative, 0 where the mask is 0."""
    ratio = np.asarray(importance_ratio, dtype=np.float64)
    if ratio.shape != mask.shape:
        raise ValueError(f"{name}: importance_ratio has shape {ratio.shape}; {mask.shape} is expected")
    for position in np.argwhere(mask & ~(np.isfinite(ratio) & (ratio >= 0.0))):
        raise ValueError(f"{name}: importance_ratio at {place(position)} is {ratio[tuple(position)]}")
    return np.where(mask, ratio, 0.0)


def equal_shapes(name: str, **arrays: Array) -> None:
    """All of one shape."""
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{key} {array.shape}" for key, array in arrays.items())
        raise ValueError(f"{name}: shapes differ: {shapes}")


def inside(name: str, what: str, value: float, low: float = 0.0, high: float = 1.0) -> None:
    """`value` lies in [low, high]."""
    if not low <= value <= high:
        raise ValueError(f"{name}: {what} is {value}; it lies in [{low:g}, {high:g}]")


def one_of(name: str, what: str, value: str, choices: Sequence[str]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: {what} is {value!r}; it is one of {', '.join(choices)}")


def action(entry: Mapping[str, Any], where: str) -> tuple[Array, Array, NDArray[np.int64]]:
    """An action's student and teacher logits (n, V) and tokens (n,), n at least 1, each token in [0, V)."""
    student = np.asarray(entry["student_logits"], dtype=np.float64)
    teacher = np.asarray(entry["teacher_logits"], dtype=np.float64)
    tokens = np.asarray(entry["tokens"])
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"{where} has no token")
    if student.shape != teacher.shape or student.ndim != 2 or student.shape[0] != tokens.size:
        raise ValueError(
            f"{where}: shapes differ: student_logits {student.shape}, teacher_logits {teacher.shape}, "
            f"tokens {tokens.shape}"
        )
    for j, token in enumerate(tokens):
        if not 0 <= token < student.shape[1] or token != int(token):
            raise ValueError(f"{where}: token {j} is {token}, outside [0, {student.shape[1]})")
    return student, teacher, tokens.astype(np.int64)
