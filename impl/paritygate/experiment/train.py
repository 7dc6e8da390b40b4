"""Training: every arm from the same fresh state, the same tasks in the same order, one optimiser step a batch."""

from typing import Any

from paritygate.experiment.activation import measured
from paritygate.experiment.collect import Collector
from paritygate.experiment.gates import GateResult, check_gate
from paritygate.experiment.journal import Record
from paritygate.experiment.lane import PROCESS, Lane, LaneRun, advance
from paritygate.experiment.metrics import add_tallies
from paritygate.experiment.state import Decided, PhaseStopped, State
from paritygate.report import write_vocabulary

PHASE = "train"


async def train(state: State) -> Decided:
    """All arms, step by step side by side; GateStopped on NaN, PhaseStopped when |advantage| passes its gate."""
    settings = state.settings()
    collector = await Collector.of(state, settings)
    lanes = [Lane(PHASE, arm, settings) for arm in state.exp.arms]
    runs = [await LaneRun.open(state, lane) for lane in lanes]

    def refuse(run: LaneRun, record: Record) -> None:
        refuse_divergence(state, run.lane, run.done - 1, record["metrics"])

    await advance(runs, state.exp.steps, collector, refuse)
    samplers: Record = {}
    for run in runs:
        sampler = await run.trainer.snapshot(f"{run.lane.key}-final-{PROCESS}")
        samplers[run.lane.arm.name] = sampler.path
    policy = await state.policy()
    vocabulary = write_vocabulary(state.directory, lambda ids: str(policy.tokenizer.decode(ids)))
    counts = {lane.arm.name: _counts(state, lane) for lane in lanes}
    mixed = ", ".join(f"{name}: {c['groups_with_mixed_reward']:g} of {c['groups']:g}" for name, c in counts.items())
    return Decided(
        f"{state.exp.steps} steps an arm taken; groups with mixed outcomes: {mixed}",
        "no step was NaN and no arm's mean |advantage| passed its gate",
        {"samplers": samplers, "counts": counts, "steps": state.exp.steps, "tasks": list(collector.train_tasks())},
        [*state.journal.files(PHASE), vocabulary],
    )


def refuse_divergence(state: State, lane: Lane, step: int, metrics: Record) -> None:
    """PhaseStopped when the step's mean |teacher - student| passes the upper bound of its gate: no tuning."""
    for check in state.exp.activation_gate.checks:
        value = metrics.get(check.metric)
        if check.metric != "sdpo_mean_abs_token_adv" or check.max is None or value is None:
            continue
        result = check_gate(check, float(value))
        if not result.passed and not float(value) <= check.max:
            raise PhaseStopped(_divergence(state, lane, step, result))


def _divergence(state: State, lane: Lane, step: int, result: GateResult) -> Decided:
    what = f"training stopped: arm {lane.arm.name} at step {step}, {result.sentence()}"
    state.deviation(PHASE, "divergence", what)
    why = "a mean |advantage| over its gate is divergence: stop and record, no tuning"
    return Decided(what, why, {"measured": measured(state, lane)}, state.journal.files(PHASE))


def _counts(state: State, lane: Lane) -> dict[str, Any]:
    units = state.journal.units(f"{lane.key}/step-")
    return add_tallies([(state.journal.committed(unit) or {})["tally"] for unit in units])
