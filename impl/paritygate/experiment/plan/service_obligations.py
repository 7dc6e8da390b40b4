"""Which obligations of a service (spec/service.json) the arms of an experiment stand on."""

import dataclasses
from typing import Any

from paritygate.errors import BadInputError
from paritygate.service.lab import Settings
from paritygate.service.obligations import Obligations, load
from paritygate.spec import Experiment

ALL_ARMS = (
    "wire/models",  # the base model and the rank of the spec
    "value/importance_sampling",
    "gradient/learns",  # the others compare steps with steps: only this one sees the wrong direction
    "gradient/cross_entropy",
    "gradient/importance_sampling",
    "gradient/masked",  # a position that is no action has advantage 0: it must leave no gradient
    "gradient/zero",
    "sums/alone",
    "optimiser/betas",  # at the spec's own
    "optimiser/eps",
    "optimiser/clip_off",  # the arms ask for no clipping
    "state/optimizer_restored",
    "state/saved_exactly",
    "state/snapshot_frozen",
    "sampling/three_ways",
    "sampling/distribution",  # of every rollout
    "sampling/stop_token",  # where a turn ends
    "isolation/two_tenants",  # the arms are two clients
)
GREEDY = ("sampling/greedy",)
TEMPERED = ("sampling/temperature",)
WARM_START = ("value/cross_entropy",)
LOGIT_ARMS = ("value/several_targets", "gradient/several_targets", "sampling/topk_logprobs")
DRAWS = 2048  # single tokens for a distribution
JSON, PAGE, RECEIPT = (f"service-proof{end}" for end in (".json", ".html", ".receipt.json"))


def stands_on(exp: Experiment) -> Obligations:
    """The obligations for the losses, the optimiser, the states and the sampling of this experiment, in their order.

    Raises BadInputError where the spec gives a reason to go on without an obligation that does not exist.
    """
    names = [*ALL_ARMS]
    if exp.eval.rollouts_per_task == 1:  # then the evaluation is greedy
        names += GREEDY
    if exp.protocol.rollout.temperature != 1:
        names += TEMPERED
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


def proof_settings(exp: Experiment) -> dict[str, Any]:
    """What the proof is run with, as its receipt has it: the experiment's rank and betas."""
    return dataclasses.asdict(Settings(rank=exp.lora_rank, draws=DRAWS, beta1=exp.adam.beta1, beta2=exp.adam.beta2))
