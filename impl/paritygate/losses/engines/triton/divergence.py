"""SDPO's divergences on a GPU by Triton, in float64, by the formulas of divergence.cpp and truncated.cpp."""
# pyright: basic, reportArgumentType=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...buckets import DIVERGENCES, Buckets, Options, divergence_of, logit_slopes, with_tail
from ...numerics import log_softmax
from ..base import contiguous_rows
from .rows import serves as serves  # noqa: PLC0414 - the same logits as SPOD's rows

BLOCK = 512
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
INF = tl.constexpr(float("inf"))


@triton.jit
def _row(pointer, row, stride, at, V):
    return tl.load(pointer + row * stride + at, mask=at < V, other=-INF).to(tl.float64)


@triton.jit
def _shrink(old, new):
    return tl.where(old == new, 1.0, tl.exp(old - new))


@triton.jit
def _finite(maximum):
    return tl.where(maximum == -INF, 0.0, maximum)


@triton.jit
def _log_mixed(w, rest, log_w, t):
    """log(1 - w + w exp(t)) for any t."""
    return tl.where(t < 700.0, tl.log(rest + w * tl.exp(tl.where(t < 700.0, t, 700.0))), t + log_w)


@triton.jit
def divergence_kernel(
    p_ptr, q_ptr, mask_ptr, saved_ptr, share_ptr, p_stride, q_stride, V, KIND: tl.constexpr, WIDE: tl.constexpr
):
    """One program a row: the divergence of two rows over the vocabulary and what its gradient needs (float64)."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(mask_ptr + row) != 0:
        nothing, zero = tl.full((), -INF, tl.float64), tl.full((), 0.0, tl.float64)
        am, bm, sa, sb, cross, there = nothing, nothing, zero, zero, zero, zero
        for start in range(0, V, WIDE):  # of KL(a || b)
            at = start + tl.arange(0, WIDE)
            x, y = _row(p_ptr, row, p_stride, at, V), _row(q_ptr, row, q_stride, at, V)
            a, b = (y, x) if KIND == 0 else (x, y)
            top_a, top_b = tl.maximum(am, tl.max(a, axis=0)), tl.maximum(bm, tl.max(b, axis=0))
            if KIND == 1:  # counted from the entry where the student is largest: see divergence.cpp
                here = tl.max(tl.where(at - start == tl.argmax(a, axis=0), b, -INF), axis=0)
                base = tl.where(top_a > am, _finite(here), there)
                cross += sa * tl.where(am == -INF, 0.0, base - there)
                there = base
            else:
                cross += sa * tl.where(bm == -INF, 0.0, top_b - _finite(bm))
                there = _finite(top_b)
            cross += sa * tl.where(am == -INF, 0.0, _finite(am) - top_a)
            cross *= _shrink(am, top_a)
            sa *= _shrink(am, top_a)
            sb *= _shrink(bm, top_b)
            am, bm = top_a, top_b
            da = a - _finite(am)
            e = tl.exp(da)
            sa += tl.sum(e, axis=0)
            sb += tl.sum(tl.exp(b - _finite(bm)), axis=0)
            cross += tl.sum(tl.where(e > 0.0, e * (da - (b - there)), 0.0), axis=0)
        value, of_p = cross / sa - (there - _finite(bm)) - tl.log(sa) + tl.log(sb), cross / sa
        # Never added up: the maximum may be 65504 and the logarithm of the sum near 0, whose digits the gradient needs.
        pm, qm = (bm, am) if KIND == 0 else (am, bm)
        ps, qs = (tl.log(sb), tl.log(sa)) if KIND == 0 else (tl.log(sa), tl.log(sb))
        if KIND == 1:
            qm = there
        if KIND == 2:
            of_p = zero
            w, rest, log_w, log_rest = (
                tl.load(share_ptr), tl.load(share_ptr + 1), tl.load(share_ptr + 2), tl.load(share_ptr + 3)
            )  # fmt: skip
            of_q = zero
            for start in range(0, V, WIDE):
                at = start + tl.arange(0, WIDE)
                lp = _row(p_ptr, row, p_stride, at, V) - pm - ps
                lq = _row(q_ptr, row, q_stride, at, V) - qm - qs
                mp, mq = tl.exp(lp), tl.exp(lq)
                of_p -= tl.sum(tl.where(mp > 0.0, mp * _log_mixed(w, rest, log_w, lq - lp), 0.0), axis=0)
                of_q -= tl.sum(tl.where(mq > 0.0, mq * _log_mixed(rest, w, log_rest, lp - lq), 0.0), axis=0)
            value = rest * of_p + w * of_q + 0.0 * (pm + ps + qm + qs)  # NaN of a bad row stays
        saved = saved_ptr + row * 6
        tl.store(saved, tl.where(value < 0.0, 0.0, value))
        tl.store(saved + 1, of_p)
        tl.store(saved + 2, pm)
        tl.store(saved + 3, ps)
        tl.store(saved + 4, qm)
        tl.store(saved + 5, qs)


@triton.jit
def divergence_gradient_kernel(
    p_ptr, q_ptr, out_ptr, saved_ptr, scale_ptr, share_ptr, p_stride, q_stride, V, blocks,
    KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program a block of a row: d divergence / d student logits from what the first pass kept."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * WIDE + tl.arange(0, WIDE)
    out = out_ptr + row * V + at
    kind: tl.constexpr = out_ptr.dtype.element_ty
    scale = tl.load(scale_ptr + row)
    if scale == 0.0:
        tl.store(out, tl.zeros((WIDE,), kind), mask=at < V)
    else:
        saved = saved_ptr + row * 6
        dp, dq = (
            _row(p_ptr, row, p_stride, at, V) - tl.load(saved + 2),
            _row(q_ptr, row, q_stride, at, V) - tl.load(saved + 4),
        )
        lp, lq = dp - tl.load(saved + 3), dq - tl.load(saved + 5)
        mass = tl.exp(lp)
        if KIND == 0:
            slope = mass - tl.exp(lq)
        elif KIND == 1:  # where the teacher excludes what the student may do, it is +inf and has no gradient
            slope = tl.where(mass > 0.0, mass * ((dp - dq) - tl.load(saved + 1)), 0.0)
            slope = tl.where(tl.load(saved) == INF, float("nan"), slope)
        else:
            w, rest, log_w = tl.load(share_ptr), tl.load(share_ptr + 1), tl.load(share_ptr + 2)
            against = -_log_mixed(w, rest, log_w, lq - lp) - tl.load(saved + 1)
            slope = tl.where(mass > 0.0, mass * against, 0.0) * rest
        tl.store(out, (scale * slope).to(tl.float32).to(kind), mask=at < V)


@triton.jit
def truncated_kernel(
    p_ptr, q_ptr, mask_ptr, least_ptr, ties_ptr, saved_ptr, kept_ptr, p_stride, q_stride, V, K, WIDE: tl.constexpr
):
    """One program a row: which entries are kept (above `least`, and the first `ties_kept` that equal it), both sums.

    Of each side its maximum, log sum and the share of what is not kept; the indices that are, ascending.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(mask_ptr + row) != 0:
        least, ties_kept = tl.load(least_ptr + row), tl.load(ties_ptr + row)
        nothing, zero = tl.full((), -INF, tl.float64), tl.full((), 0.0, tl.float64)
        pm, qm, ps, qs, p_rest, q_rest = nothing, nothing, zero, zero, zero, zero
        level_before, kept_before = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for start in range(0, V, WIDE):
            at = start + tl.arange(0, WIDE)
            x, y = _row(p_ptr, row, p_stride, at, V), _row(q_ptr, row, q_stride, at, V)
            level = ((x == least) & (at < V)).to(tl.int32)
            mask = (x > least) | ((level == 1) & (level_before + tl.cumsum(level, axis=0) <= ties_kept))
            slot = kept_before + tl.cumsum(mask.to(tl.int32), axis=0) - 1
            tl.store(kept_ptr + row * K + slot, at.to(tl.int64), mask=mask & (slot < K))
            level_before += tl.sum(level, axis=0)
            kept_before += tl.sum(mask.to(tl.int32), axis=0)
            top_p, top_q = tl.maximum(pm, tl.max(x, axis=0)), tl.maximum(qm, tl.max(y, axis=0))
            of_p, of_q = _shrink(pm, top_p), _shrink(qm, top_q)
            pm, qm = top_p, top_q
            ep, eq = tl.exp(x - _finite(pm)), tl.exp(y - _finite(qm))
            ps, qs = ps * of_p + tl.sum(ep, axis=0), qs * of_q + tl.sum(eq, axis=0)
            p_rest = p_rest * of_p + tl.sum(tl.where(mask, 0.0, ep), axis=0)
            q_rest = q_rest * of_q + tl.sum(tl.where(mask, 0.0, eq), axis=0)
        saved = saved_ptr + row * 6
        tl.store(saved, pm)
        tl.store(saved + 1, tl.log(ps))
        tl.store(saved + 2, qm)
        tl.store(saved + 3, tl.log(qs))
        tl.store(saved + 4, p_rest / ps)
        tl.store(saved + 5, q_rest / qs)


@triton.jit
def truncated_gradient_kernel(p_ptr, out_ptr, saved_ptr, scale_ptr, p_stride, V, blocks, WIDE: tl.constexpr):
    """One program a block of a row: the gradient of the entries that are not kept, a multiple of their probability."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * WIDE + tl.arange(0, WIDE)
    out = out_ptr + row * V + at
    kind: tl.constexpr = out_ptr.dtype.element_ty
    saved = saved_ptr + row * 4
    scale, slope = tl.load(scale_ptr + row), tl.load(saved + 3)
    if (scale == 0.0) | (slope == 0.0):
        tl.store(out, tl.zeros((WIDE,), kind), mask=at < V)
    else:
        lp = _row(p_ptr, row, p_stride, at, V) - tl.load(saved + 1) - tl.load(saved + 2)
        tl.store(out, (scale * slope * tl.exp(lp)).to(tl.float32).to(kind), mask=at < V)


def divergence(
    student: Tensor, teacher: Tensor, row_mask: Tensor, options: Options
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As DivergenceEngine.divergence."""
    if options.top_k is not None:
        return _truncated(student, teacher, row_mask, options)
    student, teacher = contiguous_rows(student), contiguous_rows(teacher)
    count, vocabulary = student.shape
    saved = torch.zeros(count, 6, dtype=torch.float64, device=student.device)
    if count:
        divergence_kernel[(count,)](
            student, teacher, row_mask.to(torch.uint8).contiguous(), saved, _share(options.mixture, student),
            student.stride(0), teacher.stride(0), vocabulary, KIND=DIVERGENCES.index(options.divergence), WIDE=BLOCK,
            **OPTIONS,
        )  # fmt: skip
    return saved[:, 0].clone(), (saved,)


def _truncated(
    student: Tensor, teacher: Tensor, row_mask: Tensor, options: Options
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """torch finds the k-th largest of each row, the kernel all else; the few buckets are torch's again."""
    student, teacher = contiguous_rows(student), contiguous_rows(teacher)
    count, vocabulary = student.shape
    assert options.top_k is not None
    best = student.topk(options.top_k, dim=-1).values
    least, ties_kept = best[:, -1].double(), (best == best[:, -1:]).sum(-1, dtype=torch.int32)
    sums = torch.zeros(count, 6, dtype=torch.float64, device=student.device)
    kept = torch.zeros(count, options.top_k, dtype=torch.int64, device=student.device)
    if count:
        truncated_kernel[(count,)](
            student, teacher, row_mask.to(torch.uint8).contiguous(), least, ties_kept, sums, kept, student.stride(0),
            teacher.stride(0), vocabulary, options.top_k, WIDE=BLOCK, **OPTIONS,
        )  # fmt: skip
    sides: list[Buckets] = []
    for i, logits in enumerate((student, teacher)):
        chosen = logits.gather(1, kept).double()
        if options.tail:
            log = chosen - sums[:, 2 * i, None] - sums[:, 2 * i + 1, None]
            sides.append(with_tail(chosen, log, sums[:, 4 + i]))
        else:
            sides.append(Buckets(log_softmax(chosen), chosen, None))
    p, q = sides
    values = torch.where(row_mask, divergence_of(p, q, options), 0.0)
    slopes, outside = logit_slopes(p, q, options)
    return values, (torch.stack([values, sums[:, 0], sums[:, 1], outside[:, 0]], dim=1), kept, slopes)


def divergence_gradient(
    student: Tensor, teacher: Tensor, row_mask: Tensor, options: Options, saved: tuple[Tensor, ...], scale: Tensor
) -> Tensor:
    """As DivergenceEngine.divergence_gradient."""
    count, vocabulary = student.shape
    out = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    blocks = triton.cdiv(vocabulary, BLOCK)
    student, teacher = contiguous_rows(student), contiguous_rows(teacher)
    scale = torch.where(row_mask, scale.double(), 0.0)
    if count and len(saved) == 3:
        rows, kept, slopes = saved
        truncated_gradient_kernel[(count * blocks,)](
            student, out, rows, scale, student.stride(0), vocabulary, blocks, WIDE=BLOCK, **OPTIONS
        )
        inside = torch.where(scale[:, None] == 0, 0.0, scale[:, None] * slopes)
        out.scatter_(1, kept, inside.to(torch.float32).to(out.dtype))
    elif count:
        divergence_gradient_kernel[(count * blocks,)](
            student, teacher, out, saved[0], scale, _share(options.mixture, student),
            student.stride(0), teacher.stride(0), vocabulary, blocks,
            KIND=DIVERGENCES.index(options.divergence), WIDE=BLOCK, **OPTIONS,
        )  # fmt: skip
    return out


def _share(mixture: float, like: Tensor) -> Tensor:
    """The teacher's weight, the student's, and their logarithms: float64 would not pass as arguments of a kernel."""
    both = (mixture, 1.0 - mixture)
    return torch.tensor([*both, *map(math.log, both)], dtype=torch.float64, device="cpu").to(
        like.device, non_blocking=True
    )
