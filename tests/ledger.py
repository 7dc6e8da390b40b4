"""The obligation ledger: every comparison of the parity suite goes through `compare`, which counts and measures it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paritygate.spec.losses import device_class


@dataclass
class Cell:
    """Comparisons of one obligation in one dtype, regime and against one oracle."""

    comparisons: int = 0
    worst_margin: float = 0.0


@dataclass
class Ledger:
    """What a session has compared: `spec` is the content of spec/losses.json, `device` a torch device string."""

    spec: dict[str, Any]
    device: str = "cpu"
    current: frozenset[str] = frozenset()
    cells: dict[tuple[str, str, str, str], Cell] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Index the obligations by name."""
        self.obligations: dict[str, dict[str, Any]] = {
            name: obligation
            for loss in self.spec["losses"].values()
            for name, obligation in loss["obligations"].items()
        }

    def tolerance(self, obligation: str, dtype: str, regime: str) -> dict[str, Any]:
        """The declared tolerance; a row for the device class goes before one for any device. Raises ValueError."""
        if obligation not in self.obligations:
            raise ValueError(f"spec/losses.json declares no obligation {obligation!r}.")
        kind = device_class(self.device)
        rows = [
            row
            for row in self.obligations[obligation]["tolerances"]
            if (row["dtype"], row["regime"]) == (dtype, regime) and row["device"] in (kind, "any")
        ]
        if not rows:
            raise ValueError(f"{obligation} declares no tolerance for {dtype} on {kind}, regime {regime!r}.")
        return sorted(rows, key=lambda row: row["device"] == "any")[0]

    def compare(
        self,
        obligation: str,
        actual: Any,
        expected: Any,
        *,
        dtype: str,
        regime: str = "ordinary",
        oracle: str = "reference",
        where: str = "",
    ) -> None:
        """Hold `actual` to `expected` within its declared tolerance, and count it; AssertionError says where not."""
        if obligation not in self.current:
            raise ValueError(f"the running test is not marked @pytest.mark.obligation({obligation!r}).")
        dtype = str(dtype).removeprefix("torch.")
        tolerance = self.tolerance(obligation, dtype, regime)
        margin, complaint, elements = measure(actual, expected, tolerance)
        if elements:
            cell = self.cells.setdefault((obligation, dtype, regime, oracle), Cell())
            cell.comparisons += 1
            cell.worst_margin = max(cell.worst_margin, margin)
        if complaint:
            place = f" at {where}" if where else ""
            message = f"{obligation} ({dtype}, {self.device}, {regime}, against {oracle}){place}: {complaint}"
            self.failures.append(message)
            raise AssertionError(message)

    def results(self) -> dict[str, dict[str, Any]]:
        """For each obligation compared: comparisons, worst_margin, and the same by dtype, regime and oracle."""
        found: dict[str, dict[str, Any]] = {}
        for (obligation, dtype, regime, oracle), cell in sorted(self.cells.items()):
            entry = found.setdefault(obligation, {"comparisons": 0, "worst_margin": 0.0, "cells": []})
            entry["comparisons"] += cell.comparisons
            entry["worst_margin"] = max(entry["worst_margin"], cell.worst_margin)
            entry["cells"].append(
                {
                    "dtype": dtype,
                    "regime": regime,
                    "oracle": oracle,
                    "comparisons": cell.comparisons,
                    "worst_margin": cell.worst_margin,
                }
            )
        return found


def measure(actual: Any, expected: Any, tolerance: dict[str, Any]) -> tuple[float, str, int]:
    """(worst |difference| / allowed, complaint or "", number of elements) of two equally nested values."""
    pairs = list(zip_leaves(actual, expected, ""))
    finite = [abs(e[np.isfinite(e)]) for _, _, e, _ in pairs]
    largest = max((float(e.max()) for e in finite if e.size), default=0.0)
    worst, complaint, elements = 0.0, "", 0
    for index, a, e, exact in pairs:
        if a.shape != e.shape:
            return math.inf, f"shape {a.shape} where {e.shape} is expected{index and f' in {index}'}", 1
        elements += a.size
        rtol, atol = (0.0, 0.0) if exact else (tolerance["rtol"], tolerance["atol"])
        scale = np.full_like(e, largest) if tolerance.get("scale") == "max" else np.abs(e)
        allowed = atol + rtol * np.where(np.isfinite(scale), scale, 0.0)
        margins = elementwise_margins(a, e, allowed)
        if margins.size and (margin := float(margins.max())) > worst:
            worst = margin
            if margin > 1.0:
                at = np.unravel_index(int(margins.argmax()), margins.shape)
                spot = index + (str([int(i) for i in at]) if at else "")
                complaint = (
                    f"{spot or 'value'} is {float(a[at])!r}, expected {float(e[at])!r}, "
                    f"difference {abs(a[at] - e[at]):.6g}, allowed {allowed[at]:.6g}"
                )
    if not complaint and "min_cosine" in tolerance and elements:
        cosine = cosine_of([a for _, a, _, _ in pairs], [e for _, _, e, _ in pairs])
        slack = 1.0 - tolerance["min_cosine"]
        worst = max(worst, (1.0 - cosine) / slack if slack else (0.0 if cosine >= 1.0 else math.inf))
        if cosine < tolerance["min_cosine"]:
            complaint = f"cosine {cosine:.9f}, expected at least {tolerance['min_cosine']}"
    return worst, complaint, elements


def elementwise_margins(actual: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """|difference| / allowed; 0 where equal (infinities and NaN included), inf where no difference is allowed."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        margins = np.abs(actual - expected) / allowed
    margins = np.where(np.isnan(margins), np.inf, margins)
    agree = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    return np.where(agree, 0.0, margins)


def cosine_of(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Cosine of the angle between the finite values; 1 when either is all zero (the tolerance judges that)."""
    a = np.concatenate([part.ravel() for part in actual])
    e = np.concatenate([part.ravel() for part in expected])
    keep = np.isfinite(a) & np.isfinite(e)
    a, e = a[keep], e[keep]
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
        yield index, np.float64(actual is None).reshape(()), np.float64(expected is None).reshape(()), True
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


LEDGER: Ledger | None = None
"""The session's ledger, opened by conftest.py."""


def compare(
    obligation: str,
    actual: Any,
    expected: Any,
    *,
    dtype: str,
    regime: str = "ordinary",
    oracle: str = "reference",
    where: str = "",
) -> None:
    """`Ledger.compare` on the session's ledger."""
    if LEDGER is None:
        raise RuntimeError(
            "compare() works inside a pytest session of this tree, where tests/conftest.py opens a ledger."
        )
    LEDGER.compare(obligation, actual, expected, dtype=dtype, regime=regime, oracle=oracle, where=where)
