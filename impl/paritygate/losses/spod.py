"""SPOD, success-preserving distillation: the KL of an action, or a floor where the student's success is protected."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _spod_ops as ops
from . import _spod_rows as rows
from ._checks import as_mask, refuse_where, result_dtype
from .averaging import check_levels, lengths, token_weights


class SpodLoss(NamedTuple):
    """The scalar loss (differentiable) and, for each action (A,), constants: what it was made of, in nats."""

    loss: Tensor
    gate: Tensor
    student_logprob: Tensor
    teacher_logprob: Tensor
    kl: Tensor
    floor: Tensor


class _Batch(NamedTuple):
    actions: Tensor
    action_index: Tensor
    episode_index: Tensor
    success: Tensor
    tau0: float
    floor_weight: float


def success_preserving_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    actions: Tensor,
    action_index: Tensor,
    episode_index: Tensor,
    success: Tensor,
    *,
    tau0: float = 0.5,
    floor_weight: float = 1.0,
    validate: bool = True,
) -> SpodLoss:
    """SPOD's loss over packed actions: (N, V) logits of any float dtype, the sampled `actions` (N,) int64; in nats.

    `action_index` (N,) and `episode_index` (A,) int64 are nondecreasing from 0; `success` (E,) bool. `kl` and `floor`
    are contributions: 0 where the other term acts, `floor_weight` excluded. The teacher is never differentiated.
    ValueError names the place: shapes, tau0 outside (0, 1], a negative floor_weight; with `validate` (which waits for
    the device) an empty action or episode, an index out of order, a token outside [0, V), a row with NaN, +inf or all
    -inf. Source: arXiv 2610.25034, sections 3 and 4.
    """
    batch = _Batch(actions, action_index, episode_index, success, tau0, floor_weight)
    _check(student_logits, teacher_logits, batch, validate)
    return SpodLoss(*_Spod.apply(student_logits, teacher_logits.detach(), batch, validate))


def success_preserving_loss_and_grad(
    student_logits: Tensor,
    teacher_logits: Tensor,
    actions: Tensor,
    action_index: Tensor,
    episode_index: Tensor,
    success: Tensor,
    *,
    tau0: float = 0.5,
    floor_weight: float = 1.0,
    validate: bool = True,
    out: Tensor | None = None,
) -> tuple[SpodLoss, Tensor]:
    """`success_preserving_loss` and d loss / d student_logits (N, V) in its dtype, without autograd.

    `out` receives the gradient: (N, V) of the student's dtype, `student_logits` itself too. ValueError as the loss.
    """
    student, teacher = student_logits.detach(), teacher_logits.detach()
    batch = _Batch(actions, action_index, episode_index, success, tau0, floor_weight)
    _check(student, teacher, batch, validate)
    if out is None:
        out = torch.empty_like(student)
    elif out.shape != student.shape or out.dtype != student.dtype or out.device != student.device:
        raise ValueError(
            f"spod: out is {tuple(out.shape)} {out.dtype}; {tuple(student.shape)} {student.dtype} is expected"
        )
    with torch.no_grad():
        levels = _levels(batch)
        known = ops.statistics_and_gradient_(
            out.detach(), student, teacher, actions, levels.tokens, levels.success, levels.weights, tau0, floor_weight
        )
        fresh = known is None
        known = ops.statistics(student, teacher, actions) if fresh else known
        if validate:
            ops.refuse_unusable(known, "spod")
        result, weights = _combine(known, batch, levels, result_dtype(student))
        if fresh:
            ops.gradient_(out.detach(), student, teacher, actions, known, weights)
    return result, out


class _Spod(torch.autograd.Function):
    """The loss and its closed-form gradient, in differentiable operations where that is differentiated in turn."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, batch: _Batch, validate: bool) -> SpodLoss:
        known = ops.statistics(student, teacher, batch.actions)
        if validate:
            ops.refuse_unusable(known, "spod")
        result, weights = _combine(known, batch, _levels(batch), result_dtype(student))
        ctx.save_for_backward(student, teacher, batch.actions, known, *weights)
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        student, teacher, actions, known, kl, floor = ctx.saved_tensors
        scale = grad_loss.double()
        if torch.is_grad_enabled():
            gradient = rows.gradient(student, teacher, actions, rows.Weights(kl * scale, floor * scale))
        else:
            gradient = ops.gradient(student, teacher, actions, known, kl * scale, floor * scale)
        return gradient, None, None, None


class _Levels(NamedTuple):
    """Of each action (A,): its number of tokens, whether its episode succeeded, the weight of each token."""

    tokens: Tensor
    success: Tensor
    weights: Tensor


def _levels(batch: _Batch) -> _Levels:
    tokens = lengths(batch.action_index, batch.episode_index.shape[0])
    of_tokens = token_weights(batch.action_index, batch.episode_index, batch.success.shape[0])
    return _Levels(tokens, batch.success.bool()[batch.episode_index], rows.sum_by(of_tokens, tokens) / tokens)


def _combine(known: Tensor, batch: _Batch, levels: _Levels, dtype: torch.dtype) -> tuple[SpodLoss, rows.Weights]:
    """The result, and the weights of each row in the gradient, from the statistics of the rows."""
    _, action_index, _, _, tau0, floor_weight = batch
    tokens, success, weights = levels
    row_kl, row_student, row_teacher = (ops.column(known, x) for x in ("kl", "student_logprob", "teacher_logprob"))
    l_p, l_q = rows.sum_by(row_student, tokens), rows.sum_by(row_teacher, tokens)
    # Row by row, so that equal rows tie exactly whatever the order of summation; inf - inf is NaN, and no protection.
    gate = success & (rows.sum_by(row_teacher - row_student, tokens) < 0)
    kl = torch.where(gate, 0.0, rows.sum_by(row_kl, tokens) / tokens)
    floor = torch.where(gate, (math.log(tau0) - l_p).clamp(min=0.0) / tokens, 0.0)
    loss = (weights * tokens) @ torch.where(gate, floor_weight * floor, kl)
    of_kl = torch.where(gate, 0.0, weights)
    of_floor = torch.where(gate & (l_p < math.log(tau0)), floor_weight * weights, 0.0)
    return (
        SpodLoss(loss.to(dtype), gate, l_p.to(dtype), l_q.to(dtype), kl.to(dtype), floor.to(dtype)),
        rows.Weights(of_kl[action_index], of_floor[action_index]),
    )


def _check(student: Tensor, teacher: Tensor, batch: _Batch, validate: bool) -> None:
    actions, action_index, episode_index, success, tau0, floor_weight = batch
    if not 0.0 < tau0 <= 1.0:
        raise ValueError(f"spod: tau0 is {tau0}; it lies in (0, 1]")
    if not (math.isfinite(floor_weight) and floor_weight >= 0.0):
        raise ValueError(f"spod: floor_weight is {floor_weight}; it is finite and not negative")
    if student.ndim != 2 or student.shape != teacher.shape or actions.shape != student.shape[:1] or success.ndim != 1:
        raise ValueError(
            f"spod: shapes differ: student_logits {tuple(student.shape)}, teacher_logits {tuple(teacher.shape)}, "
            f"actions {tuple(actions.shape)}, success {tuple(success.shape)}; (N, V), (N, V), (N,), (E,) are expected"
        )
    if not (student.is_floating_point() and teacher.is_floating_point()):
        raise ValueError(f"spod: logits are {student.dtype} and {teacher.dtype}; floating point is expected")
    if not validate:
        return
    check_levels(action_index, episode_index, student.shape[0], success.shape[0])
    outside = (actions < 0) | (actions >= student.shape[1])
    refuse_where(outside, actions, "spod: the token", f", outside [0, {student.shape[1]})")


def success_preserving_loss_padded(
    student_logits: Tensor,
    teacher_logits: Tensor,
    actions: Tensor,
    mask: Tensor,
    success: Tensor,
    *,
    tau0: float = 0.5,
    floor_weight: float = 1.0,
) -> SpodLoss:
    """`success_preserving_loss` of padded logits (E, S, T, V), `actions` and `mask` (E, S, T), `success` (E,) bool.

    Positions at mask 0 are never read; an action without a position at mask 1 is padding, and the per-action fields
    (A,) hold the others in order. ValueError as the packed form, and for a mask that is not 0 or 1.
    """
    if student_logits.ndim != 4 or actions.shape != student_logits.shape[:3]:
        raise ValueError(
            f"spod: shapes differ: student_logits {tuple(student_logits.shape)}, actions {tuple(actions.shape)}; "
            "(E, S, T, V) and (E, S, T) are expected"
        )
    read = as_mask(mask, student_logits, "spod")
    if read.shape != actions.shape or teacher_logits.shape != student_logits.shape:
        raise ValueError(
            f"spod: shapes differ: teacher_logits {tuple(teacher_logits.shape)}, mask {tuple(read.shape)}; "
            f"{tuple(student_logits.shape)} and {tuple(actions.shape)} are expected"
        )
    real = read.any(-1)
    number = real.flatten().cumsum(0).view(real.shape) - 1
    return success_preserving_loss(
        student_logits[read],
        teacher_logits[read],
        actions[read],
        number.unsqueeze(-1).expand_as(read)[read],
        real.nonzero()[:, 0],
        success,
        tau0=tau0,
        floor_weight=floor_weight,
    )
