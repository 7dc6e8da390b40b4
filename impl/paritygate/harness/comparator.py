"""The comparator: nested values against what is expected of them, at a declared tolerance; every digit counts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Measurement:
    """How far `actual` is from `expected`.

    margin: the worst |difference| / allowed over all elements, or how much of its slack the cosine used; above 1 fails.
    complaint: one sentence about the worst element, "" where the comparison passes. elements: how many were compared.
    difference, allowed: of the worst element. cosine: None where the tolerance asks for none.
    """

    margin: float
    complaint: str
    elements: int
    difference: float = 0.0
    allowed: float = 0.0
    cosine: float | None = None

    @property
    def passed(self) -> bool:
        """Whether every element, and the cosine, is within the tolerance."""
        return not self.complaint


def measure(actual: Any, expected: Any, tolerance: Mapping[str, Any]) -> Measurement:
    """Hold two equally nested values to |actual - expected| <= atol + rtol |expected|, elementwise.

    tolerance: `rtol` and `atol`; `scale`: "max" takes the largest |expected| of all for rtol; `min_cosine`, if given,
    is the least cosine between the two as one vector. NaN agrees with NaN and an infinity with its equal, nothing else;
    booleans and None agree exactly. Numbers, tensors, arrays and lists of them are taken.
    """
    pairs = list(zip_leaves(actual, expected, ""))
    finite = [abs(e[np.isfinite(e)]) for _, _, e, _ in pairs]
    largest = max((float(e.max()) for e in finite if e.size), default=0.0)
    worst, complaint, elements, difference, limit = 0.0, "", 0, 0.0, 0.0
    for index, a, e, exact in pairs:
        if a.shape != e.shape:
            problem = f"shape {a.shape} where {e.shape} is expected{index and f' in {index}'}"
            return Measurement(math.inf, problem, 1, difference=math.inf)
        elements += a.size
        rtol, atol = (0.0, 0.0) if exact else (tolerance["rtol"], tolerance["atol"])
        scale = np.full_like(e, largest) if tolerance.get("scale") == "max" else np.abs(e)
        allowed = atol + rtol * np.where(np.isfinite(scale), scale, 0.0)
        margins = elementwise_margins(a, e, allowed)
        if margins.size and (margin := float(margins.max())) > worst:
            at = np.unravel_index(int(margins.argmax()), margins.shape)
            worst, difference, limit = margin, float(abs(a[at] - e[at])), float(allowed[at])
            if margin > 1.0:
                element = index + (str([int(i) for i in at]) if at else "")
                complaint = (
                    f"{element or 'value'} is {float(a[at])!r}, expected {float(e[at])!r}, "
                    f"difference {difference:.6g}, allowed {limit:.6g}"
                )
    cosine = None
    if tolerance.get("min_cosine") is not None and elements:
        cosine = cosine_of([a for _, a, _, _ in pairs], [e for _, _, e, _ in pairs])
        if not complaint:
            worst, complaint = hold_cosine(cosine, tolerance["min_cosine"], worst)
    return Measurement(worst, complaint, elements, difference, limit, cosine)


def hold_cosine(cosine: float, least: float, margin: float) -> tuple[float, str]:
    """The margin with the cosine's share of its slack, and a complaint where the cosine is too small."""
    slack = 1.0 - least
    margin = max(margin, (1.0 - cosine) / slack if slack else (0.0 if cosine >= 1.0 else math.inf))
    return margin, "" if cosine >= least else f"cosine {cosine:.9f}, expected at least {least}"


def elementwise_margins(actual: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """|difference| / allowed; 0 where equal (infinities and NaN included), inf where no difference is allowed."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        margins = np.abs(actual - expected) / allowed
    margins = np.where(np.isnan(margins), np.inf, margins)
    agree = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    return np.where(agree, 0.0, margins)


def cosine_of(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Cosine of the angle between the finite values; 1 when either is all zero (the tolerance judges that)."""
    a = np.concatenate([part.ravel() for part in actual])
    e = np.concatenate([part.ravel() for part in expected])
    finite = np.isfinite(a) & np.isfinite(e)
    a, e = a[finite], e[finite]
    norm = float(np.linalg.norm(a) * np.linalg.norm(e))
    return float(a @ e) / norm if norm else 1.0


def zip_leaves(actual: Any, expected: Any, index: str) -> Iterator[tuple[str, np.ndarray, np.ndarray, bool]]:
    """(index, actual, expected, exact) for each array in two nested values; `exact` for booleans and None."""
    ragged = [isinstance(value, (list, tuple)) for value in (actual, expected)]
    if any(ragged) and not all(is_flat(value) for value in (actual, expected)):
        if not (hasattr(actual, "__len__") and hasattr(expected, "__len__") and len(actual) == len(expected)):
            sizes = [len(value) if hasattr(value, "__len__") else 0 for value in (actual, expected)]
            yield index, np.zeros(sizes[0]), np.zeros((sizes[1], 0)), True
            return
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            yield from zip_leaves(a, e, f"{index}[{i}]")
        return
    if actual is None or expected is None:
        yield index, np.asarray(actual is None, np.float64), np.asarray(expected is None, np.float64), True
        return
    a, e = as_array(actual), as_array(expected)
    exact = bool in (a.dtype, e.dtype)
    yield index, a.astype(np.float64), e.astype(np.float64), exact


def is_flat(value: Any) -> bool:
    """True unless `value` is a list or tuple that holds something other than numbers."""
    return not isinstance(value, (list, tuple)) or all(
        item is not None and not hasattr(item, "__len__") and not getattr(item, "shape", ()) for item in value
    )


def as_array(value: Any) -> np.ndarray:
    """A number, mpmath number, torch tensor, array or flat list as an array of float64 or bool."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.numpy() if str(value.dtype) == "torch.bool" else value.double().numpy()
    elif isinstance(value, (list, tuple)):
        value = [item.item() if hasattr(item, "detach") else item for item in value]
    array = np.asarray(value)
    return array if array.dtype == bool else array.astype(np.float64)
