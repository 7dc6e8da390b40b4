"""From judged groups to the datums of one optimiser step: the one place where an arm's kind matters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from paritygate.agent.rollouts import Group, Rollout, flat
from paritygate.backend import Datum, Sampler, policy_gradient_datum
from paritygate.experiment.run.entry_points import load
from paritygate.experiment.step.advantages import group_advantages
from paritygate.experiment.step.logit import logit_datums
from paritygate.spec.experiment import Arm, Experiment


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """What one step sends: `sent[i]` is the index, among all its rollouts, of datum i; `labels[i]` names it.

    advantages: of every rollout of the step, sent or not, (L,) each.
    """

    datums: tuple[Datum, ...]
    labels: tuple[str, ...]
    sent: tuple[int, ...]
    advantages: tuple[tuple[float, ...], ...]
    loss_fn: str
    metrics: dict[str, Any]

    def only(self, index: int) -> "StepBatch":
        """The batch of datum `index` alone."""
        one = slice(index, index + 1)
        return dataclasses.replace(self, datums=self.datums[one], labels=self.labels[one], sent=self.sent[one])


async def make_batch(
    exp: Experiment, arm: Arm, groups: Sequence[Group], student: Sampler, teacher: Sampler
) -> StepBatch:
    """The datums of a step, sorted by (task, rollout). A rollout without a judgement trains nothing.

    A datum whose advantages are all exactly 0 adds exactly 0 to the summed loss and gradient, so it is not sent; one is
    sent when all are such, so that every batch is followed by its optimiser step. ValueError where there is none.
    """
    rollouts = flat(groups)
    trained = [index for index, rollout in enumerate(rollouts) if rollout.composite is not None]
    if arm.kind == "sdpo_logit":
        sent = trained or _placeholder(rollouts, trained)
        datums, advantages, metrics = await logit_datums(rollouts, sent, student, teacher, k=arm.top_k)
        loss_fn = "cross_entropy"
    else:
        advantages, metrics = batch_advantages(exp, arm, groups), {}
        sent = [index for index in trained if any(advantages[index])] or _placeholder(rollouts, trained)
        datums = [_datum(rollouts[index], advantages[index]) for index in sent]
        loss_fn = "importance_sampling"
    labels = tuple(label(rollouts[index]) for index in sent)
    return StepBatch(tuple(datums), labels, tuple(sent), tuple(map(tuple, advantages)), loss_fn, metrics)


def batch_advantages(exp: Experiment, arm: Arm, groups: Sequence[Group]) -> list[list[float]]:
    """One advantage a token for every rollout of the step; ValueError names task and rollout."""
    rows: list[list[float]] = []
    loss = load(arm.loss) if arm.loss is not None else None
    for group in groups:
        try:
            rows += group_advantages(
                arm.kind,
                [rollout.composite for rollout in group.rollouts],
                [rollout.trajectory.mask for rollout in group.rollouts],
                [rollout.student_logprobs for rollout in group.rollouts],
                [rollout.teacher_logprobs for rollout in group.rollouts],
                clip=exp.protocol.advantage.clip,
                hybrid_weight=arm.hybrid_weight,
                loss=loss,
            )
        except ValueError as error:
            raise ValueError(f"task {group.task_index}, {error}") from None
    return rows


def label(rollout: Rollout) -> str:
    """How a message names a trajectory."""
    return f"task {rollout.trajectory.task_index}, rollout {rollout.trajectory.rollout}"


def _placeholder(rollouts: Sequence[Rollout], trained: Sequence[int]) -> list[int]:
    """The one rollout that is sent with advantages of 0; ValueError where no episode trains."""
    playable = [*trained, *(index for index, rollout in enumerate(rollouts) if rollout.trajectory.trains)]
    if not playable:
        faults = " or ".join(sorted({str(rollout.trajectory.fault) for rollout in rollouts}))
        raise ValueError(f"{faults} in all {len(rollouts)} episodes of the step")
    return playable[:1]


def _datum(rollout: Rollout, advantages: Sequence[float]) -> Datum:
    trajectory = rollout.trajectory
    return policy_gradient_datum(trajectory.tokens, trajectory.mask, trajectory.sampler_logprobs, advantages)
