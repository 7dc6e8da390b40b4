"""SPOD above the rows: which actions are protected, what each adds to the loss, and what that makes of its rows."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import _spod_ops as ops
from . import _spod_rows as rows
from ._checks import refuse_where
from .averaging import check_levels, lengths, token_weights


class SpodLoss(NamedTuple):
    """The scalar loss (differentiable) and, for each action (A,), constants: what it was made of, in nats."""

    loss: Tensor
    gate: Tensor
    student_logprob: Tensor
    teacher_logprob: Tensor
    kl: Tensor
    floor: Tensor


class Batch(NamedTuple):
    """What comes with the logits: tokens, what action and episode they belong to, and the options."""

    actions: Tensor
    action_index: Tensor
    episode_index: Tensor
    success: Tensor
    tau0: float
    floor_weight: float


class Levels(NamedTuple):
    """Of each action (A,): its number of tokens, whether its episode succeeded, the weight of each token."""

    tokens: Tensor
    success: Tensor
    weights: Tensor


def levels_of(batch: Batch) -> Levels:
    """The actions of a batch."""
    tokens = lengths(batch.action_index, batch.episode_index.shape[0])
    of_tokens = token_weights(batch.action_index, batch.episode_index, batch.success.shape[0])
    return Levels(tokens, batch.success.bool()[batch.episode_index], rows.sum_by(of_tokens, tokens) / tokens)


class Parts(NamedTuple):
    """Of each action (A,): what the result tells of it, and the factors of `p - q` and `p - onehot` in its rows."""

    gate: Tensor
    student_logprob: Tensor
    teacher_logprob: Tensor
    kl: Tensor
    floor: Tensor
    of_kl: Tensor
    of_floor: Tensor


def parts_of(known: Tensor, levels: Levels, tau0: float, floor_weight: float) -> Parts:
    """What the statistics (N, 9) of the rows of some actions make of these actions."""
    tokens, success, weights = levels
    row_kl, row_student, row_teacher = (ops.column(known, x) for x in ("kl", "student_logprob", "teacher_logprob"))
    l_p, l_q = rows.sum_by(row_student, tokens), rows.sum_by(row_teacher, tokens)
    # Row by row, so that equal rows tie exactly whatever the order of summation; inf - inf is NaN, and no protection.
    gate = success & (rows.sum_by(row_teacher - row_student, tokens) < 0)
    kl = torch.where(gate, 0.0, rows.sum_by(row_kl, tokens) / tokens)
    floor = torch.where(gate, (math.log(tau0) - l_p).clamp(min=0.0) / tokens, 0.0)
    of_kl = torch.where(gate, 0.0, weights)
    of_floor = torch.where(gate & (l_p < math.log(tau0)), floor_weight * weights, 0.0)
    return Parts(gate, l_p, l_q, kl, floor, of_kl, of_floor)


def combine(known: Tensor, batch: Batch, levels: Levels, dtype: torch.dtype) -> tuple[SpodLoss, rows.Weights]:
    """The result, and the weights of each row in the gradient, from the statistics of the rows."""
    parts = parts_of(known, levels, batch.tau0, batch.floor_weight)
    loss = (levels.weights * levels.tokens) @ torch.where(parts.gate, batch.floor_weight * parts.floor, parts.kl)
    told = (x.to(dtype) for x in (parts.student_logprob, parts.teacher_logprob, parts.kl, parts.floor))
    of_rows = rows.Weights(parts.of_kl[batch.action_index], parts.of_floor[batch.action_index])
    return SpodLoss(loss.to(dtype), parts.gate, *told), of_rows


def check_batch(batch: Batch, vocabulary: int, validate: bool) -> None:
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
