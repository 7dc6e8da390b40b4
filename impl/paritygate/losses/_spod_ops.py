"""What SPOD asks of rows of logits, by the fastest means there is: compiled C++, Triton, or torch in float64 blocks.

Each is one opaque operator to torch.compile. A row is known by the `cpu.COLUMNS` of its statistics, float64.
"""

import torch
from torch import Tensor

from . import _spod_rows as plain
from .kernels import cpu
from .kernels.cpu import COLUMNS


@torch.library.custom_op("paritygate::spod_statistics", mutates_args=())
def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    """The statistics of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions."""
    if cpu.serves(student, teacher):
        return cpu.statistics(student, teacher, actions)
    result = torch.zeros(student.shape[0], len(COLUMNS), dtype=torch.float64, device=student.device)
    for name, values in plain.statistics(student, teacher, actions)._asdict().items():
        result[:, COLUMNS.index(name)] = values
    return result


@statistics.register_fake
def _(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    return student.new_empty(student.shape[0], len(COLUMNS), dtype=torch.float64)


@torch.library.custom_op("paritygate::spod_gradient", mutates_args=())
def gradient(student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, kl: Tensor, floor: Tensor) -> Tensor:
    """`kl (p - q) + floor (p - onehot)`, (N, V) in the student's dtype; `rows` are the statistics, the weights (N,)."""
    out = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    gradient_(out, student, teacher, actions, rows, plain.Weights(kl, floor))
    return out


@gradient.register_fake
def _(student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, kl: Tensor, floor: Tensor) -> Tensor:
    return student.new_empty(student.shape)


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, weights: plain.Weights
) -> None:
    """`gradient` written to `out`, which may be `student`."""
    if cpu.serves(student, teacher):
        coefficients = torch.stack([weights.kl + weights.floor, weights.kl, weights.floor], dim=1)
        cpu.gradient_(out, student, teacher, actions, rows, coefficients)
    else:
        plain.gradient_into(out, student, teacher, actions, weights)
