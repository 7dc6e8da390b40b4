"""Known mistakes in paritygate/losses/kl_estimators.py."""

from tests.mutants.mutant import Mutant

FILE = "losses/kl_estimators.py"
MUTANTS = (
    Mutant(
        "k1-sign",
        "the reference policy over the policy",
        "kl_estimators/value",
        FILE,
        "torch.where(used, -log_r, 0.0)",
        "torch.where(used, log_r, 0.0)",
    ),
    Mutant(
        "k3-inverted",
        "p/q where q/p belongs: k3 of the other direction",
        "kl_estimators/value",
        FILE,
        "return torch.where(used, _excess(log_r), 0.0)",
        "return torch.where(used, _excess(-log_r), 0.0)",
    ),
    Mutant(
        "k3-clamped",
        "k3 clamped at 10, as two trainers do: no gradient where the policies are farthest apart",
        "kl_estimators/gradient",
        FILE,
        "return torch.where(used, _excess(log_r), 0.0)",
        "return torch.where(used, _excess(log_r).clamp(max=10.0), 0.0)",
    ),
    Mutant(
        "k3-without-a-series",
        "exp(d) - 1 - d of nearly equal policies: no digit is left",
        "kl_estimators/near_equal",
        FILE,
        "return torch.where(near, series, torch.expm1(d) - d)",
        "return d.exp() - 1 - d",
    ),
    Mutant(
        "surrogate-with-k3s-gradient",
        "k3 backpropagated as a reverse KL",
        "kl_estimators/expected_gradient",
        FILE,
        'cast("Tensor", _Surrogate.apply(log_r))',
        "_excess(log_r)",
    ),
    Mutant(
        "k1-halved",
        "half the log ratio: an estimate of half the divergence",
        "kl_estimators/expected_value",
        FILE,
        "torch.where(used, -log_r, 0.0)",
        "torch.where(used, -log_r / 2.0, 0.0)",
    ),
    Mutant(
        "k3-with-k2s-gradient",
        "k3 made a reverse KL: what it is not",
        "kl_estimators/k3_is_no_reverse_kl",
        FILE,
        "return torch.where(used, _excess(log_r), 0.0)",
        "k2 = log_r.square() / 2.0\n    return torch.where(used, _excess(log_r.detach()) + k2 - k2.detach(), 0.0)",
    ),
    Mutant(
        "mean-over-masked-tokens",
        "the metric divided by all positions",
        "kl_estimators/mean",
        FILE,
        ", over=used.sum())",
        ", over=used.numel())",
    ),
    Mutant(
        "reference-policy-differentiated",
        "the gradient reaches the reference policy",
        "kl_estimators/constants",
        FILE,
        'as_float(reference_logprobs, "reference_logprobs").detach()',
        'as_float(reference_logprobs, "reference_logprobs")',
    ),
    Mutant(
        "masked-logprobs-read",
        "0 times NaN at a token that is masked",
        "kl_estimators/gradient",
        FILE,
        "return torch.where(used, q.double() - p.double(), 0.0), used",
        "return q.double() - p.double(), used",
    ),
)
