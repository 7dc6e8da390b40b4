"""sdpo-rl, SDPO for TRL. Install: pip install torch trl==1.16.0, then pip install --no-deps sdpo-rl==0.0.3."""

from types import SimpleNamespace

from sdpo_rl.distillation import compute_self_distillation_loss

from paritygate.harness import Unsupported

ALPHA = {"forward_kl": 0.0, "reverse_kl": 1.0}


def logit_loss(
    student_logits, teacher_logits, mask, *, divergence, aggregation, mixture=0.5, importance_ratio=None, **cut
):
    """The mean over tokens; without top_k the whole vocabulary is its top k, of no tail."""
    if aggregation != "token_mean" or cut.get("top_k_of") == "teacher":
        raise Unsupported("the student's top k, averaged by token")
    log_p, log_q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    chosen = log_p.topk(cut.get("top_k", log_p.shape[-1])).indices
    return compute_self_distillation_loss(
        log_p[..., 0],
        log_q[..., 0],
        mask.to(log_p.dtype),
        student_topk_log_probs=log_p.gather(-1, chosen),
        teacher_topk_log_probs=log_q.gather(-1, chosen),
        alpha=ALPHA.get(divergence, mixture),
        add_tail=cut.get("tail", False),
        is_clip=None,
        rollout_is_weights=importance_ratio,
    )[0]


sdpo = SimpleNamespace(logit_loss=logit_loss)
