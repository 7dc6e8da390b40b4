"""The divergence of each row with its closed-form gradient, by whichever engine takes the logits."""

from typing import Any

import torch
from torch import Tensor

from .. import engines
from ..buckets import Options


def engine_for(student: Tensor, teacher: Tensor, options: Options) -> engines.DivergenceEngine:
    """The first that serves these (N, V) logits; the fast ones know the student's top k alone."""
    if options.top_k is not None and options.top_k_of == "teacher":
        return engines.float64
    return engines.choose("divergences", student, teacher)


class RowDivergence(torch.autograd.Function):
    """(N, V) student and teacher logits, row_mask (N,) bool -> (N,) float64 nats; the student differentiates twice.

    Obligations: sdpo/logit_gradient, sdpo/factor.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, row_mask: Tensor, options: Options) -> Tensor:
        ctx.options = options
        values, saved = engine_for(student, teacher, options).divergence(student, teacher, row_mask, options)
        ctx.save_for_backward(student, teacher, row_mask, *saved)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        student, teacher, row_mask, *saved = ctx.saved_tensors
        differentiable = torch.is_grad_enabled() or not saved
        engine = engines.float64 if differentiable else engine_for(student, teacher, ctx.options)
        gradient = engine.divergence_gradient(student, teacher, row_mask, ctx.options, tuple(saved), grad)
        return gradient, None, None, None
