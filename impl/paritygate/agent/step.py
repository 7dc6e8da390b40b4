"""All episodes of a step at once: judged as each ends, taught as each group is judged; always in the same order."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paritygate.agent.judge.judgement import Judged
from paritygate.agent.trajectory import Trajectory

T = TypeVar("T")


@dataclass(frozen=True)
class Judgment:
    """One episode of a group and what the judge made of it."""

    trajectory: Trajectory
    judged: Judged


@dataclass(frozen=True)
class Collected(Generic[T]):
    """One episode of a step: trajectory, judgement, and what `teach` returned for it (None without `teach`)."""

    trajectory: Trajectory
    judged: Judged
    taught: T | None


async def collect_step(
    tasks: Sequence[int],
    rollouts_per_task: int,
    play: Callable[[int, int], Awaitable[Trajectory]],
    judge: Callable[[Trajectory], Awaitable[Judged]],
    teach: Callable[[int, Sequence[Judgment]], Awaitable[T]] | None = None,
) -> list[list[Collected[T]]]:
    """One list a task, in the order of `tasks`, each in the order of its rollouts: completion order never shows.

    play(task, rollout) runs an episode; judge(trajectory) starts when it ended; teach(rollout, group) starts for every
    rollout of a task when all of that task are judged, since any may be its sibling. The first exception cancels all
    that still run, waits for them, and is raised.
    """

    async def group(task: int) -> list[Collected[T]]:
        async def one(rollout: int) -> Judgment:
            trajectory = await play(task, rollout)
            return Judgment(trajectory, await judge(trajectory))

        judged = await _all([one(rollout) for rollout in range(rollouts_per_task)])
        if teach is None:
            return [Collected(j.trajectory, j.judged, None) for j in judged]
        taught = await _all([teach(rollout, judged) for rollout in range(rollouts_per_task)])
        return [Collected(j.trajectory, j.judged, t) for j, t in zip(judged, taught, strict=True)]

    return await _all([group(task) for task in tasks])


U = TypeVar("U")


async def _all(awaitables: Sequence[Awaitable[U]]) -> list[U]:
    """As gather, but nothing is left running after a failure."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
