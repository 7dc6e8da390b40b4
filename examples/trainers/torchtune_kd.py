"""torchtune's forward and reverse KL. Install: pip install torchtune==0.6.1 torch torchao torchvision."""

from types import SimpleNamespace

import torch
from torchtune.modules.loss import ForwardKLLoss, ReverseKLLoss

from paritygate.harness import Unsupported

LOSSES = {"forward_kl": ForwardKLLoss(), "reverse_kl": ReverseKLLoss()}


def logit_loss(student_logits, teacher_logits, mask, *, divergence, aggregation, importance_ratio=None, **cut):
    """By token, over the labels that are not ignored."""
    plain = divergence in LOSSES and aggregation in ("token_mean", "token_sum")
    if not plain or cut or importance_ratio is not None:
        raise Unsupported(
            "forward and reverse KL of the whole vocabulary, averaged or summed by token, without a ratio"
        )
    vocabulary = student_logits.shape[-1]
    return LOSSES[divergence](
        student_logits.reshape(-1, vocabulary),
        teacher_logits.reshape(-1, vocabulary),
        torch.where(mask == 1, 0, -100).flatten(),
        normalize=aggregation == "token_mean",
    )


sdpo = SimpleNamespace(logit_loss=logit_loss)
