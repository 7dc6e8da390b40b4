"""SPOD, success-preserving distillation: the KL of an action, or a floor where the student's success is protected."""

from .levels import SpodLoss
from .packed import (
    fused_linear_success_preserving_loss,
    success_preserving_loss,
    success_preserving_loss_and_grad,
    success_preserving_loss_padded,
)
from .service_weights import SpodWeights, success_preserving_weights

__all__ = [
    "SpodLoss",
    "SpodWeights",
    "fused_linear_success_preserving_loss",
    "success_preserving_loss",
    "success_preserving_loss_and_grad",
    "success_preserving_loss_padded",
    "success_preserving_weights",
]
