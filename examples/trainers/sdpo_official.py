"""The official SDPO code (a fork of verl). Install: git clone https://github.com/lasgroup/SDPO, check out 0e6d5106,
pip install torch ray omegaconf tensordict 'transformers<5', and put the clone on PYTHONPATH: it is on no index.
"""

from types import SimpleNamespace

from verl.trainer.ppo.core_algos import compute_self_distillation_loss

from paritygate.harness import Unsupported

ALPHA = {"forward_kl": 0.0, "reverse_kl": 1.0}
MODES = {"token_mean": "token-mean", "sequence_sum": "seq-mean-token-sum", "sequence_mean": "seq-mean-token-mean"}


def logit_loss(
    student_logits, teacher_logits, mask, *, divergence, aggregation, mixture=0.5, importance_ratio=None, **cut
):
    """The whole vocabulary, or the student's top k with a tail or renormalised; rollout weights are its ratio."""
    if aggregation not in MODES or cut.get("top_k_of") == "teacher":
        raise Unsupported("the student's top k, averaged by token or sequence")
    config = SimpleNamespace(
        full_logit_distillation=True,
        distillation_topk=cut.get("top_k"),
        distillation_add_tail=cut.get("tail", True),
        alpha=ALPHA.get(divergence, mixture),
        is_clip=None,
    )
    log_p, log_q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    if "top_k" in cut:
        chosen = log_p.topk(cut["top_k"]).indices
        kind, log_p, log_q = "topk", log_p.gather(-1, chosen), log_q.gather(-1, chosen)
    else:
        kind = "all"
    return compute_self_distillation_loss(
        student_log_probs=log_p[..., 0],
        teacher_log_probs=log_q[..., 0],
        response_mask=mask.to(log_p.dtype),
        self_distillation_config=config,
        **{f"student_{kind}_log_probs": log_p, f"teacher_{kind}_log_probs": log_q},
        loss_agg_mode=MODES[aggregation],
        rollout_is_weights=importance_ratio,
    )[0]


sdpo = SimpleNamespace(logit_loss=logit_loss)
