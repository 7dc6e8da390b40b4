"""Known mistakes as small, named edits, each with the obligation that has to go red; and edits that change nothing."""

from tests.mutants.catalogue_logit import LOGITS
from tests.mutants.catalogue_sdpo import ADVANTAGES
from tests.mutants.catalogue_spod import SPOD
from tests.mutants.mutant import BUCKETS, GATE, one

AVERAGES = (
    one(
        "flat-mean",
        "a flat mean over tokens instead of three levels",
        "averaging/value",
        "averaging.py",
        "return 1.0 / (tokens[action_index] * actions[episode_index[action_index]] * episodes).double()",
        "return torch.full((action_index.shape[0],), 1.0 / action_index.shape[0], dtype=torch.float64)",
    ),
    one(
        "flat-mean-in-spod",
        "a flat mean over tokens instead of three levels",
        "spod/loss",
        "averaging.py",
        "return 1.0 / (tokens[action_index] * actions[episode_index[action_index]] * episodes).double()",
        "return torch.full((action_index.shape[0],), 1.0 / action_index.shape[0], dtype=torch.float64)",
    ),
    one(
        "episodes-by-their-actions",
        "episodes with more actions weigh more",
        "averaging/gradient",
        "averaging.py",
        "* actions[episode_index[action_index]] * episodes)",
        "* actions.sum())",
    ),
    one(
        "result-in-half",
        "a loss returned in the half precision of its input",
        "averaging/value",
        "averaging.py",
        ".to(result_dtype(values))",
        ".to(values.dtype)",
    ),
    one(
        "actions-counted-in-tokens",
        "S counted in tokens: an episode's long actions weigh it down",
        "averaging/value",
        "averaging.py",
        "lengths(episode_index, None)",
        "lengths(episode_index[action_index], None)",
    ),
    one(
        "average-in-half",
        "products and sum in the half precision of the input",
        "averaging/value",
        "averaging.py",
        "(values.double() * weights).sum()",
        "(values * weights.to(values.dtype)).sum()",
    ),
)

GRPO = (
    one(
        "std-left-in",
        "division by the standard deviation left in",
        "grpo/value",
        "grpo.py",
        "return centred - centred.mean(dim=-1, keepdim=True)",
        "advantage = centred - centred.mean(dim=-1, keepdim=True)\n"
        "    return advantage / (centred.std(dim=-1, keepdim=True, correction=0) + 1e-4)",
    ),
    one(
        "mean-over-the-batch",
        "the mean of the batch instead of the group",
        "grpo/value",
        "grpo.py",
        "centred = group - group[..., :1]\n    return centred - centred.mean(dim=-1, keepdim=True)",
        "return group - group.mean()",
    ),
    one(
        "rewards-in-float32",
        "rewards centred in float32: 1e8 and 1e8 + 1 are one number (tinker-cookbook)",
        "grpo/value",
        "grpo.py",
        "dtype=torch.float64).detach()",
        "dtype=torch.float32).double().detach()",
    ),
    one(
        "equal-rewards-not-zero",
        "plain r - mean leaves 1e-17 for three times 0.1",
        "grpo/equal_rewards",
        "grpo.py",
        "centred = group - group[..., :1]",
        "centred = group",
    ),
    one(
        "leave-one-out",
        "the mean of the others for the mean of the group (RLOO)",
        "grpo/value",
        "grpo.py",
        "centred = group - group[..., :1]\n    return centred - centred.mean(dim=-1, keepdim=True)",
        "centred = group - group[..., :1]\n"
        "    size = group.shape[-1]\n"
        "    return (centred - centred.mean(dim=-1, keepdim=True)) * (size / max(size - 1, 1))",
    ),
)

POLICY_GRADIENT = (
    one(
        "divided-by-positions",
        "each sequence divided by its number of positions (SkyRL's jax backend)",
        "policy_gradient/value",
        "policy_gradient.py",
        "return -(_ratio(new, old, weight) * weight).sum()",
        "return -(_ratio(new, old, weight) * weight).mean(-1).sum()",
    ),
    one(
        "logprobs-shifted",
        "rollout log-probabilities shifted by one (TRL #6191: by the prompt length)",
        "policy_gradient/value",
        "policy_gradient.py",
        '    same_shape("importance_sampling_loss"',
        '    old = old.roll(1, -1)\n    same_shape("importance_sampling_loss"',
    ),
    one(
        "ratio-inverted",
        "sampler over learner",
        "policy_gradient/value",
        "policy_gradient.py",
        "0.0, new.double() - old).exp()",
        "0.0, old - new.double()).exp()",
    ),
    one(
        "naive-k1",
        "the log-ratio itself backpropagated: no signal of the advantage",
        "policy_gradient/gradient",
        "policy_gradient.py",
        "return -(_ratio(new, old, weight) * weight).sum()",
        "kl = torch.where(weight == 0, 0.0, new.double() - old)\n"
        "    return (-(_ratio(new, old, weight) * weight).detach() + kl - kl.detach()).sum()",
    ),
    one(
        "unread-positions-read",
        "0 times NaN at a position that is no action",
        "policy_gradient/value",
        "policy_gradient.py",
        "return torch.where(weight == 0, 0.0, new.double() - old).exp()",
        "return (new.double() - old).exp()",
    ),
    one(
        "closed-form-sign",
        "the closed-form gradient with the sign of ascent",
        "policy_gradient/closed_form",
        "policy_gradient.py",
        "0.0, -_ratio(new.detach(), old, weight) * weight)",
        "0.0, _ratio(new.detach(), old, weight) * weight)",
    ),
    one(
        "ratio-truncated",
        "the importance ratio truncated at 2",
        "policy_gradient/value",
        "policy_gradient.py",
        "new.double() - old).exp()",
        "new.double() - old).exp().clamp(max=2.0)",
    ),
    one(
        "ratio-in-half",
        "the log-ratio taken in the dtype of the input",
        "policy_gradient/value",
        "policy_gradient.py",
        "new.double() - old).exp()",
        "(new - old.to(new.dtype)).double()).exp()",
    ),
    one(
        "whitened",
        "advantages whitened over the batch",
        "policy_gradient/value",
        "policy_gradient.py",
        '    same_shape("importance_sampling_loss"',
        '    weight = torch.where(weight == 0, 0.0, weight - weight.mean())\n    same_shape("importance_sampling_loss"',
    ),
)

MUTANTS = (*AVERAGES, *GRPO, *POLICY_GRADIENT, *ADVANTAGES, *LOGITS, *SPOD)

HARMLESS = (
    one(
        "sums-in-another-order",
        "the same sum written the other way round",
        "averaging",
        "averaging.py",
        "(values.double() * weights).sum()",
        "(weights * values.double()).sum()",
    ),
    one(
        "centred-on-the-last",
        "centred on the last reward instead of the first",
        "grpo",
        "grpo.py",
        "centred = group - group[..., :1]",
        "centred = group - group[..., -1:]",
    ),
    one(
        "minus-outside",
        "the minus inside the sum",
        "policy_gradient",
        "policy_gradient.py",
        "return -(_ratio(new, old, weight) * weight).sum()",
        "return (-_ratio(new, old, weight) * weight).sum()",
    ),
    one(
        "kl-swap-claimed",
        "claimed of TRL #4935 as a swapped KL, where it was right: the same divergence under another name",
        "sdpo",
        BUCKETS,
        'if options.divergence == "reverse_kl":\n        return kl_divergence(p.log, q.log)',
        'student, teacher = p.log, q.log\n    if options.divergence == "reverse_kl":\n'
        "        return kl_divergence(student, teacher)",
    ),
    one(
        "chunks-of-one-row",
        "float64 blocks of a single row",
        "sdpo",
        "numerics.py",
        "CHUNK = 1 << 21",
        "CHUNK = 1",
    ),
    one(
        "gate-differentiated",
        "the gate left attached to the graph: piecewise constant, so its gradient is 0 almost everywhere",
        "spod",
        GATE,
        "gate = success & (sum_by(row_teacher - row_student, tokens) < 0)",
        "soft = sum_by(row_teacher - row_student, tokens)\n    gate = success & ((soft.sign() * 1.0) < 0)",
    ),
    one(
        "spod-chunks-of-one-row",
        "float64 blocks of a single row",
        "spod",
        "numerics.py",
        "CHUNK = 1 << 21",
        "CHUNK = 1",
    ),
    one(
        "gate-of-the-mean",
        "the gate on mean log-probabilities: n > 0 turns no sign",
        "spod",
        GATE,
        "(sum_by(row_teacher - row_student, tokens) < 0)",
        "(sum_by(row_teacher - row_student, tokens) / tokens < 0)",
    ),
)

QUICK = (
    "flat-mean",
    "std-left-in",
    "divided-by-positions",
    "clip-after-mask",
    "masked-nan-leaks",
    "gate-at-a-tie",
)  # killed in `make test`; `make mutants` kills all
