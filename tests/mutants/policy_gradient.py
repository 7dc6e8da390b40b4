"""Known mistakes in paritygate/losses/policy_gradient.py."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "divided-by-positions",
        "each sequence divided by its number of positions (SkyRL's jax backend)",
        "policy_gradient/value",
        "losses/policy_gradient.py",
        "return -(_ratio(new, old, weight) * weight).sum()",
        "return -(_ratio(new, old, weight) * weight).mean(-1).sum()",
    ),
    Mutant(
        "logprobs-shifted",
        "rollout log-probabilities shifted by one (TRL #6191: by the prompt length)",
        "policy_gradient/value",
        "losses/policy_gradient.py",
        '    same_shape("importance_sampling_loss"',
        '    old = old.roll(1, -1)\n    same_shape("importance_sampling_loss"',
    ),
    Mutant(
        "ratio-inverted",
        "sampler over learner",
        "policy_gradient/value",
        "losses/policy_gradient.py",
        "0.0, new.double() - old).exp()",
        "0.0, old - new.double()).exp()",
    ),
    Mutant(
        "naive-k1",
        "the log-ratio itself backpropagated: no signal of the advantage",
        "policy_gradient/gradient",
        "losses/policy_gradient.py",
        "return -(_ratio(new, old, weight) * weight).sum()",
        "kl = torch.where(weight == 0, 0.0, new.double() - old)\n"
        "    return (-(_ratio(new, old, weight) * weight).detach() + kl - kl.detach()).sum()",
    ),
    Mutant(
        "unread-positions-read",
        "0 times NaN at a position that is no action",
        "policy_gradient/value",
        "losses/policy_gradient.py",
        "return torch.where(weight == 0, 0.0, new.double() - old).exp()",
        "return (new.double() - old).exp()",
    ),
    Mutant(
        "closed-form-sign",
        "the closed-form gradient with the sign of ascent",
        "policy_gradient/closed_form",
        "losses/policy_gradient.py",
        "0.0, -_ratio(new.detach(), old, weight) * weight)",
        "0.0, _ratio(new.detach(), old, weight) * weight)",
    ),
    Mutant(
        "ratio-truncated",
        "the importance ratio truncated at 2",
        "policy_gradient/value",
        "losses/policy_gradient.py",
        "new.double() - old).exp()",
        "new.double() - old).exp().clamp(max=2.0)",
    ),
    Mutant(
        "ratio-in-half",
        "the log-ratio taken in the dtype of the input",
        "policy_gradient/value",
        "losses/policy_gradient.py",
        "new.double() - old).exp()",
        "(new - old.to(new.dtype)).double()).exp()",
    ),
    Mutant(
        "whitened",
        "advantages whitened over the batch",
        "policy_gradient/value",
        "losses/policy_gradient.py",
        '    same_shape("importance_sampling_loss"',
        '    weight = torch.where(weight == 0, 0.0, weight - weight.mean())\n    same_shape("importance_sampling_loss"',
    ),
)

HARMLESS = (
    Mutant(
        "minus-outside",
        "the minus inside the sum",
        "policy_gradient",
        "losses/policy_gradient.py",
        "return -(_ratio(new, old, weight) * weight).sum()",
        "return (-_ratio(new, old, weight) * weight).sum()",
    ),
)
