"""What SPOD asks of rows of logits, by the fastest means there is: C++, Triton, torch in float32 or in float64 blocks.

Each is one opaque operator to torch.compile. What is known of a row are the `COLUMNS` of its statistics, float64.
"""

from types import ModuleType

import torch
from torch import Tensor

from ..checks import no_distribution
from ..engines import cpp, float32, float64, has_triton
from ..gate import Weights
from ..row_stats import COLUMNS, column


def engine(student: Tensor, teacher: Tensor) -> ModuleType | None:
    """The module whose rows take these (N, V) logits, or None: float64 does."""
    if student.is_cuda and has_triton():
        from ..engines.triton import rows

        return rows if rows.serves(student, teacher) else None
    if cpp.serves(student, teacher):
        return cpp
    return float32 if float32.serves(student, teacher) else None


@torch.library.custom_op("paritygate::spod_statistics", mutates_args=())
def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    """The statistics of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions."""
    if fast := engine(student, teacher):
        return fast.statistics(student, teacher, actions)
    result = torch.zeros(student.shape[0], len(COLUMNS), dtype=torch.float64, device=student.device)
    measured = (*float64.statistics(student, teacher, actions), student.amax(-1), teacher.amax(-1))
    names = ("kl", "student_logprob", "teacher_logprob", "student_maximum", "teacher_maximum")
    for name, values in zip(names, measured, strict=True):
        result[:, COLUMNS.index(name)] = values
    return result


@statistics.register_fake
def _(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    return student.new_empty(student.shape[0], len(COLUMNS), dtype=torch.float64)


@torch.library.custom_op("paritygate::spod_gradient", mutates_args=())
def gradient(student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, kl: Tensor, floor: Tensor) -> Tensor:
    """`kl (p - q) + floor (p - onehot)`, (N, V) in the student's dtype; `rows` are the statistics, the weights (N,)."""
    out = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    gradient_(out, student, teacher, actions, rows, Weights(kl, floor))
    return out


@gradient.register_fake
def _(student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, kl: Tensor, floor: Tensor) -> Tensor:
    return student.new_empty(student.shape)


def gradient_(out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, weights: Weights) -> None:
    """`gradient` written to `out`, which may be `student`."""
    if fast := engine(student, teacher):
        coefficients = torch.stack([weights.kl + weights.floor, weights.kl, weights.floor], dim=1)
        fast.gradient_(out, student, teacher, actions, rows, coefficients)
    else:
        float64.gradient_into(out, student, teacher, actions, weights)


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
) -> Tensor | None:
    """The statistics (N, 9) and SPOD's gradient into `out` in one visit to each row, or None: `out` is untouched.

    `tokens`, `success`, `weights` (A,): of each action its length, whether its episode succeeded, and 1 / (n S E).
    """
    fast = engine(student, teacher)
    if fast not in (cpp, float32):
        return None
    return fast.statistics_and_gradient_(out, student, teacher, actions, tokens, success, weights, tau0, floor_weight)


def refuse_unusable(rows: Tensor, name: str) -> None:
    """ValueError naming the first row, by its statistics, with NaN, +inf or nothing but -inf; the student's first."""
    for side in ("student", "teacher"):
        top, total = column(rows, f"{side}_maximum"), column(rows, f"{side}_sum")
        top = torch.where(total.isnan() & (top < torch.inf), torch.nan, top)
        for i in (~torch.isfinite(top)).nonzero()[:1].flatten().tolist():
            raise ValueError(no_distribution(f"{name}: {side}_logits row {i}", float(top[i])))
