"""SPOD, success-preserving distillation: the KL of an action, or a floor where the student's success is protected."""

from typing import Any

import torch
from torch import Tensor

from ..checks import as_mask, result_dtype
from ..engines import float64, memory
from ..gate import Weights
from . import row_ops
from .fused import FusedSpod, Head, chunk_rows
from .levels import SpodBatch, SpodLoss, check_batch, combine, levels_of


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
    Obligations: spod/loss, spod/gradient, spod/factor, spod/padded_vocabulary.
    """
    batch = SpodBatch(actions, action_index, episode_index, success, tau0, floor_weight)
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
    Obligations: spod/in_place.
    """
    student, teacher = student_logits.detach(), teacher_logits.detach()
    batch = SpodBatch(actions, action_index, episode_index, success, tau0, floor_weight)
    _check(student, teacher, batch, validate)
    if out is None:
        out = memory.buffer(student.shape, student, student.dtype)
    elif out.shape != student.shape or out.dtype != student.dtype or out.device != student.device:
        raise ValueError(
            f"spod: out is {tuple(out.shape)} {out.dtype}; {tuple(student.shape)} {student.dtype} is expected"
        )
    with torch.no_grad():
        levels = levels_of(batch)
        row_stats = row_ops.statistics_and_gradient_(
            out.detach(), student, teacher, actions, levels, tau0, floor_weight
        )
        one_pass = row_stats is not None
        row_stats = row_stats if one_pass else row_ops.statistics(student, teacher, actions)
        if validate:
            row_ops.refuse_unusable(row_stats, "spod")
        result, weights = combine(row_stats, batch, levels, result_dtype(student))
        if not one_pass:
            row_ops.gradient_(out.detach(), student, teacher, actions, row_stats, weights)
    return result, out


def fused_linear_success_preserving_loss(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    actions: Tensor,
    action_index: Tensor,
    episode_index: Tensor,
    success: Tensor,
    *,
    tau0: float = 0.5,
    floor_weight: float = 1.0,
    validate: bool = True,
    chunk_tokens: int | None = None,
    exact_teacher_logprob: bool = True,
) -> SpodLoss:
    """`success_preserving_loss` of `hidden @ head.T`, hidden states (N, D) and heads (V, D), never all (N, V) at once.

    Differentiable once in the student's hidden states and head: the gradients are made with the loss, kept in float32,
    and handed over by one backward. The teacher's width D may differ. `chunk_tokens` rows of logits are held at once
    (by default 32 MiB of them), twice; on the CPU their memory, and a freed gradient's, waits for the next call.
    `exact_teacher_logprob=False` stops reading the teacher where an action is protected already: its
    `teacher_logprob` is then an upper bound, the rest is the same. Gates are read by the host, which waits for the
    device. ValueError as `success_preserving_loss`, and for shapes or dtypes that do not fit.
    Obligations: spod/fused, spod/factor.
    """
    batch = SpodBatch(actions, action_index, episode_index, success, tau0, floor_weight)
    student, teacher = (student_hidden, student_head), (teacher_hidden.detach(), teacher_head.detach())
    _check_heads(student, teacher, batch, chunk_tokens)
    check_batch(batch, student_head.shape[0], validate)
    kind = student_hidden.device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        student, teacher = ((hidden.to(low), head.to(low)) for hidden, head in (student, teacher))
    most = chunk_tokens or chunk_rows(student_head.shape[0], student[0].dtype)
    with torch.autocast(kind, enabled=False):
        return SpodLoss(*FusedSpod.apply(*student, Head(*teacher), batch, most, exact_teacher_logprob, validate))


def _check_heads(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], batch: SpodBatch, chunk_tokens: int | None
) -> None:
    shapes = [tuple(x.shape) for x in (*student, *teacher)]
    count, vocabulary = student[0].shape[:1], student[1].shape[:1]
    if (
        any(len(shape) != 2 for shape in shapes)
        or shapes[0][1] != shapes[1][1]
        or shapes[2][1] != shapes[3][1]
        or (teacher[0].shape[:1], teacher[1].shape[:1], batch.actions.shape) != (count, vocabulary, count)
        or batch.success.ndim != 1
    ):
        raise ValueError(
            f"spod: shapes differ: student {shapes[0]} and {shapes[1]}, teacher {shapes[2]} and {shapes[3]}, "
            f"actions {tuple(batch.actions.shape)}; (N, D) and (V, D), twice, and (N,) are expected"
        )
    dtypes = {x.dtype for x in (*student, *teacher)}
    if len(dtypes) > 1 or not student[0].is_floating_point():
        raise ValueError(
            f"spod: hidden states and heads are {', '.join(map(str, dtypes))}; one float dtype is expected"
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"spod: chunk_tokens is {chunk_tokens}; it is at least 1")


class _Spod(torch.autograd.Function):
    """The loss and its closed-form gradient, in differentiable operations where that is differentiated in turn."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, batch: SpodBatch, validate: bool) -> SpodLoss:
        row_stats = row_ops.statistics(student, teacher, batch.actions)
        if validate:
            row_ops.refuse_unusable(row_stats, "spod")
        result, weights = combine(row_stats, batch, levels_of(batch), result_dtype(student))
        ctx.save_for_backward(student, teacher, batch.actions, row_stats, *weights)
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        student, teacher, actions, row_stats, kl, floor = ctx.saved_tensors
        scale = grad_loss.double()
        if torch.is_grad_enabled():
            gradient = float64.gradient(student, teacher, actions, Weights(kl * scale, floor * scale))
        else:
            gradient = row_ops.gradient(student, teacher, actions, row_stats, kl * scale, floor * scale)
        return gradient, None, None, None


def _check(student: Tensor, teacher: Tensor, batch: SpodBatch, validate: bool) -> None:
    shapes = (batch.actions.shape, batch.success.ndim)
    if student.ndim != 2 or student.shape != teacher.shape or shapes != (student.shape[:1], 1):
        raise ValueError(
            f"spod: shapes differ: student_logits {tuple(student.shape)}, teacher_logits {tuple(teacher.shape)}, "
            f"actions {tuple(batch.actions.shape)}, success {tuple(batch.success.shape)}; "
            "(N, V), (N, V), (N,), (E,) are expected"
        )
    if not (student.is_floating_point() and teacher.is_floating_point()):
        raise ValueError(f"spod: logits are {student.dtype} and {teacher.dtype}; floating point is expected")
    check_batch(batch, student.shape[1], validate)


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
    Obligations: spod/padded.
    """
    if student_logits.ndim != 4 or actions.shape != student_logits.shape[:3]:
        raise ValueError(
            f"spod: shapes differ: student_logits {tuple(student_logits.shape)}, actions {tuple(actions.shape)}; "
            "(E, S, T, V) and (E, S, T) are expected"
        )
    token_mask = as_mask(mask, student_logits, "spod")
    if token_mask.shape != actions.shape or teacher_logits.shape != student_logits.shape:
        raise ValueError(
            f"spod: shapes differ: teacher_logits {tuple(teacher_logits.shape)}, mask {tuple(token_mask.shape)}; "
            f"{tuple(student_logits.shape)} and {tuple(actions.shape)} are expected"
        )
    real = token_mask.any(-1)
    number = real.flatten().cumsum(0).view(real.shape) - 1
    return success_preserving_loss(
        student_logits[token_mask],
        teacher_logits[token_mask],
        actions[token_mask],
        number.unsqueeze(-1).expand_as(token_mask)[token_mask],
        real.nonzero()[:, 0],
        success,
        tau0=tau0,
        floor_weight=floor_weight,
    )
