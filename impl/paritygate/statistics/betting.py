"""The pre-declared secondary interval: betting against every mean that the data could have.

Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting (JRSS B 2024, arXiv 2010.09686): the
hedged capital interval of Theorem 3 with predictable plug-in bets for a fixed n. With x_1..x_n in [0, 1], for every
candidate mean m

    K+_n(m) = prod_i (1 + min(l_i, c / m) (x_i - m))        K-_n(m) = prod_i (1 - min(l_i, c / (1 - m)) (x_i - m))
    l_i = sqrt(2 log(2 / alpha) / (n s2_{i-1}))             s2_i = (1/4 + sum_{j<=i} (x_j - mu_j)^2) / (i + 1)
    mu_i = (1/2 + sum_{j<=i} x_j) / (i + 1)

and the interval is {m: max(K+_n(m), K-_n(m)) / 2 < 1 / alpha}. Each factor of K+ falls in m and each of K- rises, so
both ends are found by bisection. Under the true mean each capital is a martingale that starts at 1, which needs items
drawn at random (or in random order); for fixed items in a chosen order only the Hoeffding interval is valid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TRUNCATION = 0.5  # c of the paper: no bet risks more than half of the capital
BISECTIONS = 60  # to the last bit of a float64 in [0, 1], nearly

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BettingInterval:
    """A two-sided betting interval for the mean of randomly sampled items."""

    mean: float
    low: float
    high: float
    n: int


def betting_interval(
    values: Sequence[float], *, bounds: Sequence[float] = (0.0, 1.0), alpha: float = 0.05
) -> BettingInterval:
    """The hedged capital interval for the mean of `values` in `bounds`, in the order given.

    Raises ValueError when there is no value or one lies outside the bounds.
    """
    low, high = bounds
    if not (low < high and 0.0 < alpha < 1.0):
        raise ValueError(f"bounds must be ordered and alpha lie in (0, 1), not {tuple(bounds)} and {alpha}")
    if not len(values):
        raise ValueError("an interval needs at least one value")
    for index, value in enumerate(values):
        if not low <= value <= high:
            raise ValueError(f"values[{index}] is {value}, outside [{low}, {high}]")
    unit = (np.asarray(values, dtype=np.float64)[None, :] - low) / (high - low)
    left, right = betting_bounds(unit, alpha=alpha)
    mean = math.fsum(values) / len(values)
    return BettingInterval(mean, low + (high - low) * float(left[0]), low + (high - low) * float(right[0]), len(values))


def betting_bounds(values_RN: Floats, *, alpha: float = 0.05) -> tuple[Floats, Floats]:
    """Lower and upper ends, each (R,), of the interval of every row of values (R, N) in [0, 1]."""
    bets_RN = _bets(values_RN, alpha)
    low = _lower_end(values_RN, bets_RN, alpha)
    high = 1.0 - _lower_end(1.0 - values_RN, bets_RN, alpha)  # K- of x is K+ of 1 - x
    return np.minimum(low, high), np.maximum(low, high)


def _bets(values_RN: Floats, alpha: float) -> Floats:
    n = values_RN.shape[1]
    counts_N = np.arange(1, n + 1) + 1.0
    means_RN = (0.5 + np.cumsum(values_RN, axis=1)) / counts_N
    variances_RN = (0.25 + np.cumsum((values_RN - means_RN) ** 2, axis=1)) / counts_N
    before_RN = np.concatenate([np.full((len(values_RN), 1), 0.25), variances_RN[:, :-1]], axis=1)
    return np.sqrt(2.0 * math.log(2.0 / alpha) / (n * before_RN))


def _lower_end(values_RN: Floats, bets_RN: Floats, alpha: float) -> Floats:
    """The largest m below which the capital of betting on a larger mean has reached 2 / alpha."""
    goal = math.log(2.0 / alpha)
    low, high = np.zeros(len(values_RN)), np.ones(len(values_RN))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        stakes_RN = np.minimum(bets_RN, (TRUNCATION / middle)[:, None])
        capital = np.log1p(stakes_RN * (values_RN - middle[:, None])).sum(axis=1)
        rejected = capital >= goal
        low, high = np.where(rejected, middle, low), np.where(rejected, high, middle)
    return low
