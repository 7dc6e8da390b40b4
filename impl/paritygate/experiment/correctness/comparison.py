"""Comparisons of the correctness preflight: actual against expected at the spec's own tolerances."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paritygate.harness.comparator import measure
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
    result = measure(actual, expected, dataclasses.asdict(limits))
    where = where if len(actual) == len(expected) else f"{where} ({len(actual)} values for {len(expected)})"
    return Comparison(
        path=path.id,
        tolerance=tolerance,
        where=where,
        values=len(actual),
        difference=result.difference,
        allowed=result.allowed,
        cosine=result.cosine,
        passed=result.passed and not any(math.isnan(value) for value in expected),
    )


def recorded(name: str) -> dict[str, Any]:
    """The recorded numbers of `recorded/<name>.json`, each with its source."""
    return json.loads((RECORDED / f"{name}.json").read_text())
