"""From judged groups to the datums of one optimiser step: the one place where an arm's kind matters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from paritygate.backend import Datum, Sampler, policy_gradient_datum
from paritygate.experiment.advantages import group_advantages
from paritygate.experiment.logit import logit_datums
from paritygate.experiment.rollouts import Group, Rollout, flat
from paritygate.spec.experiment import Arm, Experiment


@dataclasses.dataclass(frozen=True)
class Batch:
    """What is sent: `sent[i]` is the index, among all rollouts of the step, of datum i; `labels[i]` names it."""

    datums: tuple[Datum, ...]
    labels: tuple[str, ...]
    sent: tuple[int, ...]
    advantages: tuple[tuple[float, ...], ...]  # of every rollout, (L,) each
    loss_fn: str
    facts: dict[str, Any]

    def only(self, index: int) -> "Batch":
        """The batch of datum `index` alone."""
        one = slice(index, index + 1)
        return dataclasses.replace(self, datums=self.datums[one], labels=self.labels[one], sent=self.sent[one])


async def make_batch(exp: Experiment, arm: Arm, groups: Sequence[Group], student: Sampler, teacher: Sampler) -> Batch:
    """The datums of a step, sorted by (task, rollout). A rollout without a judgement trains nothing.

    A datum whose advantages are all exactly 0 adds exactly 0 to the summed loss and gradient, so it is not sent; one is
    kept when all are such, so that every batch is followed by its optimiser step.
    """
    if arm.kind == "sdpo_logit":
        return await _logit_batch(exp, arm, groups, student, teacher)
    rows = batch_advantages(exp, arm, groups)
    rollouts = flat(groups)
    trains = [index for index, rollout in enumerate(rollouts) if rollout.composite is not None]
    moving = [index for index in trains if any(rows[index])] or _placeholder(rollouts, trains)
    datums = [_datum(rollouts[index], rows[index]) for index in moving]
    return _batch(groups, datums, moving, rows, "importance_sampling", {})


def batch_advantages(exp: Experiment, arm: Arm, groups: Sequence[Group]) -> list[list[float]]:
    """One advantage a token for every rollout of the step; ValueError names task and rollout."""
    rows: list[list[float]] = []
    for group in groups:
        scores = [rollout.scores() for rollout in group.rollouts]
        try:
            clip = exp.protocol.advantage.clip
            rows += group_advantages(arm.kind, scores, clip=clip, hybrid_weight=arm.hybrid_weight)
        except ValueError as error:
            raise ValueError(f"task {group.task_index}, {error}") from None
    return rows


def label(rollout: Rollout) -> str:
    """How a message names a trajectory."""
    return f"task {rollout.trajectory.task_index}, rollout {rollout.trajectory.rollout}"


async def _logit_batch(exp: Experiment, arm: Arm, groups: Sequence[Group], student: Sampler, teacher: Sampler) -> Batch:
    rollouts = flat(groups)
    trains = [index for index, rollout in enumerate(rollouts) if rollout.composite is not None]
    trains = trains or _placeholder(rollouts, trains)
    datums, rows, facts = await logit_datums([rollouts[index] for index in trains], student, teacher, k=arm.top_k)
    advantages = [[0.0] * len(rollout.trajectory.mask) for rollout in rollouts]
    for index, row in zip(trains, rows, strict=True):
        advantages[index] = row
    return _batch(groups, datums, trains, advantages, "cross_entropy", facts)


def _batch(
    groups: Sequence[Group],
    datums: Sequence[Datum],
    sent: Sequence[int],
    rows: Sequence[Sequence[float]],
    loss_fn: str,
    facts: dict[str, Any],
) -> Batch:
    rollouts = flat(groups)
    return Batch(
        tuple(datums),
        tuple(label(rollouts[index]) for index in sent),
        tuple(sent),
        tuple(tuple(row) for row in rows),
        loss_fn,
        facts,
    )


def _placeholder(rollouts: Sequence[Rollout], trains: Sequence[int]) -> list[int]:
    """The one rollout that is sent with advantages of 0; ValueError where the simulator spoilt every one."""
    playable = [*trains, *(index for index, rollout in enumerate(rollouts) if rollout.trajectory.trains)]
    if not playable:
        raise ValueError(f"the user simulator failed in all {len(rollouts)} episodes of the step")
    return playable[:1]


def _datum(rollout: Rollout, advantages: Sequence[float]) -> Datum:
    trajectory = rollout.trajectory
    return policy_gradient_datum(trajectory.tokens, trajectory.mask, trajectory.sampler_logprobs, advantages)
