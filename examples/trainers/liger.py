"""Liger-Kernel's generalised JSD: the chunked loss, in torch. Install: pip install liger-kernel==0.8.5 torch."""

from types import SimpleNamespace

import torch
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction

from paritygate.harness import Unsupported

BETA = {"forward_kl": 0.0, "reverse_kl": 1.0}


def logit_loss(
    student_logits, teacher_logits, mask, *, divergence, aggregation, mixture=0.5, importance_ratio=None, **cut
):
    """The sum over tokens that have a label, and that over their number."""
    if aggregation not in ("token_mean", "token_sum") or cut or importance_ratio is not None:
        raise Unsupported("the whole vocabulary, averaged or summed by token, without a ratio")
    vocabulary = student_logits.shape[-1]
    target = torch.where(mask == 1, 0, -100).flatten()
    total = LigerFusedLinearJSDFunction.distillation_loss_fn(
        student_logits.reshape(-1, vocabulary),
        teacher_logits.reshape(-1, vocabulary),
        beta=BETA.get(divergence, mixture),
        target=target,
    )
    return total / (target != -100).sum() if aggregation == "token_mean" else total


sdpo = SimpleNamespace(logit_loss=logit_loss)
