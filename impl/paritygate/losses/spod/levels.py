"""SPOD above the rows: which actions are protected, what each adds to the loss, and what that makes of its rows."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..averaging import check_levels, lengths, token_weights
from ..checks import refuse_where
from ..gate import Levels, Weights, action_terms, sum_by


class SpodLoss(NamedTuple):
    """The scalar loss (differentiable) and, for each action (A,), constants: what it was made of, in nats."""

    loss: Tensor
    gate: Tensor
    student_logprob: Tensor
    teacher_logprob: Tensor
    kl: Tensor
    floor: Tensor


class SpodBatch(NamedTuple):
    """What comes with the logits: tokens, what action and episode they belong to, and the options."""

    actions: Tensor
    action_index: Tensor
    episode_index: Tensor
    success: Tensor
    tau0: float
    floor_weight: float


def levels_of(batch: SpodBatch) -> Levels:
    """The actions of a batch."""
    tokens = lengths(batch.action_index, batch.episode_index.shape[0])
    of_tokens = token_weights(batch.action_index, batch.episode_index, batch.success.shape[0])
    return Levels(tokens, batch.success.bool()[batch.episode_index], sum_by(of_tokens, tokens) / tokens)


def combine(row_stats: Tensor, batch: SpodBatch, levels: Levels, dtype: torch.dtype) -> tuple[SpodLoss, Weights]:
    """The result, and the weights of each row in the gradient, from the statistics of the rows.

    Obligations: spod/loss, spod/negative_control.
    """
    terms = action_terms(row_stats, levels, batch.tau0, batch.floor_weight)
    loss = (levels.weights * levels.tokens) @ torch.where(terms.gate, batch.floor_weight * terms.floor, terms.kl)
    outputs = (x.to(dtype) for x in (terms.student_logprob, terms.teacher_logprob, terms.kl, terms.floor))
    row_weights = Weights(terms.kl_weight[batch.action_index], terms.floor_weight[batch.action_index])
    return SpodLoss(loss.to(dtype), terms.gate, *outputs), row_weights


def check_batch(batch: SpodBatch, vocabulary: int, validate: bool) -> None:
    """ValueError naming the place in what comes with the logits: options, and with `validate` indices and tokens."""
    actions, action_index, episode_index, success, tau0, floor_weight = batch
    if not 0.0 < tau0 <= 1.0:
        raise ValueError(f"spod: tau0 is {tau0}; it lies in (0, 1]")
    if not (math.isfinite(floor_weight) and floor_weight >= 0.0):
        raise ValueError(f"spod: floor_weight is {floor_weight}; it is finite and not negative")
    if not validate:
        return
    check_levels(action_index, episode_index, actions.shape[0], success.shape[0])
    if actions.dtype != torch.int64:
        raise ValueError(f"spod: actions are {actions.dtype}; int64 is expected")
    outside = (actions < 0) | (actions >= vocabulary)
    refuse_where(outside, actions, "spod: the token", f", outside [0, {vocabulary})")
