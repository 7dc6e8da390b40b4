"""TRL's generalised JSD (GKD). Install: pip install trl==1.16.0 (torch comes with it)."""

from types import SimpleNamespace

import torch
from trl.experimental.gkd import GKDTrainer

from paritygate.harness import Unsupported

BETA = {"forward_kl": 0.0, "reverse_kl": 1.0}


def logit_loss(
    student_logits, teacher_logits, mask, *, divergence, aggregation, mixture=0.5, importance_ratio=None, **cut
):
    """`batchmean` over the tokens that have a label."""
    if aggregation not in ("token_mean", "token_sum") or cut or importance_ratio is not None:
        raise Unsupported("the whole vocabulary, averaged or summed by token, without a ratio")
    labels = torch.where(mask == 1, 0, -100)
    reduction = "batchmean" if aggregation == "token_mean" else "sum"
    beta = BETA.get(divergence, mixture)
    return GKDTrainer.generalized_jsd_loss(student_logits, teacher_logits, labels, beta, reduction=reduction)


sdpo = SimpleNamespace(logit_loss=logit_loss)
