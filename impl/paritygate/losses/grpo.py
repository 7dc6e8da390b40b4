"""Group-mean advantage: a rollout's reward against the mean of its own group, not divided by a deviation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import refuse_where
from .numerics import HUGE


def group_mean_advantage(rewards: Tensor | Sequence[float]) -> Tensor:
    """`A_i = r_i - mean(r)` within each group of rewards (..., G), constants in float64 of the same shape and device.

    Centred on the group's first reward before the mean is taken, so that equal rewards give exact zeros.
    ValueError: an empty group, no group dimension, a reward that is not finite or whose advantage is beyond float64
    (its position is named).
    Source: GRPO without the division by the standard deviation (arXiv 2503.20783, section 3).
    Obligations: grpo/value, grpo/equal_rewards, grpo/constant.
    """
    if not isinstance(rewards, Tensor):
        rewards = torch.as_tensor(rewards, dtype=torch.float64)
    group = rewards.double().detach()
    if group.ndim == 0:
        raise ValueError("group_mean_advantage: rewards are a single number; groups of shape (..., G) are expected")
    if group.shape[-1] == 0:
        raise ValueError(f"group_mean_advantage: the group is empty: rewards have shape {tuple(group.shape)}")
    refuse_where(~torch.isfinite(group), group, "group_mean_advantage: the reward")
    # G differences of the largest rewards may sum to more than float64 holds: then all is divided by a power of two
    smaller = 2.0 ** -(group.shape[-1].bit_length() + 1)
    largest = group.abs().amax(-1, keepdim=True)
    scale = torch.ones_like(largest).masked_fill(largest > HUGE, smaller)
    scaled = group * scale
    centred = scaled - scaled[..., :1]
    advantage = (centred - centred.mean(dim=-1, keepdim=True)) / scale
    beyond = ~torch.isfinite(advantage)
    refuse_where(beyond, group, "group_mean_advantage: the reward", ", and its advantage beyond float64")
    return advantage
