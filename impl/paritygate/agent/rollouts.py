"""The rollouts of a step: every episode at once, judged as each ends, scored by the teacher as each group is judged."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from paritygate.agent.judge.judgement import Answer, Judged, Judgement
from paritygate.agent.trajectory import Trajectory
from paritygate.spec.protocol import DIMENSIONS


@dataclasses.dataclass(frozen=True)
class TeacherScores:
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
        """What trajectories/*.jsonl holds."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "context"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TeacherScores":
        """The scores that `to_json` wrote, without their context; infinities and NaN are written as text."""
        return cls(**{**data, "logprobs": _nats(data["logprobs"]), "student": _nats(data["student"])})


def _nats(row: Sequence[float | str | None] | None) -> Any:
    return None if row is None else tuple(None if value is None else float(value) for value in row)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One episode, its judgement, and the teacher's scores of it (None for an arm that needs none)."""

    trajectory: Trajectory
    judged: Judged
    teacher: TeacherScores | None = None

    @property
    def composite(self) -> float | None:
        """The judge's composite; None where it was not parsed or the simulator failed: the rollout leaves its group."""
        judgement = self.judged.judgement
        return None if judgement is None or not self.trajectory.trains else judgement.composite

    @property
    def student_logprobs(self) -> tuple[float | None, ...]:
        """What a teacher is compared with (L,): the logprobs that sampling returned, or those scored again."""
        scored_again = self.teacher.student if self.teacher is not None else None
        return self.trajectory.sampler_logprobs if scored_again is None else scored_again

    @property
    def teacher_logprobs(self) -> tuple[float | None, ...] | None:
        """The teacher's logprobs (L,); None for an arm without a teacher."""
        return None if self.teacher is None else self.teacher.logprobs

    def to_json(self) -> dict[str, Any]:
        """One line of trajectories/*.jsonl; `Trajectory.from_json` reads its part of it."""
        judgement = self.judged.judgement
        return {
            **{field.name: getattr(self.trajectory, field.name) for field in dataclasses.fields(self.trajectory)},
            "judgement": None if judgement is None else dataclasses.asdict(judgement) | {"composite": self.composite},
            "judge_tries": self.judged.tries,
            "judge_answers": [dataclasses.asdict(answer) for answer in self.judged.answers],
            "judge_first_try_parsed": self.judged.first_try_parsed,
            "teacher": None if self.teacher is None else self.teacher.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Rollout":
        """The rollout that a line of trajectories/*.jsonl tells of."""
        stated, teacher = data["judgement"], data["teacher"]
        scores = None if stated is None else {name: stated[name] for name in (*DIMENSIONS, "rationale")}
        judged = Judged(
            None if scores is None else Judgement(**scores),
            data["judge_tries"],
            data["judge_first_try_parsed"],
            tuple(Answer(**answer) for answer in data["judge_answers"]),
        )
        trajectory = Trajectory.from_json({**data, "sampler_logprobs": _nats(data["sampler_logprobs"])})
        return cls(trajectory, judged, None if teacher is None else TeacherScores.from_json(teacher))


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


async def collect_step(
    tasks: Sequence[int],
    rollouts_per_task: int,
    play: Callable[[int, int], Awaitable[Trajectory]],
    judge: Callable[[Trajectory], Awaitable[Judged]],
    teach: Callable[[int, Sequence[Rollout]], Awaitable[TeacherScores]] | None = None,
) -> list[Group]:
    """One group a task, in the order of `tasks`, each in the order of its rollouts: completion order never shows.

    play(task, rollout) runs an episode; judge(trajectory) starts when it ended; teach(rollout, group) starts for every
    rollout of a task when all of that task are judged, since any may be its sibling. The first exception cancels all
    that still run, waits for them, and is raised.
    """

    async def rollout(task: int, index: int) -> Rollout:
        trajectory = await play(task, index)
        return Rollout(trajectory, await judge(trajectory))

    async def group(task: int) -> Group:
        judged = await gather([rollout(task, index) for index in range(rollouts_per_task)])
        if teach is None:
            return Group(task, tuple(judged))
        scores = await gather([teach(index, judged) for index in range(rollouts_per_task)])
        return Group(task, tuple(dataclasses.replace(r, teacher=s) for r, s in zip(judged, scores, strict=True)))

    return await gather([group(task) for task in tasks])


T = TypeVar("T")


async def gather(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """As asyncio.gather, but a failure cancels the rest, and nothing is left running when it is raised.

    asyncio.TaskGroup would raise an ExceptionGroup, nested as deep as these are: the caller wants the one error.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
