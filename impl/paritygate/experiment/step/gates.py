"""The gates of a spec against what a pilot measured: pure, and never relaxed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from paritygate.spec.experiment import GateCheck


@dataclasses.dataclass(frozen=True)
class GateResult:
    """One gate, what it asked for and what was measured; `measured` None means that nothing was measured, a failure."""

    metric: str
    asked: str
    measured: float | str | None
    passed: bool

    def sentence(self) -> str:
        """For a person: the measured value against what was asked."""
        verdict = "passes" if self.passed else "fails"
        return f"{self.metric} {verdict}: measured {_show(self.measured)}, asked {self.asked}"


def check_gate(check: GateCheck, measured: Any) -> GateResult:
    """One check of the activation gate against its measured value; NaN, None and wrong types fail."""
    if check.one_of is not None:
        passed = measured in check.one_of
    else:
        number = isinstance(measured, int | float) and not isinstance(measured, bool) and not math.isnan(measured)
        above = number and (check.min is None or measured >= check.min)
        passed = above and (check.max is None or measured <= check.max)
    return GateResult(check.metric, wanted(check), measured, passed)


def check_gates(checks: Sequence[GateCheck], measured: Mapping[str, Any]) -> list[GateResult]:
    """Every check whose metric the arm has, in the spec's order."""
    return [check_gate(check, measured[check.metric]) for check in checks if check.metric in measured]


def failures(results: Sequence[GateResult]) -> list[GateResult]:
    """Those that did not pass."""
    return [result for result in results if not result.passed]


def wanted(check: GateCheck) -> str:
    """What a check asks for, in words."""
    if check.one_of is not None:
        return "one of " + ", ".join(check.one_of)
    bounds = [f">= {check.min:g}"] if check.min is not None else []
    return " and ".join(bounds + ([f"<= {check.max:g}"] if check.max is not None else [])) or "any value"


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
