"""The timing pilot: one real step, every part timed, projected to the whole run and held against the budget."""

from collections import Counter

from paritygate.experiment.run.account.cost import Cost, cost_of
from paritygate.experiment.run.account.meter import SAVED
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided, PhaseStopped
from paritygate.experiment.run.state import State
from paritygate.experiment.step.arm_run import ArmRun
from paritygate.experiment.step.collector import EVALUATED_AT_ONCE, Collector
from paritygate.experiment.step.training_step import training_step
from paritygate.receipts import canonical, write_atomic
from paritygate.spec.experiment import Arm

PHASE = "timing_pilot"
FILE = "feasibility.json"


async def timing_pilot(state: State) -> Decided:
    """One step of the arm that asks most (with a teacher, if any) on the first tasks; its client is thrown away.

    At a service a whole step, whose episodes run at once; the embedded server takes one after another, so there one
    group of the step is timed and counts for each. Writes feasibility.json; PhaseStopped when the projection passes the
    budget and the spec requires feasibility.
    """
    arm = next((arm for arm in state.exp.arms if arm.needs_teacher), state.exp.arms[0])
    run = await ArmRun.open(state, PHASE, arm, state.settings())
    embedded = (await state.backend()).embedded
    timed = 1 if embedded else state.exp.protocol.rollout.tasks_per_step
    if not run.done:
        collector = await Collector.of(state, state.settings())
        state.progress.update(f"one step of {arm.name}")
        record = await training_step(run, collector.train_tasks()[:timed], collector)
        state.account.record()
        await run.commit(record)
    parts = seconds_by_part(state, state.exp.protocol.rollout.tasks_per_step / timed)
    at_once = state.side_by_side() if embedded else len(state.exp.arms)
    feasibility = project(state, arm, parts, embedded=embedded, arms_at_once=at_once)
    hours = feasibility["wall_seconds"] / 3600, feasibility["gpu_hours"]
    cost = projected_cost(state, state.exp.protocol.rollout.tasks_per_step / timed, hours)
    feasibility["cost"] = cost.to_json()
    write_atomic(state.directory / FILE, canonical(feasibility))
    files = [FILE, *state.journal.files(PHASE)]
    minutes, allowed = feasibility["wall_seconds"] / 60, state.exp.budget.max_wall_minutes
    sentence = (
        f"projected: {minutes:.1f} of {allowed:g} minutes, {feasibility['gpu_hours']:.2f} of "
        f"{state.exp.budget.gpu_hours:g} GPU hours; {cost.line()}"
    )
    if feasibility["problems"] and state.exp.feasibility_required:
        raise PhaseStopped(
            Decided(f"over budget: {sentence}", "; ".join(feasibility["problems"]), {"feasibility": FILE}, files)
        )
    return Decided(sentence, "one step was timed, part by part, and multiplied out", {"feasibility": FILE}, files)


def projected_cost(state: State, groups: float, hours: tuple[float, float]) -> Cost:
    """Tokens, saved states and money of the whole run, from those of the timed groups and what was used before.

    Every arm counts as the timed one, which asks most; an evaluated episode as one of training, less its training.
    hours: the projected ones, and those of GPUs.
    """
    exp, step = state.exp, Counter(state.account.used(PHASE))
    used = state.account.used()
    steps = len(exp.arms) * (exp.protocol.pilot.steps + exp.steps)
    episodes = exp.eval.n_examples * exp.eval.rollouts_per_task * len(exp.arms) / exp.batch_size
    for name, count in step.items():
        grown = count if name == SAVED else count * groups
        evaluated = 0.0 if name == SAVED or name.endswith("/trained") else episodes
        used[name] += round(grown * (steps + evaluated))
    used[SAVED] += len(exp.arms)
    return cost_of(exp, used, hours, state.prices)


GROWING = frozenset({"rollouts", "advantages", "forward_backward"})  # with the number of episodes


def seconds_by_part(state: State, groups: float) -> dict[str, float]:
    """Seconds of each part of a step of `groups` timed ones; of the last time where a kill made it be timed twice."""
    entries = [entry for entry in state.timings.entries(PHASE) if entry.get("step") == 0]
    parts = {entry["what"]: entry["seconds"] for entry in entries}
    return {part: seconds * (groups if part in GROWING else 1.0) for part, seconds in parts.items()}


def project(state: State, arm: Arm, parts: dict[str, float], *, embedded: bool, arms_at_once: int) -> Record:
    """Wall seconds and GPU hours of what comes (pilots, training, evaluation) and of what was spent."""
    exp = state.exp
    step = sum(parts.values())
    rounds = -(-len(exp.arms) // arms_at_once)
    episodes = exp.eval.n_examples * exp.eval.rollouts_per_task
    waves = episodes / exp.batch_size if embedded else -(-episodes // EVALUATED_AT_ONCE)
    state.account.record()
    spent = state.account.seconds()
    phases = {
        "spent": spent,
        "activation_pilot": step * exp.protocol.pilot.steps * rounds,
        "train": step * exp.steps * rounds,
        "evaluate": parts["rollouts"] * waves * rounds,
    }
    wall = sum(phases.values())
    gpu_hours = 0.0 if embedded else wall / 3600
    problems: list[str] = []
    if wall > 60 * exp.budget.max_wall_minutes:
        problems.append(f"{wall / 60:.1f} minutes are projected, {exp.budget.max_wall_minutes:g} are allowed")
    if gpu_hours > exp.budget.gpu_hours:
        problems.append(f"{gpu_hours:.2f} GPU hours are projected, {exp.budget.gpu_hours:g} are allowed")
    return {
        "status": "infeasible" if problems else "feasible",
        "wall_seconds": round(wall, 1),
        "gpu_hours": round(gpu_hours, 4),
        "gpu_hours_say": "the embedded server uses none" if embedded else "one GPU held for the whole wall time",
        "step_seconds": {part: round(seconds, 3) for part, seconds in parts.items()},
        "timed_arm": arm.name,
        "phases": {name: round(seconds, 1) for name, seconds in phases.items()},
        "problems": problems,
    }
