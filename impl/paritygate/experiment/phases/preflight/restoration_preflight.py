"""Do both arms start from the same state? Logprobs of one fixed batch, before any update and after an identical one."""

import asyncio
import dataclasses
import math
from collections.abc import Sequence

from paritygate.backend import Datum, Trainer, cross_entropy_datum
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided, PhaseStopped
from paritygate.experiment.run.state import State
from paritygate.experiment.step.arm_run import fresh_trainer
from paritygate.experiment.step.collector import Collector
from paritygate.spec.experiment import Arm

PHASE = "restoration_preflight"
SEQUENCES = 2  # of the fixed batch
LONGEST = 256  # tokens of each

Rows = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Shown:
    """Logprobs of the fixed batch by fresh clients of one arm, and how far the same client differs, asked twice."""

    before: Rows
    floor_before: float
    after: Rows
    floor_after: float


async def restoration_preflight(state: State) -> Decided:
    """PhaseStopped unless fresh clients of all arms agree before and after one identical throw-away update.

    Before any update LoRA's B is 0, so the first comparison alone cannot see another A: hence the second, on a second
    set of clients. A service that does not repeat its bits is compared within a multiple of its noise floor: what the
    very same client returns when it is asked twice, and, after the update, what a second client of the same arm does.
    The arms are asked side by side, as they train; the first failure is raised once all have ended.
    """
    collector = await Collector.of(state, state.settings())
    batch = fixed_batch(collector)
    before: dict[str, Rows] = {}
    after: dict[str, Rows] = {}
    floor_before = floor_after = 0.0
    asked = await asyncio.gather(*(logprobs_of(state, arm, batch) for arm in state.exp.arms), return_exceptions=True)
    for arm, shown in zip(state.exp.arms, asked, strict=True):
        if isinstance(shown, BaseException):
            raise shown
        before[arm.name], after[arm.name] = shown.before, shown.after
        floor_before, floor_after = max(floor_before, shown.floor_before), max(floor_after, shown.floor_after)
    moved = largest_difference([next(iter(before.values())), next(iter(after.values()))])
    if floor_after:  # gradients do not repeat either: the same arm once more, from its start
        again = await updated(state, await fresh_trainer(state, state.exp.arms[0]), batch)
        floor_after = max(floor_after, largest_difference([next(iter(after.values())), again]))
    facts: Record = {
        "tokens": sum(len(datum.tokens) for datum in batch),
        "largest_difference_before": largest_difference(list(before.values())),
        "largest_difference_after": largest_difference(list(after.values())),
        "moved_by_the_update": moved,
        "noise_floor_before": floor_before,
        "noise_floor_after": floor_after,
        "adam": {"beta1": state.exp.adam.beta1, "beta2": state.exp.adam.beta2, "eps": state.exp.adam.eps},
        "adam_read_back": "unverified: the service has no call that tells the optimizer's settings",
    }
    refuse_unequal(state, facts)
    exact = not (floor_before or floor_after)
    how = "bit for bit" if exact else f"within {state.exp.protocol.noise.multiple:g} times the service's noise"
    return Decided(
        f"fresh clients of {', '.join(before)} agree {how} before and after one identical update",
        f"{facts['tokens']} tokens compared; the update moved one by up to {moved:.3g} nats, the noise floor is "
        f"{max(floor_before, floor_after):.3g}",
        facts,
    )


async def logprobs_of(state: State, arm: Arm, batch: Sequence[Datum]) -> Shown:
    """The arm's, where it will train: before any update, and by a second client after the throw-away one."""
    client = await fresh_trainer(state, arm)
    before = (await client.forward(batch, "cross_entropy")).logprobs
    floor_before = await repeated(client, batch, before)
    client = await fresh_trainer(state, arm)
    after = await updated(state, client, batch)
    return Shown(before, floor_before, after, await repeated(client, batch, after))


def refuse_unequal(state: State, facts: Record) -> None:
    """PhaseStopped where the arms differ by more than noise, where noise drowns everything, or nothing was trained."""
    noise = state.exp.protocol.noise
    floors = {when: facts[f"noise_floor_{when}"] for when in ("before", "after")}
    if not max(floors.values()) <= noise.at_most:
        what = (
            f"the same client asked twice differs by {max(floors.values()):g} nats a token, {noise.at_most:g} are "
            "allowed (protocol.noise.at_most): nothing smaller could be told from noise"
        )
        raise PhaseStopped(Decided(what, "paired arms cannot be compared through that much noise", facts))
    if any(not facts[f"largest_difference_{when}"] <= noise.multiple * floor for when, floor in floors.items()):
        what = (
            "the arms do not start from the same state: logprobs of the fixed batch differ by "
            f"{facts['largest_difference_before']:g} before any update and by {facts['largest_difference_after']:g} "
            f"after one identical update, where the noise floor is {floors['before']:g} and {floors['after']:g}"
        )
        raise PhaseStopped(Decided(what, "paired arms must differ in nothing but the advantage", facts))
    if not facts["moved_by_the_update"]:
        what = "the throw-away update moved no logprob of the fixed batch"
        raise PhaseStopped(Decided(what, "the service does not train", facts))
    if facts["moved_by_the_update"] <= noise.multiple * floors["after"]:
        what = (
            f"one update moves a logprob by {facts['moved_by_the_update']:.3g} nats, no more than the service's noise "
            f"({floors['after']:.3g}): whether the arms' LoRA starts equal cannot be seen"
        )
        state.deviation(PHASE, "restoration_unresolved", what)


def fixed_batch(collector: Collector) -> list[Datum]:
    """The ends of the gold episodes of the first training tasks: assistant turns, calls and results; all weighted 1."""
    split = collector.exp.protocol.train.split
    episodes = [collector.gold(split, task) for task in collector.train_tasks()[:SEQUENCES]]
    sequences = [list(episode.tokens[-LONGEST:]) for episode in episodes]
    return [cross_entropy_datum(tokens, [0.0] + [1.0] * (len(tokens) - 1)) for tokens in sequences]


async def repeated(client: Trainer, batch: Sequence[Datum], first: Rows) -> float:
    """The largest |difference| in nats between `first` and the same batch through the same client once more."""
    return largest_difference([first, (await client.forward(batch, "cross_entropy")).logprobs])


async def updated(state: State, trainer: Trainer, batch: Sequence[Datum]) -> Rows:
    """Logprobs of the batch after one optimiser step on it; Adam is passed explicitly, as training passes it."""
    adam = state.exp.adam
    await trainer.forward_backward(batch, "cross_entropy")
    await trainer.optim_step(adam.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps)
    return (await trainer.forward(batch, "cross_entropy")).logprobs


def largest_difference(arms: Sequence[Rows]) -> float:
    """The largest |difference| in nats of any token between the first and any other; NaN counts as infinite."""
    first, *others = arms
    largest = 0.0
    for other in others:
        for row, other_row in zip(first, other, strict=True):
            for a, b in zip(row, other_row, strict=True):
                size = abs(a - b) if a != b else 0.0
                largest = max(largest, math.inf if math.isnan(size) else size)
    return largest
