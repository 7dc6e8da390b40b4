"""Training: every arm from the same fresh state, the same tasks in the same order, one optimiser step a batch."""

from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided, PhaseStopped
from paritygate.experiment.run.state import State
from paritygate.experiment.step.arm_run import PROCESS, ArmRun
from paritygate.experiment.step.collector import Collector
from paritygate.experiment.step.gates import GateResult, check_gate
from paritygate.experiment.step.schedule import advance
from paritygate.report import write_vocabulary

PHASE = "train"


async def train(state: State) -> Decided:
    """All arms, step by step side by side; GateStopped on NaN, PhaseStopped when |advantage| passes its gate."""
    settings = state.settings()
    collector = await Collector.of(state, settings)
    runs = [await ArmRun.open(state, PHASE, arm, settings) for arm in state.exp.arms]
    for run in runs:  # a step may have been committed by a process that was killed before it could judge it
        for step, record in enumerate(run.steps):
            refuse_divergence(run, step, record)
    await advance(runs, state.exp.steps, collector, lambda run, record: refuse_divergence(run, run.done - 1, record))
    samplers: Record = {}
    for run in runs:
        sampler = await run.trainer.snapshot(f"{run.key}-final-{PROCESS}", ttl_seconds=None)  # a result: it is kept
        samplers[run.arm.name] = sampler.path
    policy = await state.policy()
    vocabulary = write_vocabulary(state.directory, lambda ids: str(policy.tokenizer.decode(ids)))
    counts = {run.arm.name: run.tally() for run in runs}
    mixed = ", ".join(f"{name}: {c['groups_with_mixed_reward']:g} of {c['groups']:g}" for name, c in counts.items())
    return Decided(
        f"{state.exp.steps} steps an arm taken; groups with mixed outcomes: {mixed}",
        "no step was NaN and no arm's mean |advantage| passed its gate",
        {"samplers": samplers, "counts": counts, "steps": state.exp.steps, "tasks": list(collector.train_tasks())},
        [*state.journal.files(PHASE), vocabulary],
    )


def refuse_divergence(run: ArmRun, step: int, record: Record) -> None:
    """PhaseStopped when the step's mean |teacher - student| passes the upper bound of its gate: no tuning."""
    for check in run.state.exp.activation_gate.checks:
        value = record["metrics"].get(check.metric)
        if check.metric != "sdpo_mean_abs_token_adv" or check.max is None or value is None:
            continue
        result = check_gate(check, float(value))
        if not result.passed and not float(value) <= check.max:
            raise PhaseStopped(_divergence(run, step, result))


def _divergence(run: ArmRun, step: int, result: GateResult) -> Decided:
    what = f"training stopped: arm {run.arm.name} at step {step}, {result.sentence()}"
    run.state.deviation(PHASE, "divergence", what)
    why = "a mean |advantage| over its gate is divergence: stop and record, no tuning"
    return Decided(what, why, {"measured": run.measured()}, run.state.journal.files(PHASE))
