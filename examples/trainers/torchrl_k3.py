"""torchrl's k3 estimate, which its "reverse" distillation minimises. Install: pip install torchrl==0.14.1 torch.

The expectation over the student's tokens is taken exactly: each token of the vocabulary, weighted by a constant p.
"""

from types import SimpleNamespace

from torchrl.objectives.llm import k3_kl_token_estimate

from paritygate.harness import Unsupported


def logit_loss(student_logits, teacher_logits, mask, *, divergence, aggregation, importance_ratio=None, **cut):
    """The expected estimate at each token, summed."""
    if divergence != "reverse_kl" or aggregation != "token_sum" or cut or importance_ratio is not None:
        raise Unsupported("reverse KL, summed, without a ratio")
    hidden = mask[..., None] == 0  # its loss fills masked tokens before it estimates
    log_p, log_q = (x.masked_fill(hidden, 0.0).log_softmax(-1) for x in (student_logits, teacher_logits))
    return (log_p.exp().detach() * k3_kl_token_estimate(log_q, log_p)).sum()


def k3(logprobs, reference_logprobs):
    """At each token."""
    return k3_kl_token_estimate(reference_logprobs, logprobs)


sdpo = SimpleNamespace(logit_loss=logit_loss)
kl_estimators = SimpleNamespace(k3=k3)
