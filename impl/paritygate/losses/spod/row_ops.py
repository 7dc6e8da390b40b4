"""What SPOD asks of rows of logits, by the engine that takes them; to torch.compile opaque operators."""

import torch
from torch import Tensor

from .. import engines
from ..checks import no_distribution
from ..engines import memory
from ..engines.base import OnePassEngine
from ..gate import Levels, Weights
from ..row_stats import RowStat


def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    """The RowStat columns of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions."""
    measure = statistics_operator if torch.compiler.is_compiling() else _statistics
    return measure(student, teacher, actions)


def gradient(student: Tensor, teacher: Tensor, actions: Tensor, row_stats: Tensor, kl: Tensor, floor: Tensor) -> Tensor:
    """`kl (p - q) + floor (p - onehot)`, (N, V) in the student's dtype, of row_stats (N, 9) and weights (N,)."""
    differentiate = gradient_operator if torch.compiler.is_compiling() else _gradient
    return differentiate(student, teacher, actions, row_stats, kl, floor)


def _statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    return engines.choose("rows", student, teacher).statistics(student, teacher, actions)


def _gradient(
    student: Tensor, teacher: Tensor, actions: Tensor, row_stats: Tensor, kl: Tensor, floor: Tensor
) -> Tensor:
    out = memory.buffer(student.shape, student, student.dtype)
    gradient_(out, student, teacher, actions, row_stats, Weights(kl, floor))
    return out


# Called outside of a graph, an operator of torch.library would import torch._dynamo: seconds, for nothing.
statistics_operator = torch.library.custom_op("paritygate::spod_statistics", _statistics, mutates_args=())
gradient_operator = torch.library.custom_op("paritygate::spod_gradient", _gradient, mutates_args=())


@statistics_operator.register_fake
def _(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    return student.new_empty(student.shape[0], len(RowStat), dtype=torch.float64)


@gradient_operator.register_fake
def _(student: Tensor, teacher: Tensor, actions: Tensor, row_stats: Tensor, kl: Tensor, floor: Tensor) -> Tensor:
    return student.new_empty(student.shape)


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, row_stats: Tensor, weights: Weights
) -> None:
    """`gradient` written to `out`, which may be `student`."""
    coefficients = torch.stack([weights.kl + weights.floor, weights.kl, weights.floor], dim=1)
    engines.choose("rows", student, teacher).gradient_(out, student, teacher, actions, row_stats, coefficients)


def statistics_and_gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, levels: Levels, tau0: float, floor_weight: float
) -> Tensor | None:
    """The statistics (N, 9) and SPOD's gradient into `out` in one visit to each row, or None: `out` is untouched."""
    engine = engines.choose("rows", student, teacher)
    if not isinstance(engine, OnePassEngine):
        return None
    return engine.statistics_and_gradient_(out, student, teacher, actions, *levels, tau0, floor_weight)


def refuse_unusable(row_stats: Tensor, name: str) -> None:
    """ValueError naming the first row, by its statistics, with NaN, +inf or nothing but -inf; the student's first."""
    for side, maximum, total in (
        ("student", RowStat.STUDENT_MAXIMUM, RowStat.STUDENT_SUM),
        ("teacher", RowStat.TEACHER_MAXIMUM, RowStat.TEACHER_SUM),
    ):
        top = row_stats[:, maximum]
        top = torch.where(row_stats[:, total].isnan() & (top < torch.inf), torch.nan, top)
        for i in (~torch.isfinite(top)).nonzero()[:1].flatten().tolist():
            raise ValueError(no_distribution(f"{name}: {side}_logits row {i}", float(top[i])))
