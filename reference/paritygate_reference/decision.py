"""What the decision means, in float64 and plain loops: Hoeffding 1963, and betting (arXiv 2010.09686)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """mean, low, high, half_width of a two-sided interval."""

    mean: float
    low: float
    high: float
    half_width: float


def paired_hoeffding(
    treatment: Sequence[float],
    baseline: Sequence[float],
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    alpha: float = 0.05,
    criteria: int = 1,
) -> Interval:
    """Interval for the mean of n paired differences, all `criteria` of them at once with probability 1 - alpha.

    P(|mean - mu| >= t) <= 2 exp(-2 n t^2 / range^2) (Hoeffding 1963, Theorem 2), range = 2 (high - low); setting the
    right side to alpha / criteria gives t.
    """
    differences = np.asarray(treatment, np.float64) - np.asarray(baseline, np.float64)
    n = differences.size
    length = 2.0 * (bounds[1] - bounds[0])
    share = alpha / criteria
    half_width = length * math.sqrt(-math.log(share / 2.0) / (2.0 * n))
    mean = float(differences.sum() / n)
    return Interval(mean, mean - half_width, mean + half_width, half_width)


def betting_log_capital(values: Sequence[float], mean: float, *, alpha: float = 0.05, cap: float = 0.5) -> float:
    """log of max(K+_n, K-_n) / 2 against one candidate mean; it is rejected where this reaches log(1 / alpha).

    Values and mean in [0, 1]; predictable plug-in bets for a fixed n (arXiv 2010.09686, Theorem 3).
    """
    n = len(values)
    total, squares = 0.5, 0.25
    variance = 0.25
    up, down = 1.0, 1.0
    for i, x in enumerate(values, start=1):
        bet = math.sqrt(2.0 * math.log(2.0 / alpha) / (n * variance))
        up *= 1.0 + (min(bet, cap / mean) if mean > 0.0 else bet) * (x - mean)
        down *= 1.0 - (min(bet, cap / (1.0 - mean)) if mean < 1.0 else bet) * (x - mean)
        total += x
        squares += (x - total / (i + 1)) ** 2
        variance = squares / (i + 1)
    return math.log(max(up, down) / 2.0)
