"""TRL's SDPO at logit level. Install: pip install trl==1.16.0 (torch comes with it)."""

from types import SimpleNamespace

from trl.experimental.sdpo import loss_utils

from paritygate.harness import Unsupported

ALPHA = {"forward_kl": 0.0, "reverse_kl": 1.0}


def logit_loss(
    student_logits, teacher_logits, mask, *, divergence, aggregation, mixture=0.5, importance_ratio=None, **cut
):
    """Mean of row means over every sequence, a masked one too, as its trainer takes it."""
    if aggregation != "sequence_mean" or cut.get("top_k_of") == "teacher":
        raise Unsupported("the student's top k, averaged by sequence")
    alpha = ALPHA.get(divergence, mixture)
    if "top_k" in cut:
        options = {"distillation_topk": cut["top_k"], "distillation_add_tail": cut["tail"], "distillation_alpha": alpha}
        values = loss_utils.compute_topk_self_distillation_loss(student_logits, teacher_logits, **options)
    else:
        values = loss_utils.compute_full_logit_self_distillation_loss(
            student_logits, teacher_logits, distillation_alpha=alpha
        )
    if importance_ratio is not None:
        values = values * importance_ratio
    return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


sdpo = SimpleNamespace(logit_loss=logit_loss)
