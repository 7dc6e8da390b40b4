"""What an engine is: a module with the three functions of one of these protocols; see README.md."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..buckets import Options

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the fast engines; in this order C++ counts them
PLAIN = (Tensor, torch.nn.Parameter)  # no subclasses: what a wrapped tensor means is not ours to know


class RowEngine(Protocol):
    """SPOD's rows: their statistics, and a gradient of three terms."""

    def serves(self, student: Tensor, teacher: Tensor) -> bool:
        """Whether it takes these (N, V) logits on this machine."""
        ...

    def statistics(self, student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
        """The RowStat columns of each row, (N, 9) float64, of (N, V) logits and the sampled `actions` (N,) int64."""
        ...

    def gradient_(
        self, out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, row_stats: Tensor, coefficients: Tensor
    ) -> None:
        """out = c0 softmax(student) - c1 softmax(teacher) - c2 onehot(action), (N, V) in the student's dtype.

        `coefficients` (N, 3) float64, c0 = c1 + c2 in every gradient of SPOD; `row_stats` as `statistics` gave them.
        `out` may be `student`.
        """
        ...


@runtime_checkable
class OnePassEngine(RowEngine, Protocol):
    """A RowEngine that can make SPOD's gradient in the visit that measures a row."""

    def statistics_and_gradient_(
        self,
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
        """`statistics`, and SPOD's gradient into `out`, which may be `student`.

        `tokens`, `success`, `weights` (A,): of each action its length, whether its episode succeeded, the weight
        1 / (n S E) of each of its rows (float64).
        """
        ...


class DivergenceEngine(Protocol):
    """SDPO's divergences of rows over the full vocabulary or the student's top k, and their gradients."""

    def serves(self, student: Tensor, teacher: Tensor) -> bool:
        """Whether it takes these (N, V) logits on this machine."""
        ...

    def divergence(
        self, student: Tensor, teacher: Tensor, row_mask: Tensor, options: Options
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The divergence of each row of `row_mask` (N,) bool, (N,) float64 nats, 0 elsewhere; what its gradient needs.

        +inf where the teacher excludes what the student may do and the divergence says so.
        """
        ...

    def divergence_gradient(
        self,
        student: Tensor,
        teacher: Tensor,
        row_mask: Tensor,
        options: Options,
        saved: tuple[Tensor, ...],
        scale: Tensor,
    ) -> Tensor:
        """d sum_i scale_i D_i / d student, (N, V) in its dtype; `scale` (N,) float64, `saved` from `divergence`.

        Exactly 0 in rows that are masked or of scale 0; NaN in a row whose divergence is +inf and has no gradient.
        """
        ...


def contiguous_rows(logits: Tensor) -> Tensor:
    """`logits` (N, V) without a graph and with its vocabulary contiguous; rows may lie anywhere."""
    return logits.detach() if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.detach().contiguous()


def fast_on_cpu(student: Tensor, teacher: Tensor) -> bool:
    """Whether these (N, V) logits are plain tensors on the CPU, of one dtype of DTYPES."""
    kinds = (student.device.type, teacher.device.type, student.dtype)
    plain = type(student) in PLAIN and type(teacher) in PLAIN
    return plain and kinds == ("cpu", "cpu", teacher.dtype) and student.dtype in DTYPES and student.shape[1] > 0
