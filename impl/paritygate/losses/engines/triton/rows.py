"""The rows on a GPU by Triton: statistics in one reading, gradients in another; the same numbers as the C++ engine's.

One program a row, or a block of one: ragged actions need no padding, no sum crosses programs, so results are the same
every time. Maximum and sum are kept apart, sums in float64 from block to block. While |p - q| <= NEAR along a row, the
KL and p - q come from the small differences themselves (see rows.hpp, whose formulas these are).
"""
# pyright: basic, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...row_stats import RowStat
from ..base import DTYPES, contiguous_rows

BLOCK = {"statistics_kernel": 4096, "gradient_kernel": 2048}  # entries a program holds at once
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
NEAR = tl.constexpr(0.25)
LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _curvature(u, rest):
    """exp(u) - 1 - u by its series, |u| <= 1/2; `rest` continues it beyond u^6."""
    y = rest * (u * (1.0 / 7)) + 1.0
    y = y * (u * (1.0 / 6)) + 1.0
    y = y * (u * (1.0 / 5)) + 1.0
    y = y * (u * (1.0 / 4)) + 1.0
    y = y * (u * (1.0 / 3)) + 1.0
    return y * (u * u * 0.5)


@triton.jit
def _expm1(u):
    """exp(u) - 1, |u| <= 1/2."""
    y = u * (1.0 / 9) + 1.0
    y = y * (u * (1.0 / 8)) + 1.0
    return u + _curvature(u, y)


@triton.jit
def _sum(x):
    """In float64: in float32 a hundred thousand small ones beside a 1 are nothing."""
    return tl.sum(x.to(tl.float64), axis=0)


@triton.jit
def _difference(x, y):
    return tl.where((x == -INF) & (y == -INF), 0.0, x - y)


@triton.jit
def _factor(old, new):
    """By how much a sum shrinks when its maximum rises; 1 where both are -inf."""
    return tl.where(old == new, 1.0, _exp(old - new)).to(tl.float64)


@triton.jit
def _finish(pm, qm, qs, slope, curve):
    """What the near sums say of the student: its sum, and the cross term."""
    some = qm > -INF
    ps = (qs + slope + curve) * _exp(tl.where(some, qm - pm, 0.0)).to(tl.float64)
    return tl.where(some, ps, 0.0), tl.where(some, qs * tl.where(some, pm - qm, 0.0).to(tl.float64) - slope, 0.0)


@triton.jit
def statistics_kernel(p_ptr, q_ptr, out_ptr, p_stride, q_stride, V, WIDE: tl.constexpr):
    """One program a row: what the row's KL and log-probabilities are made of, maximum and sums apart (out: float64)."""
    row = tl.program_id(0).to(tl.int64)
    p_row, q_row = p_ptr + row * p_stride, q_ptr + row * q_stride
    zero, nothing = tl.full((), 0.0, tl.float64), tl.full((), -INF, tl.float32)
    ps, qs, cross, slope, curve = zero, zero, zero, zero, zero
    pm, qm = nothing, nothing
    near = tl.full((), 1, tl.int32)
    for start in range(0, V, WIDE):
        at = start + tl.arange(0, WIDE)
        x = tl.load(p_row + at, mask=at < V, other=-INF).to(tl.float32)
        y = tl.load(q_row + at, mask=at < V, other=-INF).to(tl.float32)
        u = _difference(x, y)
        if near == 1:
            far = tl.max(tl.where(tl.abs(u) <= NEAR, 0, 1), axis=0)
            if far == 1:
                near = tl.full((), 0, tl.int32)
                ps, cross = _finish(pm, qm, qs, slope, curve)
        top_p, top_q = tl.maximum(pm, tl.max(x, axis=0)), tl.maximum(qm, tl.max(y, axis=0))
        if pm > -INF:
            cross += qs * (top_p - pm).to(tl.float64)
        ps *= _factor(pm, top_p)
        if qm > -INF:
            shrink = _factor(qm, top_q)
            cross = shrink * (cross + qs * (qm - top_q).to(tl.float64))
            qs *= shrink
            slope *= shrink
            curve *= shrink
        pm, qm = top_p, top_q
        dq = y - tl.where(qm == -INF, 0.0, qm)
        eq = _exp(dq)
        qs += _sum(eq)
        if near == 1:
            slope += _sum(eq * u)
            curve += _sum(eq * _curvature(u, 1.0))
        else:
            dp = x - tl.where(pm == -INF, 0.0, pm)
            ps += _sum(_exp(dp))
            # exp(-745) is the last teacher mass that float64 knows; below it even a student of -inf costs nothing
            cross += _sum(tl.where(dq > -745.0, eq * (dq - dp), 0.0))
    if near == 1:
        ps, cross = _finish(pm, qm, qs, slope, curve)
        ps = tl.where(qm == -INF, ps, tl.maximum(ps, 1.0))  # the maximum alone is 1
    out = out_ptr + row * 7
    tl.store(out, pm.to(tl.float64))
    tl.store(out + 1, ps)
    tl.store(out + 2, qm.to(tl.float64))
    tl.store(out + 3, qs)
    tl.store(out + 4, cross)
    tl.store(out + 5, tl.where(near == 1, slope, float("nan")))
    tl.store(out + 6, curve)


@triton.jit
def gradient_kernel(
    p_ptr, q_ptr, a_ptr, out_ptr, stats_ptr, c_ptr, p_stride, q_stride, out_stride, V, blocks, WIDE: tl.constexpr
):
    """One program a block of a row: d loss / d logits from the statistics and the row's weights, written once."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * WIDE + tl.arange(0, WIDE)
    inside = at < V
    stats = stats_ptr + row * 5  # pm, ps, qm, qs, shift (NaN where the row is not near)
    c_student, c_teacher = tl.load(c_ptr + row * 3), tl.load(c_ptr + row * 3 + 1)
    c_action = tl.load(c_ptr + row * 3 + 2)
    out = out_ptr + row * out_stride + at
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if (c_student == 0.0) & (c_teacher == 0.0) & (c_action == 0.0):
        tl.store(out, tl.zeros((WIDE,), kind), mask=inside)
    else:
        x = tl.load(p_ptr + row * p_stride + at, mask=inside, other=-INF).to(tl.float32)
        shift = tl.load(stats + 4)
        if (shift == shift) & (c_student == c_teacher):  # noqa: PLR0124 - NaN where the row is not near
            y = tl.load(q_ptr + row * q_stride + at, mask=inside, other=-INF).to(tl.float32)
            weight = (c_teacher / tl.load(stats + 3)).to(tl.float32)
            e = _exp(y - tl.load(stats + 2).to(tl.float32))
            value = weight * e * _expm1(_difference(x, y) - shift.to(tl.float32))
        else:
            dp = x - tl.load(stats).to(tl.float32)
            value = (c_student / tl.load(stats + 1)).to(tl.float32) * _exp(dp)
            if c_teacher != 0.0:
                y = tl.load(q_ptr + row * q_stride + at, mask=inside, other=-INF).to(tl.float32)
                dq = y - tl.load(stats + 2).to(tl.float32)
                teacher = (c_teacher / tl.load(stats + 3)).to(tl.float32) * _exp(dq)
                value -= teacher
                if c_student == c_teacher:  # what the two have in common would cancel
                    ratio = dp - dq - tl.log(tl.load(stats + 1) / tl.load(stats + 3)).to(tl.float32)
                    value = tl.where(tl.abs(ratio) < 0.5, teacher * _expm1(ratio), value)
        value = tl.where(at == tl.load(a_ptr + row), value - c_action.to(tl.float32), value)
        tl.store(out, value.to(kind), mask=inside)


def serves(student: Tensor, teacher: Tensor) -> bool:
    """Whether these kernels take (N, V) logits: on a GPU, no float64."""
    return student.is_cuda and teacher.device == student.device and {student.dtype, teacher.dtype} <= set(DTYPES)


def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    """The RowStat columns of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions; waits for nothing."""
    student, teacher = contiguous_rows(student), contiguous_rows(teacher)
    count, vocabulary = student.shape
    sums = torch.empty(count, 7, dtype=torch.float64, device=student.device)
    wide = _block("statistics_kernel", vocabulary)
    statistics_kernel[(count,)](
        student, teacher, sums, student.stride(0), teacher.stride(0), vocabulary, WIDE=wide, **OPTIONS
    )
    pm, ps, qm, qs, cross, slope, curve = sums.unbind(1)
    inside = (actions >= 0) & (actions < vocabulary)
    at = torch.where(inside, actions, 0)[:, None]
    log_p, log_q = ps.log(), qs.log()
    x = (slope + curve) / qs
    general = cross / qs - log_q + log_p
    general = torch.where(cross.isnan() & ~(ps.isnan() | qs.isnan()), torch.inf, general)  # 0 * inf: there was mass
    kl = torch.where(slope.isnan(), general, curve / qs + (x.log1p() - x)).clamp(min=0.0)
    chosen_p = student.gather(1, at)[:, 0].double() - pm - log_p
    chosen_q = teacher.gather(1, at)[:, 0].double() - qm - log_q
    chosen = (torch.where(inside, value, torch.nan) for value in (chosen_p, chosen_q))
    result = torch.stack([pm, ps, qm, qs, *chosen, kl, slope, curve], dim=1)
    assert result.shape[1] == len(RowStat)
    return result


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, row_stats: Tensor, coefficients: Tensor
) -> None:
    """out = c0 softmax(student) - c1 softmax(teacher) - c2 onehot(action); c (N, 3) float64, `out` may be `student`."""
    target = out if out.stride(1) == 1 else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    count, vocabulary = student.shape
    wide = _block("gradient_kernel", vocabulary)
    blocks = triton.cdiv(vocabulary, wide)
    both = row_stats[:, RowStat.SLOPE] + row_stats[:, RowStat.CURVE]
    shift = (both / row_stats[:, RowStat.TEACHER_SUM]).log1p()
    used = torch.cat([row_stats[:, : RowStat.STUDENT_LOGPROB], shift[:, None]], dim=1)
    student, teacher = contiguous_rows(student), contiguous_rows(teacher)
    gradient_kernel[(count * blocks,)](
        student, teacher, actions.contiguous(), target, used, coefficients.double().contiguous(),
        student.stride(0), teacher.stride(0), target.stride(0), vocabulary, blocks, WIDE=wide, **OPTIONS,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)


def _block(kernel: str, vocabulary: int) -> int:
    return min(BLOCK[kernel], max(128, triton.next_power_of_2(vocabulary)))
