"""SDPO, self-distillation from feedback: advantages at token and sequence level, divergences at logit level."""

from ..buckets import DIVERGENCES
from .advantages import hybrid_advantage, sequence_advantage, token_advantage
from .logit_level import AGGREGATIONS, logit_loss, logit_loss_grad
from .service_weights import ServiceWeights, cross_entropy_weights
from .teachers import current, ema, frozen_initial, select_sibling, trust_region

__all__ = [
    "AGGREGATIONS",
    "DIVERGENCES",
    "ServiceWeights",
    "cross_entropy_weights",
    "current",
    "ema",
    "frozen_initial",
    "hybrid_advantage",
    "logit_loss",
    "logit_loss_grad",
    "select_sibling",
    "sequence_advantage",
    "token_advantage",
    "trust_region",
]
