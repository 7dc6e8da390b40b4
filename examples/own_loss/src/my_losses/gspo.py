"""GSPO in torch: one clipped importance ratio a sequence."""

import torch
from torch import Tensor


def loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float = 3e-4,
    high: float = 4e-4,
) -> Tensor:
    """Minus the mean over sequences with a token of min(s A, clip(s) A), in nats; gradients reach `logprobs` alone."""
    row_mask = mask == 1
    difference = torch.where(row_mask, logprobs.double() - old_logprobs.detach().double(), 0.0)
    ratio = (difference.sum(-1) / row_mask.sum(-1).clamp(min=1)).exp()
    weight = advantages.detach().double()
    gain = torch.minimum(ratio * weight, ratio.clamp(1 - low, 1 + high) * weight)
    some = row_mask.any(-1)
    return -torch.where(some, gain, 0.0).sum() / some.sum().clamp(min=1)


def advantages(group):
    """For an arm of an experiment: one advantage a token, minus the gradient of the loss where the tokens were sampled.

    group: rollouts of one task, each with composite, mask (L,) and logprobs (L,), nats. Composites are centred.
    """
    size = max(len(rollout.mask) for rollout in group)
    mask = torch.zeros(len(group), size, dtype=torch.float64)
    logprobs = torch.zeros(len(group), size, dtype=torch.float64)
    for row, rollout in enumerate(group):
        mask[row, : len(rollout.mask)] = torch.tensor(rollout.mask)
        logprobs[row, : len(rollout.mask)] = torch.tensor(rollout.logprobs)
    composites = torch.tensor([rollout.composite for rollout in group], dtype=torch.float64)
    leaf = logprobs.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, logprobs, composites - composites.mean(), mask), leaf)
    return [(-row[: len(rollout.mask)]).tolist() for row, rollout in zip(gradient, group, strict=True)]
