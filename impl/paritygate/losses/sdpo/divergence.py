"""The divergence of each row and its closed-form gradient, over full, top-k and renormalised distributions."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..buckets import Buckets, Options, bucket_slopes, divergence_of, with_tail
from ..engines import cpp, has_triton
from ..numerics import chunk_rows, log_softmax


class RowDivergence(torch.autograd.Function):
    """(N, V) student and teacher logits, (N,) rows to read -> (N,) float64 nats; the student differentiates twice."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, read: Tensor, options: Options) -> Tensor:
        ctx.options = options
        if fast := engine(student, teacher):
            found, known = fast.divergence(student, teacher, read, *options)
            ctx.save_for_backward(student, teacher, read, *known)
            return found
        ctx.save_for_backward(student, teacher, read)
        values = [_values(*_block(student, teacher, read, i, j), options) for i, j in chunk_rows(student)]
        return torch.cat(values) if values else student.new_zeros(0, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        student, teacher, read, *known = ctx.saved_tensors
        if (fast := engine(student, teacher)) and known and not torch.is_grad_enabled():
            kind, mixture, _, tail = ctx.options
            found = fast.divergence_gradient(student, teacher, read, kind, mixture, tuple(known), grad, tail)
            return found, None, None, None
        blocks: list[Tensor] = []
        for i, j in chunk_rows(student):
            rows = _gradients(*_block(student, teacher, read, i, j), ctx.options)
            scale = grad[i:j, None]
            blocks.append(torch.where(read[i:j, None] & (scale != 0), scale * rows, 0.0).to(student.dtype))
        return (torch.cat(blocks) if blocks else torch.zeros_like(student), None, None, None)


def engine(student: Tensor, teacher: Tensor) -> ModuleType | None:
    """The module whose kernels take these (N, V) logits, outside of graphs that torch compiles, or None."""
    if torch.compiler.is_compiling():
        return None
    if student.is_cuda and has_triton():
        from ..engines.triton import divergence

        return divergence if divergence.serves(student, teacher) else None
    return cpp if cpp.serves(student, teacher) else None


def _block(student: Tensor, teacher: Tensor, read: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    keep = read[start:stop, None]
    return (
        torch.where(keep, student[start:stop], 0.0).double(),
        torch.where(keep, teacher[start:stop], 0.0).double(),
    )


def _buckets(logits: Tensor, log_p: Tensor, kept: Tensor | None, tail: bool) -> Buckets:
    if kept is None:
        return Buckets(log_p, 0.0, None)
    if not tail:
        return Buckets(log_softmax(logits.gather(1, kept)), 0.0, None)
    selected = log_p.gather(1, kept)
    rest = log_p.exp().scatter(1, kept, 0.0).sum(-1)  # summed, not 1 - the kept: a small tail keeps its digits
    return with_tail(selected, rest)


def _values(student: Tensor, teacher: Tensor, options: Options) -> Tensor:
    kept = None if options.top_k is None else lowest_top_k(student, options.top_k)
    p, q = (_buckets(logits, log_softmax(logits), kept, options.tail) for logits in (student, teacher))
    return divergence_of(p, q, options)


def _gradients(student: Tensor, teacher: Tensor, options: Options) -> Tensor:
    """With g = dD/d(bucket) and s = sum_b p_b g_b, entry j has p_j (g_b(j) - s); a capped tail is a constant, g = 0."""
    kept = None if options.top_k is None else lowest_top_k(student, options.top_k)
    log_p = log_softmax(student)
    p = _buckets(student, log_p, kept, options.tail)
    q = _buckets(teacher, log_softmax(teacher), kept, options.tail)
    weighted, total = bucket_slopes(p, q, options)
    if kept is None:
        gradient = weighted - p.log.exp() * total
    elif not options.tail:
        inside = weighted - p.log.exp() * total
        gradient = torch.zeros_like(log_p).scatter(1, kept, inside)
    else:
        outside = torch.ones_like(log_p, dtype=torch.bool).scatter(1, kept, False)
        of_tail = weighted[:, -1:] / p.log[:, -1:].exp()
        gradient = log_p.exp() * (torch.where(outside, of_tail, 0.0) - total)
        gradient = gradient.scatter_add(1, kept, weighted[:, :-1])
    return torch.where(torch.isfinite(total), gradient, torch.nan)


def lowest_top_k(logits: Tensor, k: int) -> Tensor:
    """Indices (n, k), ascending, of the k largest of each row of (n, V); ties go to the lowest index everywhere."""
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    above, level = logits > threshold, logits == threshold
    room = k - above.sum(-1, keepdim=True)
    keep = above | (level & (level.cumsum(-1) <= room))
    slot = torch.where(keep, keep.cumsum(-1) - 1, k)  # what is not kept goes to one slot too many
    entry = torch.arange(logits.shape[1], device=logits.device).expand_as(slot)
    return torch.zeros(logits.shape[0], k + 1, dtype=torch.int64, device=logits.device).scatter_(1, slot, entry)[:, :k]
