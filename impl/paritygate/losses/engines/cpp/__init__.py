"""SPOD's rows and SDPO's divergences on the CPU by the compiled kernels; float32, bfloat16, float16."""

import ctypes
import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paritygate import native

from ...buckets import DIVERGENCES
from ...row_stats import COLUMNS
from ..base import DTYPES, PLAIN

FOLDER = Path(__file__).parent
SOURCES = (
    native.VECTOR_HPP,
    *(FOLDER / name for name in ("rows.hpp", "problem.hpp", "wide.hpp", "spod.cpp", "divergence.cpp", "truncated.cpp")),
)


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built at the first call; raises native.Unavailable where there is no compiler."""
    return native.load(*SOURCES)


def unavailable() -> str | None:
    """None where the compiled kernels can be used, else why they cannot."""
    try:
        library()
    except native.Unavailable as reason:
        return str(reason)
    return None


class _Problem(ctypes.Structure):
    """`struct Problem` of spod.cpp."""

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
    if not (student.device.type == teacher.device.type == "cpu" and student.dtype == teacher.dtype):
        return False
    if student.dtype not in DTYPES or student.shape[1] == 0 or type(student) not in PLAIN or type(teacher) not in PLAIN:
        return False
    return unavailable() is None


def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    """The COLUMNS of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions."""
    student, teacher = _rows(student), _rows(teacher)
    count = student.shape[0]
    result = torch.empty(count, len(COLUMNS), dtype=torch.float64)
    shut = torch.zeros(1, dtype=torch.uint8)
    starts = torch.tensor([0, count])
    _call(student, teacher, actions, None, result, starts=starts, success=shut)
    return result


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, coefficients: Tensor
) -> None:
    """out = c0 softmax(student) - c1 softmax(teacher) - c2 onehot(action); c (N, 3) float64, `out` may be `student`."""
    target = _target(out)
    coefficients = coefficients.double().contiguous()
    _call(_rows(student), _rows(teacher), actions, target, rows.contiguous(), coefficients=coefficients)
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
    result = torch.empty(student.shape[0], len(COLUMNS), dtype=torch.float64)
    _call(
        _rows(student),
        _rows(teacher),
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
    return out if out.stride(1) == 1 or out.shape[1] == 1 else torch.empty(out.shape, dtype=out.dtype)


def divergence(
    student: Tensor,
    teacher: Tensor,
    read: Tensor,
    kind: str,
    mixture: float,
    top_k: int | None = None,
    tail: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The divergence of each row to `read` (N,) bool, (N,) float64, 0 elsewhere; and what its gradient asks for.

    Over the full vocabulary, or the student's `top_k` largest entries with the rest as a `tail` bucket or left out.
    """
    count = student.shape[0]
    if top_k is None:
        known = (torch.zeros(count, 6, dtype=torch.float64),)
    else:
        known = (
            torch.zeros(count, 4, dtype=torch.float64),
            torch.empty(count, top_k, dtype=torch.int32),
            torch.empty(count, top_k, dtype=torch.float64),
        )
    _call(_rows(student), _rows(teacher), read, None, known[0], divergence=_Divergence(kind, mixture, tail, known))
    return known[0][:, 0].clone(), known


def divergence_gradient(
    student: Tensor,
    teacher: Tensor,
    read: Tensor,
    kind: str,
    mixture: float,
    known: tuple[Tensor, ...],
    scale: Tensor,
    tail: bool = True,
) -> Tensor:
    """d sum_i scale_i D_i / d student, (N, V) in its dtype; `scale` (N,) float64, `known` from `divergence`."""
    out = torch.empty(student.shape, dtype=student.dtype)
    asked = _Divergence(kind, mixture, tail, known, scale.double().contiguous())
    _call(_rows(student), _rows(teacher), read, out, known[0], divergence=asked)
    return out


class _Divergence(NamedTuple):
    """What is asked of the rows: `known` is written, or read where there is a `scale`."""

    kind: str
    mixture: float
    tail: bool
    known: tuple[Tensor, ...]
    scale: Tensor | None = None

    def call(self, problem: _Problem, read: Tensor) -> None:
        """Every row to `read` (N,) of `problem`."""
        chosen = read.to(torch.uint8).contiguous()
        scale = None if self.scale is None else self.scale.data_ptr()
        pointers = (ctypes.c_void_p(x) for x in (chosen.data_ptr(), scale, *(x.data_ptr() for x in self.known)))
        asked = (ctypes.byref(problem), ctypes.c_int32(DIVERGENCES.index(self.kind)), ctypes.c_double(self.mixture))
        if len(self.known) == 1:
            library().paritygate_divergence(*asked, *pointers)
        else:
            bounds = ctypes.c_int64(self.known[1].shape[1]), ctypes.c_int32(self.tail)
            library().paritygate_truncated(*asked, *bounds, *pointers)


def _rows(logits: Tensor) -> Tensor:
    """`logits` with its vocabulary contiguous; rows may lie anywhere."""
    return logits.detach() if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.detach().contiguous()


def _call(
    student: Tensor,
    teacher: Tensor,
    actions: Tensor,
    out: Tensor | None,
    rows: Tensor,
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
    logprobs, gate = torch.empty(count, 2, dtype=torch.float64), torch.zeros(count, dtype=torch.uint8)
    problem = _Problem(
        DTYPES[student.dtype],
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
        rows.data_ptr(),
        logprobs.data_ptr(),
        gate.data_ptr(),
    )
    if divergence is not None:
        divergence.call(problem, actions)
    elif coefficients is None:
        library().paritygate_spod(ctypes.byref(problem))
    else:
        library().paritygate_linear(ctypes.byref(problem), ctypes.c_void_p(coefficients.data_ptr()))
