"""Group-mean advantage: a rollout's reward against the mean of its own group, not divided by a deviation."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from . import _checks


def group_mean_advantage(rewards: Sequence[float] | NDArray[np.floating]) -> NDArray[np.float64]:
    """`A_i = r_i - mean(r)` for one group of rewards (G,), in exact rational arithmetic rounded once to float64 (G,).

    ValueError: an empty group, anything but one dimension, a reward that is not finite (its position is named).
    Source: GRPO without the division by the standard deviation (arXiv 2503.20783, section 3).
    Obligations: grpo/value, grpo/equal_rewards, grpo/constant, grpo/oracle.
    """
    r = [Fraction(float(reward)) for reward in _checks.rewards("group_mean_advantage", rewards)]
    mean = sum(r, Fraction(0)) / len(r)
    return np.array([float(r_i - mean) for r_i in r], dtype=np.float64)
