"""SPOD's rows and SDPO's divergences on the CPU by the compiled kernels; float32, bfloat16, float16."""

import ctypes
import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paritygate import native

from ...buckets import DIVERGENCES, Options
from ...row_stats import RowStat
from .. import memory
from ..base import DTYPES, contiguous_rows, fast_on_cpu

FOLDER = Path(__file__).parent
SOURCES = (
    native.VECTOR_HPP,
    native.THREADS_HPP,
    *(FOLDER / name for name in ("rows.hpp", "problem.hpp", "wide.hpp", "spod.cpp", "divergence.cpp", "truncated.cpp")),
)


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built at the first call; raises native.Unavailable where there is no compiler."""
    return native.load(*SOURCES)


@functools.cache
def unavailable() -> str | None:
    """None where the compiled kernels can be used, else why they cannot; asked once in a process."""
    try:
        library()
    except native.Unavailable as reason:
        return str(reason)
    return None


class _Problem(ctypes.Structure):
    """`struct Problem` of problem.hpp."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("student", "teacher", "out")),
        *((name, ctypes.c_int64) for name in ("student_stride", "teacher_stride", "out_stride")),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "action_count")),
        *((name, ctypes.c_void_p) for name in ("actions", "starts", "success", "weights")),
        ("log_tau0", ctypes.c_double),
        ("floor_weight", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("statistics", "logprobs", "gate")),
    )


def serves(student: Tensor, teacher: Tensor) -> bool:
    """Whether the compiled kernels take these (N, V) logits; everything else is torch's."""
    return fast_on_cpu(student, teacher) and unavailable() is None


def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    """The RowStat columns of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions."""
    student, teacher = contiguous_rows(student), contiguous_rows(teacher)
    count = student.shape[0]
    result = torch.empty(count, len(RowStat), dtype=torch.float64, device="cpu")
    shut = torch.zeros(1, dtype=torch.uint8, device="cpu")
    starts = torch.tensor([0, count], dtype=torch.int64, device="cpu")
    _call(student, teacher, actions, None, result, starts=starts, success=shut)
    return result


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, row_stats: Tensor, coefficients: Tensor
) -> None:
    """out = c0 softmax(student) - c1 softmax(teacher) - c2 onehot(action); c (N, 3) float64, `out` may be `student`."""
    target = _target(out)
    coefficients = coefficients.double().contiguous()
    student, teacher, row_stats = contiguous_rows(student), contiguous_rows(teacher), row_stats.contiguous()
    _call(student, teacher, actions, target, row_stats, coefficients=coefficients)
    if target is not out:
        out.copy_(target)


def statistics_and_gradient_(
    out: Tensor,
    student: Tensor,
    teacher: Tensor,
    actions: Tensor,
    tokens: Tensor,
    success: Tensor,
    weights: Tensor,
    tau0: float,
    floor_weight: float,
) -> Tensor:
    """Statistics (N, 9), and SPOD's gradient into `out` in one visit to each row; `out` may be `student`.

    Actions are consecutive, of lengths `tokens` (A,), in episodes with `success` (A,), their rows weighing `weights`
    (A,) float64.
    """
    target = _target(out)
    result = torch.empty(student.shape[0], len(RowStat), dtype=torch.float64, device="cpu")
    _call(
        contiguous_rows(student),
        contiguous_rows(teacher),
        actions,
        target,
        result,
        starts=torch.cat([tokens.new_zeros(1), tokens.cumsum(0)]),
        success=success.to(torch.uint8).contiguous(),
        weights=weights.double().contiguous(),
        log_tau0=math.log(tau0),
        floor_weight=floor_weight,
    )
    if target is not out:
        out.copy_(target)
    return result


def _target(out: Tensor) -> Tensor:
    return out if out.stride(1) == 1 or out.shape[1] == 1 else torch.empty(out.shape, dtype=out.dtype, device="cpu")


def divergence(
    student: Tensor, teacher: Tensor, row_mask: Tensor, options: Options
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As DivergenceEngine.divergence."""
    count, k = student.shape[0], options.top_k
    if k is None:
        saved = (torch.zeros(count, 6, dtype=torch.float64, device="cpu"),)
    else:
        saved = (
            torch.zeros(count, 4, dtype=torch.float64, device="cpu"),
            torch.empty(count, k, dtype=torch.int32, device="cpu"),
            torch.empty(count, k, dtype=torch.float64, device="cpu"),
        )
    call = _Divergence(options, saved)
    _call(contiguous_rows(student), contiguous_rows(teacher), row_mask, None, saved[0], divergence=call)
    return saved[0][:, 0].clone(), saved


def divergence_gradient(
    student: Tensor, teacher: Tensor, row_mask: Tensor, options: Options, saved: tuple[Tensor, ...], scale: Tensor
) -> Tensor:
    """As DivergenceEngine.divergence_gradient."""
    out = memory.buffer(student.shape, student, student.dtype)
    call = _Divergence(options, saved, scale.double().contiguous())
    _call(contiguous_rows(student), contiguous_rows(teacher), row_mask, out, saved[0], divergence=call)
    return out


class _Divergence(NamedTuple):
    """A call of the divergences' kernels: `saved` is written, or read where there is a `scale`."""

    options: Options
    saved: tuple[Tensor, ...]
    scale: Tensor | None = None

    def run(self, problem: _Problem, row_mask: Tensor) -> None:
        """Every row of `row_mask` (N,) of `problem`."""
        mask = row_mask.to(torch.uint8).contiguous()
        scale = None if self.scale is None else self.scale.data_ptr()
        pointers = (ctypes.c_void_p(x) for x in (mask.data_ptr(), scale, *(x.data_ptr() for x in self.saved)))
        kind, mixture = DIVERGENCES.index(self.options.divergence), self.options.mixture
        inputs = (ctypes.byref(problem), ctypes.c_int32(kind), ctypes.c_double(mixture))
        if len(self.saved) == 1:
            library().paritygate_divergence(*inputs, *pointers)
        else:
            bounds = ctypes.c_int64(self.saved[1].shape[1]), ctypes.c_int32(self.options.tail)
            library().paritygate_truncated(*inputs, *bounds, *pointers)


def _call(
    student: Tensor,
    teacher: Tensor,
    actions: Tensor,
    out: Tensor | None,
    row_stats: Tensor,
    *,
    starts: Tensor | None = None,
    success: Tensor | None = None,
    weights: Tensor | None = None,
    coefficients: Tensor | None = None,
    divergence: _Divergence | None = None,
    log_tau0: float = 0.0,
    floor_weight: float = 0.0,
) -> None:
    actions = actions.contiguous()
    count = 0 if starts is None else starts.shape[0] - 1
    logprobs, gate = (
        torch.empty(count, 2, dtype=torch.float64, device="cpu"),
        torch.zeros(count, dtype=torch.uint8, device="cpu"),
    )
    problem = _Problem(
        DTYPES.index(student.dtype),
        torch.get_num_threads(),
        student.data_ptr(),
        teacher.data_ptr(),
        None if out is None else out.data_ptr(),
        student.stride(0),
        teacher.stride(0),
        0 if out is None else out.stride(0),
        *student.shape,
        count,
        actions.data_ptr(),
        *(None if x is None else x.data_ptr() for x in (starts, success, weights)),
        log_tau0,
        floor_weight,
        row_stats.data_ptr(),
        logprobs.data_ptr(),
        gate.data_ptr(),
    )
    if divergence is not None:
        divergence.run(problem, actions)
    elif coefficients is None:
        library().paritygate_spod(ctypes.byref(problem))
    else:
        library().paritygate_linear(ctypes.byref(problem), ctypes.c_void_p(coefficients.data_ptr()))
