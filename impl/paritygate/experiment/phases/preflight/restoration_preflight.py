"""Do both arms start from the same state? Logprobs of one fixed batch, before any update and after an identical one."""

import math
from collections.abc import Sequence

from paritygate.backend import Datum, Trainer, cross_entropy_datum
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided, PhaseStopped
from paritygate.experiment.run.state import State
from paritygate.experiment.step.arm_run import fresh_trainer
from paritygate.experiment.step.collector import Collector

SEQUENCES = 2  # of the fixed batch
LONGEST = 256  # tokens of each

Rows = tuple[tuple[float, ...], ...]


async def restoration_preflight(state: State) -> Decided:
    """PhaseStopped unless fresh clients of all arms agree, bit for bit, before and after one throw-away update.

    Before any update LoRA's B is 0, so the first comparison alone cannot see another A: hence the second, on a second
    set of clients.
    """
    collector = await Collector.of(state, state.settings())
    batch = fixed_batch(collector)
    before: dict[str, Rows] = {}
    after: dict[str, Rows] = {}
    for arm in state.exp.arms:
        before[arm.name] = (await (await fresh_trainer(state, arm)).forward(batch, "cross_entropy")).logprobs
        after[arm.name] = await updated(state, await fresh_trainer(state, arm), batch)
    facts: Record = {
        "tokens": sum(len(datum.tokens) for datum in batch),
        "largest_difference_before": largest_difference(list(before.values())),
        "largest_difference_after": largest_difference(list(after.values())),
        "moved_by_the_update": largest_difference([next(iter(before.values())), next(iter(after.values()))]),
        "adam": {"beta1": state.exp.adam.beta1, "beta2": state.exp.adam.beta2, "eps": state.exp.adam.eps},
        "adam_read_back": "unverified: the service has no call that tells the optimizer's settings",
    }
    if facts["largest_difference_before"] or facts["largest_difference_after"]:
        raise PhaseStopped(
            Decided(
                "the arms do not start from the same state: logprobs of the fixed batch differ by "
                f"{facts['largest_difference_before']:g} before any update and by "
                f"{facts['largest_difference_after']:g} after one identical update",
                "paired arms must differ in nothing but the advantage",
                facts,
            )
        )
    if not facts["moved_by_the_update"]:
        raise PhaseStopped(
            Decided("the throw-away update moved no logprob of the fixed batch", "the service does not train", facts)
        )
    return Decided(
        f"fresh clients of {', '.join(before)} agree bit for bit before and after one identical update",
        f"{facts['tokens']} tokens compared; the update moved one by up to {facts['moved_by_the_update']:.3g} nats",
        facts,
    )


def fixed_batch(collector: Collector) -> list[Datum]:
    """The openings of the first training tasks, cut, every token but the first weighted 1."""
    sequences = [collector.opening_tokens(task)[-LONGEST:] for task in collector.train_tasks()[:SEQUENCES]]
    return [cross_entropy_datum(tokens, [0.0] + [1.0] * (len(tokens) - 1)) for tokens in sequences]


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
