"""Which obligations of a service (spec/service.json) the arms of an experiment stand on."""

from paritygate.errors import BadInputError
from paritygate.service.obligations import Obligations, load
from paritygate.spec import Experiment

ALL_ARMS = (
    "value/importance_sampling",
    "gradient/cross_entropy",
    "gradient/importance_sampling",
    "gradient/zero",  # a position off the mask has advantage 0: it must leave no gradient
    "sums/alone",
    "optimiser/betas",
    "state/optimizer_restored",
    "state/saved_exactly",
    "state/snapshot_frozen",
    "sampling/three_ways",
    "sampling/distribution",
)
WARM_START = ("value/cross_entropy",)
LOGIT_ARMS = ("value/several_targets", "gradient/several_targets")


def stands_on(exp: Experiment) -> Obligations:
    """The obligations for the losses, the optimiser, the states and the sampling of this experiment, in their order.

    Raises BadInputError where the spec gives a reason to go on without an obligation that does not exist.
    """
    names = [*ALL_ARMS]
    if exp.protocol.warm_start is not None:
        names += WARM_START
    if any(arm.kind == "sdpo_logit" for arm in exp.arms):
        names += LOGIT_ARMS
    everything = load()
    defined = {entry.name for entry in everything.entries}
    for name in exp.protocol.service.undecided:
        if name not in defined:
            raise BadInputError(
                f"{exp.path}: /protocol/service/undecided: {name!r} is no obligation of spec/service.json."
            )
    return everything.only(names)


def price(exp: Experiment) -> tuple[int, int]:
    """Calls and tokens that the proof takes, about; preparation included."""
    entries = stands_on(exp).entries
    return sum(entry.calls for entry in entries) + 80, sum(entry.tokens for entry in entries) + 4000
