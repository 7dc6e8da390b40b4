"""Group-mean advantage: a rollout's reward against the mean of its own group, not divided by a deviation."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


def group_mean_advantage(rewards: Sequence[float] | NDArray[np.floating]) -> NDArray[np.float64]:
    """`A_i = r_i - mean(r)` for one group of rewards (G,), in exact rational arithmetic rounded once to float64 (G,).

    ValueError: an empty group, anything but one dimension, a reward that is not finite (its position is named).
    Source: GRPO without the division by the standard deviation (arXiv 2503.20783, section 3).
    """
    group = np.asarray(rewards, dtype=np.float64)
    if group.ndim != 1:
        raise ValueError(f"group_mean_advantage: rewards have shape {group.shape}; one group of shape (G,) is expected")
    if group.size == 0:
        raise ValueError("group_mean_advantage: the group is empty")
    for i, reward in enumerate(group):
        if not math.isfinite(reward):
            raise ValueError(f"group_mean_advantage: the reward at position {i} is {reward}")
    exact = [Fraction(float(reward)) for reward in group]
    mean = sum(exact, Fraction(0)) / len(exact)
    return np.array([float(reward - mean) for reward in exact], dtype=np.float64)
