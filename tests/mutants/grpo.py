"""Known mistakes in paritygate/losses/grpo.py."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "std-left-in",
        "division by the standard deviation left in",
        "grpo/value",
        "losses/grpo.py",
        "advantage = (centred - centred.mean(dim=-1, keepdim=True)) / scale",
        "advantage = centred - centred.mean(dim=-1, keepdim=True)\n"
        "    advantage = advantage / (centred.std(dim=-1, keepdim=True, correction=0) + 1e-4) / scale",
    ),
    Mutant(
        "mean-over-the-batch",
        "the mean of the batch instead of the group",
        "grpo/value",
        "losses/grpo.py",
        "centred - centred.mean(dim=-1, keepdim=True)",
        "scaled - scaled.mean()",
    ),
    Mutant(
        "rewards-in-float32",
        "rewards centred in float32: 1e8 and 1e8 + 1 are one number (tinker-cookbook)",
        "grpo/value",
        "losses/grpo.py",
        "rewards.double().detach()",
        "rewards.float().double().detach()",
    ),
    Mutant(
        "equal-rewards-not-zero",
        "plain r - mean leaves 1e-17 for three times 0.1",
        "grpo/equal_rewards",
        "losses/grpo.py",
        "centred = scaled - scaled[..., :1]",
        "centred = scaled",
    ),
    Mutant(
        "leave-one-out",
        "the mean of the others for the mean of the group (RLOO)",
        "grpo/value",
        "losses/grpo.py",
        "advantage = (centred - centred.mean(dim=-1, keepdim=True)) / scale",
        "size = group.shape[-1]\n"
        "    advantage = (centred - centred.mean(dim=-1, keepdim=True)) / scale * (size / max(size - 1, 1))",
    ),
    Mutant(
        "advantage-attached",
        "the advantage carries the rewards' graph",
        "grpo/constant",
        "losses/grpo.py",
        "rewards.double().detach()",
        "rewards.double()",
    ),
)

HARMLESS = (
    Mutant(
        "centred-on-the-last",
        "centred on the last reward instead of the first",
        "grpo",
        "losses/grpo.py",
        "centred = scaled - scaled[..., :1]",
        "centred = scaled - scaled[..., -1:]",
    ),
)
