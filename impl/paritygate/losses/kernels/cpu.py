"""SPOD's rows on the CPU by the compiled kernels: statistics, gradients, both at once; float32, bfloat16, float16."""

import ctypes
import math

import torch
from torch import Tensor

from .compiled import Unavailable, library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
COLUMNS = (
    "student_maximum",
    "student_sum",
    "teacher_maximum",
    "teacher_sum",
    "student_logprob",
    "teacher_logprob",
    "kl",
    "slope",
    "curve",
)
"""What `statistics` keeps of a row, float64; by slope and curve nearly equal rows keep their digits."""


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
    try:
        library()
    except Unavailable:
        return False
    return True


PLAIN = (Tensor, torch.nn.Parameter)


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


KINDS = ("forward_kl", "reverse_kl", "jsd")


def divergence(student: Tensor, teacher: Tensor, read: Tensor, kind: str, mixture: float) -> tuple[Tensor, Tensor]:
    """The divergence of each row to `read` (N,) bool, (N,) float64, 0 elsewhere; and what its gradient asks for."""
    known = torch.zeros(student.shape[0], 6, dtype=torch.float64)
    _call(_rows(student), _rows(teacher), read, None, known, divergence=(kind, mixture, read, None))
    return known[:, 0].clone(), known


def divergence_gradient(
    student: Tensor, teacher: Tensor, read: Tensor, kind: str, mixture: float, known: Tensor, scale: Tensor
) -> Tensor:
    """d sum_i scale_i D_i / d student, (N, V) in its dtype; `scale` (N,) float64, `known` from `divergence`."""
    out = torch.empty(student.shape, dtype=student.dtype)
    asked = (kind, mixture, read, scale.double().contiguous())
    _call(_rows(student), _rows(teacher), read, out, known, divergence=asked)
    return out


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
    divergence: tuple[str, float, Tensor, Tensor | None] | None = None,
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
        kind, mixture, read, scale = divergence
        chosen = read.to(torch.uint8).contiguous()
        library().paritygate_divergence(
            ctypes.byref(problem),
            ctypes.c_int32(KINDS.index(kind)),
            ctypes.c_double(mixture),
            *(ctypes.c_void_p(None if x is None else x.data_ptr()) for x in (chosen, scale, rows)),
        )
    elif coefficients is None:
        library().paritygate_spod(ctypes.byref(problem))
    else:
        library().paritygate_linear(ctypes.byref(problem), ctypes.c_void_p(coefficients.data_ptr()))
