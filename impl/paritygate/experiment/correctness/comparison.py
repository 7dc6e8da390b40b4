"""Comparisons of the correctness preflight: actual against expected at the spec's own tolerances."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paritygate.spec.experiment import CorrectnessPath

RECORDED = Path(__file__).parent / "recorded"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One comparison: the largest |actual - expected| against what its tolerance allows there, and the cosine."""

    path: str
    tolerance: str
    where: str
    values: int
    difference: float
    allowed: float
    cosine: float | None
    passed: bool

    def sentence(self) -> str:
        """For a person."""
        cosine = "" if self.cosine is None else f", cosine {self.cosine:.8f}"
        return (
            f"{self.path}, {self.where}: differs by {self.difference:.3g}, {self.tolerance} allows {self.allowed:.3g}"
            f"{cosine}"
        )

    def to_json(self) -> dict[str, Any]:
        """For the receipt."""
        return dataclasses.asdict(self)


def compare_values(
    path: CorrectnessPath, tolerance: str, where: str, actual: Sequence[float], expected: Sequence[float]
) -> Comparison:
    """Elementwise |actual - expected| <= atol + rtol |expected|, and the cosine where one is asked; NaN fails."""
    limits = path.tolerances[tolerance]
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if a.shape != e.shape:
        return Comparison(
            path.id, tolerance, f"{where} ({a.size} values for {e.size})", a.size, math.inf, 0.0, None, False
        )
    difference, allowed = np.abs(a - e), limits.atol + limits.rtol * np.abs(e)
    worst = int(np.argmax(np.nan_to_num(difference / allowed, nan=np.inf))) if a.size else 0
    cosine = _cosine(a, e) if limits.min_cosine is not None and a.size > 1 else None
    aligned = cosine is None or cosine >= (limits.min_cosine or -1.0)
    return Comparison(
        path=path.id,
        tolerance=tolerance,
        where=where,
        values=a.size,
        difference=float(difference.flat[worst]) if a.size else 0.0,
        allowed=float(allowed.flat[worst]) if a.size else 0.0,
        cosine=cosine,
        passed=bool(np.all(difference <= allowed)) and aligned,
    )


def recorded(name: str) -> dict[str, Any]:
    """The recorded numbers of `recorded/<name>.json`, each with its source."""
    return json.loads((RECORDED / f"{name}.json").read_text())


def _cosine(a: np.ndarray, e: np.ndarray) -> float | None:
    """The cosine of two vectors; None where one of them is all zero."""
    scale = float(np.linalg.norm(a) * np.linalg.norm(e))
    return float(a.ravel() @ e.ravel()) / scale if scale > 0 else None
