"""Rows by torch in float64, a few at a time: what any faster engine has to agree with, and what takes everything."""

import torch
from torch import Tensor

from ..buckets import Buckets, Options, divergence_of, logit_slopes, with_tail
from ..gate import Weights
from ..numerics import chunk_rows, kl_divergence, log_softmax
from ..row_stats import RowStat


def serves(student: Tensor, teacher: Tensor) -> bool:
    """All (N, V) logits, on any device."""
    del student, teacher
    return True


# SPOD's rows


def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    """The RowStat columns of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions; sums are not kept."""
    row_stats = torch.zeros(student.shape[0], len(RowStat), dtype=torch.float64, device=student.device)
    row_stats[:, RowStat.STUDENT_MAXIMUM] = student.amax(-1).double()
    row_stats[:, RowStat.TEACHER_MAXIMUM] = teacher.amax(-1).double()
    for start, stop in chunk_rows(student):
        log_p = log_softmax(student[start:stop].double())
        log_q = log_softmax(teacher[start:stop].double())
        picked = actions[start:stop, None]
        row_stats[start:stop, RowStat.KL] = kl_divergence(log_q, log_p)
        row_stats[start:stop, RowStat.STUDENT_LOGPROB] = log_p.gather(1, picked)[:, 0]
        row_stats[start:stop, RowStat.TEACHER_LOGPROB] = log_q.gather(1, picked)[:, 0]
    return row_stats


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, row_stats: Tensor, coefficients: Tensor
) -> None:
    """As RowEngine.gradient_; c0 is taken to be c1 + c2, and the statistics are made again."""
    del row_stats
    weights = Weights(coefficients[:, 1], coefficients[:, 2])
    for start, stop in chunk_rows(student):
        out[start:stop] = _gradient(student, teacher, actions, weights, slice(start, stop))


def gradient(student: Tensor, teacher: Tensor, actions: Tensor, weights: Weights) -> Tensor:
    """`weights.kl (p - q) + weights.floor (p - onehot)`, (N, V) in the student's dtype, differentiable."""
    blocks = [_gradient(student, teacher, actions, weights, slice(*bounds)) for bounds in chunk_rows(student)]
    return torch.cat(blocks)


def _gradient(student: Tensor, teacher: Tensor, actions: Tensor, weights: Weights, rows: slice) -> Tensor:
    p, q = (log_softmax(logits[rows].double()).exp() for logits in (student, teacher))
    onehot = torch.zeros_like(q).scatter_(1, actions[rows, None], 1.0)
    both = weights.kl[rows, None] * (p - q) + weights.floor[rows, None] * (p - onehot)
    return both.to(student.dtype)


# SDPO's divergences


def divergence(
    student: Tensor, teacher: Tensor, row_mask: Tensor, options: Options
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As DivergenceEngine.divergence; nothing is saved."""
    values = [_values(*_block(student, teacher, row_mask, i, j), options) for i, j in chunk_rows(student)]
    return torch.cat(values) if values else student.new_zeros(0, dtype=torch.float64), ()


def divergence_gradient(
    student: Tensor, teacher: Tensor, row_mask: Tensor, options: Options, saved: tuple[Tensor, ...], scale: Tensor
) -> Tensor:
    """As DivergenceEngine.divergence_gradient; differentiable in the student and in the scale."""
    del saved
    blocks: list[Tensor] = []
    for i, j in chunk_rows(student):
        rows, factor = _gradients(*_block(student, teacher, row_mask, i, j), options), scale[i:j, None]
        blocks.append(torch.where(row_mask[i:j, None] & (factor != 0), factor * rows, 0.0).to(student.dtype))
    return torch.cat(blocks) if blocks else torch.zeros_like(student)


def _block(student: Tensor, teacher: Tensor, row_mask: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    mask = row_mask[start:stop, None]
    return (
        torch.where(mask, student[start:stop], 0.0).double(),
        torch.where(mask, teacher[start:stop], 0.0).double(),
    )


def _buckets(logits: Tensor, log_p: Tensor, kept: Tensor | None, tail: bool) -> Buckets:
    if kept is None:
        return Buckets(log_p, logits, None)
    chosen = logits.gather(1, kept)
    if not tail:
        return Buckets(log_softmax(chosen), chosen, None)
    rest = log_p.exp().scatter(1, kept, 0.0).sum(-1)  # summed, not 1 - the kept: a small tail keeps its digits
    return with_tail(chosen, log_p.gather(1, kept), rest)


def _values(student: Tensor, teacher: Tensor, options: Options) -> Tensor:
    kept = kept_entries(student, teacher, options)
    p, q = (_buckets(logits, log_softmax(logits), kept, options.tail) for logits in (student, teacher))
    return divergence_of(p, q, options)


def _gradients(student: Tensor, teacher: Tensor, options: Options) -> Tensor:
    kept = kept_entries(student, teacher, options)
    log_p = log_softmax(student)
    p = _buckets(student, log_p, kept, options.tail)
    q = _buckets(teacher, log_softmax(teacher), kept, options.tail)
    inside, outside = logit_slopes(p, q, options)
    if kept is None:
        return inside
    return (log_p.exp() * outside).scatter(1, kept, inside)


def kept_entries(student: Tensor, teacher: Tensor, options: Options) -> Tensor | None:
    """Indices (n, k) of the entries that are told apart, of logits (n, V); None where all are.

    Obligations: sdpo/teacher_top_k.
    """
    if options.top_k is None:
        return None
    return lowest_top_k(teacher if options.top_k_of == "teacher" else student, options.top_k)


def lowest_top_k(logits: Tensor, k: int) -> Tensor:
    """Indices (n, k), ascending, of the k largest of each row of (n, V); ties go to the lowest index everywhere."""
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    above, level = logits > threshold, logits == threshold
    ties_kept = k - above.sum(-1, keepdim=True)
    mask = above | (level & (level.cumsum(-1) <= ties_kept))
    slot = torch.where(mask, mask.cumsum(-1) - 1, k)  # what is not kept goes to one slot too many
    entry = torch.arange(logits.shape[1], dtype=torch.int64, device=logits.device).expand_as(slot)
    return torch.zeros(logits.shape[0], k + 1, dtype=torch.int64, device=logits.device).scatter_(1, slot, entry)[:, :k]
