"""Forced checks: does the teacher's context matter, and is nothing there when nothing is said?

That only actions train, the service shows itself: `gradient/masked`, in the phase service_proof.
"""

import dataclasses
import math
from collections.abc import Sequence

from paritygate.agent.rollouts import Rollout, flat, gather
from paritygate.agent.teacher import teacher_context, teacher_logprobs
from paritygate.agent.trajectory import Trajectory
from paritygate.backend import Sampler
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided, PhaseStopped
from paritygate.experiment.run.state import State
from paritygate.experiment.run.trajectories import write_trajectories
from paritygate.experiment.step.advantages import group_advantages
from paritygate.experiment.step.arm_run import fresh_trainer
from paritygate.experiment.step.collector import Collector

PHASE = "forced_checks"
NEGLIGIBLE = 0.1  # nats; what the activation gate calls a token that the teacher moved


@dataclasses.dataclass(frozen=True)
class Gap:
    """|teacher - student| over assistant tokens (nats): mean, maximum, share above NEGLIGIBLE."""

    mean: float
    largest: float
    share: float

    @classmethod
    def of(cls, sizes: Sequence[float]) -> "Gap":
        """The gap of a non-empty list of sizes."""
        share = sum(size > NEGLIGIBLE for size in sizes) / len(sizes)
        return cls(math.fsum(sizes) / len(sizes), max(sizes), share)


async def forced_checks(state: State) -> Decided:
    """PhaseStopped when the right sibling changes nothing beyond noise.

    The sibling is the task's gold episode, so that the check does not depend on a rollout having succeeded.
    """
    collector = await Collector.of(state, state.settings())
    trainer = await fresh_trainer(state, state.exp.arms[0])
    sampler = await trainer.snapshot(f"{PHASE}")
    task = collector.train_tasks()[0]
    state.progress.update("sampling one group")
    rollouts = flat(await collector.groups(PHASE, 0, [task], sampler, None))
    rollouts = [rollout for rollout in rollouts if rollout.trajectory.trains]
    if not rollouts:
        raise PhaseStopped(Decided("every episode of the forced checks was spoilt", "none is left", {}))
    solution = collector.gold(collector.exp.protocol.train.split, task)
    state.progress.update("scoring under the two contexts")
    asked = [(rollout.trajectory, sibling) for sibling in (None, solution) for rollout in rollouts]
    scored = await gather([score(collector, sampler, *contexts) for contexts in asked])
    control, taught = scored[: len(rollouts)], scored[len(rollouts) :]
    students = [await student_row(collector, sampler, rollout) for rollout in rollouts]
    empty = Gap.of(sizes(rollouts, control, students))
    with_sibling = Gap.of(sizes(rollouts, taught, students))
    advantages = group_advantages(
        "sdpo_token",
        [0.0] * len(rollouts),
        [rollout.trajectory.mask for rollout in rollouts],
        students,
        taught,
        clip=state.exp.protocol.advantage.clip,
        hybrid_weight=0.0,
    )
    facts: Record = {
        "negative_control": dataclasses.asdict(empty),
        "right_sibling": dataclasses.asdict(with_sibling),
        "tokens": len(sizes(rollouts, control, students)),
    }
    files = [write_trajectories(state.directory, PHASE, rollouts, advantages)]
    record_noise(state, empty)
    problems = find_problems(empty, with_sibling)
    if problems:
        why = "the advantage would not be what the spec says that it is"
        raise PhaseStopped(Decided(f"the forced checks stopped the run: {'; '.join(problems)}", why, facts, files))
    return Decided(
        f"the right sibling moves a token by {with_sibling.mean:.3g} nats on average, "
        f"an empty context by {empty.mean:.3g}",
        f"noise floor {empty.largest:.3g} nats at most, over {facts['tokens']} assistant tokens",
        facts,
        files,
    )


def record_noise(state: State, empty: Gap) -> None:
    """A deviation where noise alone would pass a lower bound of the activation gate: it then shows nothing."""
    least = {check.metric: check.min for check in state.exp.activation_gate.checks if check.min is not None}
    measured = {"sdpo_mean_abs_token_adv": empty.mean, "sdpo_frac_tokens_abs_adv_gt_0.1": empty.share}
    for metric, value in measured.items():
        if 0 < least.get(metric, 0.0) <= value:
            what = (
                f"with no sibling and no feedback {metric} is {value:.3g} already: noise alone passes {least[metric]:g}"
            )
            state.deviation(PHASE, "gate_within_noise", what)


def find_problems(empty: Gap, with_sibling: Gap) -> list[str]:
    """What stops the run, in sentences: a context that moves nothing beyond noise."""
    problems: list[str] = []
    if not math.isfinite(empty.mean):
        problems.append(f"with no sibling and no feedback the advantages are {empty.mean:g}")
    if not (with_sibling.mean > empty.mean and with_sibling.largest > empty.largest):
        problems.append(
            f"the right sibling changes no advantage: {with_sibling.mean:.3g} nats on average, {empty.mean:.3g} without"
        )
    return problems


async def student_row(collector: Collector, sampler: Sampler, rollout: Rollout) -> Sequence[float | None]:
    """The student's logprobs (L,) that training subtracts: of sampling, or scored again where the spec says so."""
    if collector.exp.protocol.advantage.student == "sampled":
        return rollout.trajectory.sampler_logprobs
    return await collector.score_again(sampler, rollout.trajectory)


async def score(
    collector: Collector, teacher: Sampler, trajectory: Trajectory, solution: Trajectory | None
) -> list[float | None]:
    """Teacher logprobs under a context with the solution, or with an empty block: then it is the student's own."""
    context = teacher_context(
        collector.renderer,
        collector.context,
        trajectory,
        feedback=None,
        sibling=solution,
        limit=collector.longest_scored,
    )
    return await teacher_logprobs(teacher, context, trajectory)


def sizes(
    rollouts: Sequence[Rollout], teacher: Sequence[Sequence[float | None]], student: Sequence[Sequence[float | None]]
) -> list[float]:
    """|teacher - student| of every assistant token, in nats."""
    return [
        abs(taught - scored)
        for rollout, teacher_row, student_logprobs in zip(rollouts, teacher, student, strict=True)
        for mask, taught, scored in zip(rollout.trajectory.mask, teacher_row, student_logprobs, strict=True)
        if mask and taught is not None and scored is not None
    ]
