"""The interval that decides, and what can be known of it before any money is spent."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any


@dataclass(frozen=True, slots=True)
class PairedInterval:
    """A two-sided interval for the mean paired difference; `low` and `high` are mean -/+ `half_width`, not clipped."""

    mean: float
    low: float
    high: float
    half_width: float
    n: int


@dataclass(frozen=True, slots=True)
class DesignCheck:
    """What a paired Hoeffding interval over n items can show.

    `smallest` is the least observed mean difference that certifies the margin; `n_required` maps a true difference to
    the items needed for the power (None where no n is enough); `feasible` says whether n is enough for any of them.
    """

    n: int
    half_width: float
    smallest: float
    n_required: Mapping[float, int | None]
    feasible: bool

    def to_json(self) -> dict[str, Any]:
        """The check as JSON data."""
        required = {f"{effect:g}": n for effect, n in self.n_required.items()}
        return dataclasses.asdict(self) | {"n_required": required}


def half_width(n: int, *, bounds: Sequence[float] = (0.0, 1.0), alpha: float = 0.05, criteria: int = 1) -> float:
    """Half-width of the interval over n paired items of scores within `bounds`, simultaneous over `criteria`.

    Hoeffding 1963, Theorem 2, two-sided with a Bonferroni share alpha / criteria: a difference of two scores lies in
    an interval of length 2 (high - low). Raises ValueError when an argument is out of range.
    """
    low, high = bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"bounds must be two finite numbers, the lower first, not {tuple(bounds)}")
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha must lie strictly between 0 and 1, not {alpha}")
    if n < 1 or criteria < 1:
        raise ValueError(f"n and criteria must be at least 1, not {n} and {criteria}")
    return 2.0 * (high - low) * math.sqrt(math.log(2.0 * criteria / alpha) / (2.0 * n))


def paired_hoeffding(
    treatment: Sequence[float],
    baseline: Sequence[float],
    *,
    bounds: Sequence[float] = (0.0, 1.0),
    alpha: float = 0.05,
    criteria: int = 1,
) -> PairedInterval:
    """Two-sided Hoeffding interval for the mean of treatment - baseline over paired items, simultaneous over criteria.

    Raises ValueError when the lists differ in length or a score is not a number within `bounds`.
    """
    low, high = bounds
    if len(treatment) != len(baseline):
        raise ValueError(f"treatment has {len(treatment)} items, baseline {len(baseline)}: they must be pairs")
    width = half_width(len(treatment), bounds=bounds, alpha=alpha, criteria=criteria)
    for name, scores in (("treatment", treatment), ("baseline", baseline)):
        for index, score in enumerate(scores):
            if not low <= score <= high:
                raise ValueError(f"{name}[{index}] is {score}, outside [{low}, {high}]")
    mean = math.fsum(float(t) - float(b) for t, b in zip(treatment, baseline, strict=True)) / len(treatment)
    return PairedInterval(mean, mean - width, mean + width, width, len(treatment))


def design_check(
    n: int,
    *,
    margin: float,
    alpha: float = 0.05,
    criteria: int = 2,
    bounds: Sequence[float] = (0.0, 1.0),
    power: float = 0.8,
    sd: float = 0.6,
    effects: Sequence[float] = (0.05, 0.10, 0.15),
) -> DesignCheck:
    """What n paired items can certify above `margin`, and the n that finds each of `effects` with the given power.

    The mean difference is taken as normal with standard deviation sd / sqrt(n); the interval's half-width is exact.
    Raises ValueError when an argument is out of range.
    """
    width = half_width(n, bounds=bounds, alpha=alpha, criteria=criteria)
    if not 0.0 < power < 1.0 or not (math.isfinite(sd) and sd >= 0.0):
        raise ValueError(f"power must lie strictly between 0 and 1 and sd be at least 0, not {power} and {sd}")
    reach = NormalDist().inv_cdf(power) * sd + half_width(1, bounds=bounds, alpha=alpha, criteria=criteria)
    required = {
        effect: max(1, math.ceil((reach / (effect - margin)) ** 2)) if effect > margin else None for effect in effects
    }
    feasible = any(needed is not None and needed <= n for needed in required.values())
    return DesignCheck(n, width, margin + width, required, feasible)
