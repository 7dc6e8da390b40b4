"""Judged episodes of a step: what was sampled, how it was scored, what the teacher thinks of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from paritygate.agent.judge import Judged
from paritygate.agent.trajectory import Trajectory
from paritygate.experiment.advantages import Scores


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The teacher's logprobs (L,) in nats, None off the mask, and what its context held.

    context: the tokens that stood before the trajectory's own turns, kept for logit-level scoring and not written down.
    student: the student's logprobs scored again by the same path, where the spec asks for that; None otherwise.
    """

    logprobs: tuple[float | None, ...]
    has_feedback: bool
    sibling: int | None
    shortened_tokens: int
    context_tokens: int
    context: tuple[int, ...] = ()
    student: tuple[float | None, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """What trajectories/*.jsonl keeps."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "context"}


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One episode of a step with its judgement; `teacher` is None for an arm that needs none."""

    trajectory: Trajectory
    judged: Judged
    teacher: Teacher | None = None

    @property
    def composite(self) -> float | None:
        """The judge's composite; None where it was not parsed or the simulator failed: the rollout leaves its group."""
        judgement = self.judged.judgement
        return None if judgement is None or not self.trajectory.trains else judgement.composite

    @property
    def student_logprobs(self) -> tuple[float | None, ...]:
        """What a teacher is compared with: the logprobs that sampling returned, or those scored again."""
        again = self.teacher.student if self.teacher is not None else None
        return self.trajectory.sampler_logprobs if again is None else again

    def scores(self) -> Scores:
        """What an advantage may look at."""
        return Scores(
            composite=self.composite,
            mask=self.trajectory.mask,
            sampler_logprobs=self.student_logprobs,
            teacher_logprobs=None if self.teacher is None else self.teacher.logprobs,
        )

    def to_json(self) -> dict[str, Any]:
        """One line of trajectories/*.jsonl; `Trajectory.from_json` reads its part of it."""
        judgement = self.judged.judgement
        return {
            **{field.name: getattr(self.trajectory, field.name) for field in dataclasses.fields(self.trajectory)},
            "judgement": None if judgement is None else dataclasses.asdict(judgement) | {"composite": self.composite},
            "judge_tries": self.judged.tries,
            "judge_first_try_parsed": self.judged.first_try_parsed,
            "teacher": None if self.teacher is None else self.teacher.to_json(),
        }


@dataclasses.dataclass(frozen=True)
class Group:
    """The rollouts of one task at one step, in the order of their index."""

    task_index: int
    rollouts: tuple[Rollout, ...]

    def composites(self) -> list[float]:
        """The composites of the rollouts that have one."""
        return [rollout.composite for rollout in self.rollouts if rollout.composite is not None]


def flat(groups: Sequence[Group]) -> list[Rollout]:
    """All rollouts of a step sorted by (group, rollout): the order of completion never shows."""
    return [rollout for group in groups for rollout in group.rollouts]
