"""Known mistakes in GSPO: each dies by the obligation that it names (`python -m paritygate.harness mutants`)."""

from paritygate.harness.mutants import Mutant

MUTANTS = (
    Mutant(
        "ratio-of-the-sum",
        "the product of the tokens' ratios instead of its n-th root: the clip acts on long sequences alone",
        "gspo/value",
        "src/my_losses/gspo.py",
        "(difference.sum(-1) / row_mask.sum(-1).clamp(min=1)).exp()",
        "difference.sum(-1).exp()",
    ),
    Mutant(
        "clip-without-minimum",
        "the clipped ratio alone: a bad step that went too far gets no gradient back",
        "gspo/gradient",
        "src/my_losses/gspo.py",
        "gain = torch.minimum(ratio * weight, ratio.clamp(1 - low, 1 + high) * weight)",
        "gain = ratio.clamp(1 - low, 1 + high) * weight + 0 * torch.minimum(ratio, ratio)",
    ),
)
