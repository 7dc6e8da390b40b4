"""SPOD, success-preserving distillation: the KL of an action, or a floor where the student's success is protected."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _spod_rows as rows
from ._checks import refuse_where, result_dtype, rows_are_distributions
from .averaging import check_levels, lengths, token_weights


class SpodLoss(NamedTuple):
    """The scalar loss (differentiable) and, for each action (A,), constants: what it was made of, in nats."""

    loss: Tensor
    gate: Tensor
    student_logprob: Tensor
    teacher_logprob: Tensor
    kl: Tensor
    floor: Tensor


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
    """SPOD's loss over packed actions: (N, V) logits of any float dtype and the sampled `actions` (N,) int64, in nats.

    `action_index` (N,) and `episode_index` (A,) int64 are nondecreasing from 0; `success` (E,) bool. `kl` and `floor` are
    contributions: 0 where the other term acts, `floor_weight` excluded. The teacher is never differentiated.
    ValueError names the place: shapes, tau0 outside (0, 1], a negative floor_weight; with `validate` (which waits for the
    device) an empty action or episode, an index out of order, a token outside [0, V), a row with NaN, +inf or all -inf.
    Source: arXiv 2610.25034, sections 3 and 4.
    """
    batch = (student_logits, teacher_logits.detach(), actions, action_index, episode_index, success)
    _check(*batch, tau0, floor_weight, validate)
    return SpodLoss(*_Spod.apply(*batch, tau0, floor_weight))


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

    `out` receives the gradient: (N, V) of the student's dtype, and may be `student_logits` itself. ValueError as the loss.
    """
    student, teacher = student_logits.detach(), teacher_logits.detach()
    _check(student, teacher, actions, action_index, episode_index, success, tau0, floor_weight, validate)
    if out is None:
        out = torch.empty_like(student)
    elif out.shape != student.shape or out.dtype != student.dtype or out.device != student.device:
        raise ValueError(f"spod: out is {tuple(out.shape)} {out.dtype}; {tuple(student.shape)} {student.dtype} is expected")
    with torch.no_grad():
        result, kl_weight, floor_weights = _forward(
            student, teacher, actions, action_index, episode_index, success, tau0, floor_weight
        )
        rows.gradient_into(out.detach(), student, teacher, actions, kl_weight, floor_weights)
    return result, out


class _Spod(torch.autograd.Function):
    """The loss with its closed-form gradient; `backward` is written in differentiable operations, so it differentiates twice."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        actions: Tensor,
        action_index: Tensor,
        episode_index: Tensor,
        success: Tensor,
        tau0: float,
        floor_weight: float,
    ) -> SpodLoss:
        result, kl_weight, floor_weights = _forward(
            student, teacher, actions, action_index, episode_index, success, tau0, floor_weight
        )
        ctx.save_for_backward(student, teacher, actions, kl_weight, floor_weights)
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        student, teacher, actions, kl_weight, floor_weights = ctx.saved_tensors
        scale = grad_loss.double()
        gradient = rows.gradient(student, teacher, actions, kl_weight * scale, floor_weights * scale)
        return (gradient, *[None] * 7)


def _forward(
    student: Tensor,
    teacher: Tensor,
    actions: Tensor,
    action_index: Tensor,
    episode_index: Tensor,
    success: Tensor,
    tau0: float,
    floor_weight: float,
) -> tuple[SpodLoss, Tensor, Tensor]:
    """The result and, for each row (N,) float64, the weights of its `p - q` and of its `p - onehot`."""
    row_kl, row_student, row_teacher = rows.statistics(student, teacher, actions)
    count = episode_index.shape[0]
    tokens = lengths(action_index, count)
    l_p, l_q = rows.sum_by(row_student, tokens), rows.sum_by(row_teacher, tokens)
    # Row by row, so that equal rows tie exactly whatever the order of summation; inf - inf is NaN, and no protection.
    gate = success.bool()[episode_index] & (rows.sum_by(row_teacher - row_student, tokens) < 0)
    kl = torch.where(gate, 0.0, rows.sum_by(row_kl, tokens) / tokens)
    floor = torch.where(gate, (math.log(tau0) - l_p).clamp(min=0.0) / tokens, 0.0)
    weights = token_weights(action_index, episode_index, success.shape[0])
    per_action = torch.where(gate, floor_weight * floor if floor_weight else 0.0, kl)
    loss = rows.sum_by(weights, tokens) @ per_action
    open_row, floor_row = ~gate[action_index], (gate & (l_p < math.log(tau0)))[action_index]
    dtype = result_dtype(student)
    return (
        SpodLoss(loss.to(dtype), gate, l_p.to(dtype), l_q.to(dtype), kl.to(dtype), floor.to(dtype)),
        torch.where(open_row, weights, 0.0),
        torch.where(floor_row, floor_weight * weights, 0.0),
    )


def _check(
    student: Tensor,
    teacher: Tensor,
    actions: Tensor,
    action_index: Tensor,
    episode_index: Tensor,
    success: Tensor,
    tau0: float,
    floor_weight: float,
    validate: bool,
) -> None:
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
    if validate:
        check_levels(action_index, episode_index, student.shape[0], success.shape[0])
        refuse_where((actions < 0) | (actions >= student.shape[1]), actions, "spod: the token", f", outside [0, {student.shape[1]})")
        rows_are_distributions(student, "spod: student_logits")
        rows_are_distributions(teacher, "spod: teacher_logits")
