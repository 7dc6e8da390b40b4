"""A step's episodes: started together, judged and scored as soon as they can be, returned in one order."""

import asyncio
import dataclasses
import importlib.util
import random
import sys
import time
from pathlib import Path

import pytest

from paritygate.agent import collect_step
from paritygate.agent.judge import Judged
from paritygate.agent.renderer import load
from paritygate.agent.trajectory import Trajectory
from paritygate.backend.vocabulary import offline
from tests.counts import soak

NOTHING = Trajectory(
    split="train",
    task_index=0,
    rollout=0,
    seed=0,
    tokens=(1, 2),
    mask=(0, 1),
    sampler_logprobs=(None, -1.0),
    prompt_length=1,
    spans=((1, 2),),
    messages=(),
    ended_by="user_stop",
    turns=1,
    reward=0.0,
    grade={},
)


def collect(seconds, tasks=(5, 3, 9, 1), rollouts=4, *, judge_seconds=0.0):
    """A step whose episodes take `seconds(task, rollout)`; returns the result and the log of what started when."""
    log: list[tuple[str, int, int]] = []

    async def play(task, rollout):
        log.append(("play", task, rollout))
        await asyncio.sleep(seconds(task, rollout))
        return dataclasses.replace(NOTHING, task_index=task, rollout=rollout)

    async def judge(trajectory):
        log.append(("judge", trajectory.task_index, trajectory.rollout))
        await asyncio.sleep(judge_seconds)
        return Judged(None, 1, first_try_parsed=False)

    async def teach(rollout, group):
        log.append(("teach", group[rollout].trajectory.task_index, rollout))
        return [j.trajectory.rollout for j in group], rollout

    return asyncio.run(collect_step(tasks, rollouts, play, judge, teach)), log


def test_the_order_of_completion_never_shows():
    rng = random.Random(0)
    first = None
    for _ in range(soak(quick=20, full=300)):
        times = {(task, r): rng.random() / 100 for task in (5, 3, 9, 1) for r in range(4)}
        groups, _ = collect(lambda task, rollout, times=times: times[task, rollout])
        assert [[(c.trajectory.task_index, c.trajectory.rollout) for c in group.rollouts] for group in groups] == [
            [(task, r) for r in range(4)] for task in (5, 3, 9, 1)
        ]
        assert all(c.teacher == ([0, 1, 2, 3], c.trajectory.rollout) for group in groups for c in group.rollouts)
        first = first or groups
        assert groups == first


def test_a_judge_starts_when_its_episode_ends_and_a_teacher_when_its_group_is_judged():
    _, log = collect(lambda task, rollout: 0.5 if (task, rollout) == (5, 0) else 0.01 * (rollout + 1))
    assert [entry[0] for entry in log[:16]] == ["play"] * 16
    # Only the slow episode's group waits for it: the others are judged and taught before.
    slow = log.index(("judge", 5, 0))
    assert all(log.index(("judge", 5, r)) < slow for r in (1, 2, 3))
    assert all(log.index(("teach", task, r)) < slow for task in (3, 9, 1) for r in range(4))
    assert all(log.index(("teach", 5, r)) > slow for r in range(4))


def test_the_same_task_twice_in_a_step_makes_two_groups():
    groups, _ = collect(lambda task, rollout: 0.0, tasks=(2, 2), rollouts=2)
    assert len(groups) == 2


def test_a_failure_is_raised_and_leaves_nothing_running():
    running = set()

    async def play(task, rollout):
        running.add((task, rollout))
        try:
            await asyncio.sleep(0.01 if (task, rollout) == (1, 1) else 30)
            raise OSError("the service is gone")
        finally:
            running.discard((task, rollout))

    async def step():
        async def judge(trajectory):
            raise AssertionError

        with pytest.raises(OSError, match="the service is gone"):
            await collect_step([0, 1], 2, play, judge)
        return running, len(asyncio.all_tasks())

    started = time.monotonic()
    assert asyncio.run(step()) == (set(), 1)
    assert time.monotonic() - started < 10  # cancelled, not waited for


def test_without_a_teacher_nothing_is_taught():
    async def step():
        async def play(task, rollout):
            return NOTHING

        async def judge(trajectory):
            return Judged(None, 1, first_try_parsed=False)

        return await collect_step([0], 2, play, judge)

    [group] = asyncio.run(step())
    assert [rollout.teacher for rollout in group.rollouts] == [None, None]


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose sleeps take no time and whose clock says how long they would have taken."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


def test_sixteen_episodes_take_exactly_as_long_as_the_longest_of_them_and_little_work():
    """The step of the benchmark on a virtual clock, which a busy machine cannot slow down, and its CPU time."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "rollouts.py"
    module = importlib.util.spec_from_file_location("benchmark_of_rollouts", path)
    assert module is not None
    benchmark = importlib.util.module_from_spec(module)
    sys.modules[module.name] = benchmark
    module.loader.exec_module(benchmark)
    renderer = load("auto", offline("Qwen/Qwen3.5-4B"))
    seconds, work = [], []
    for _ in range(3):
        loop, started = VirtualClock(), time.process_time()
        calls = loop.run_until_complete(benchmark.step(renderer, 0.2))
        work.append(time.process_time() - started)
        seconds.append(loop.time())
        loop.close()
    longest = max(calls.values()) * 0.2
    assert len(calls) == 16
    assert sum(calls.values()) * 0.2 > 5 * longest
    assert seconds == pytest.approx([longest] * 3, abs=1e-6)
    assert (longest + min(work)) / longest <= benchmark.BOUND
