"""Episodes through the embedded server: the same at any concurrency, zero advantage without a block, nothing leaked."""

import asyncio
import gc
import os
import time

import psutil
import pytest

from paritygate import retail
from paritygate.agent import Limits, collect_step, gold_trajectory, run_episode
from paritygate.agent import prompt as prompts
from paritygate.agent.judge import RuleJudge
from paritygate.agent.renderer import load
from paritygate.agent.rollouts import flat
from paritygate.agent.seeds import derive
from paritygate.agent.teacher import teacher_context, teacher_logprobs
from paritygate.agent.user import ModelUser, ScriptedUser
from paritygate.backend import connect, cross_entropy_datum, policy_gradient_datum
from tests.counts import soak

LIMITS = Limits(max_turns=4, max_tokens_per_turn=24, max_seq_len=2048)
TASKS = (0, 50)


class Stage:
    """A backend session with the tiny model, its renderer, and the retail data in its compact form."""

    def __init__(self, backend, sampler, source):
        self.backend, self.sampler, self.source = backend, sampler, source
        self.renderer = load("auto", sampler.tokenizer, model=sampler.base_model)
        self.context = prompts.context("compact", source.wiki, source.tools)

    async def play(self, task, rollout, *, user="scripted"):
        env = retail.RetailEpisode(self.source, "train", task)
        seed = derive(0, task, rollout)
        simulator = ScriptedUser(env.task)
        if user == "model":
            settings = {"prompt": "{instruction}", "temperature": 1.0, "max_tokens": 8, "seed": seed}
            simulator = ModelUser(env.task, self.sampler, self.renderer, **settings)
        return await run_episode(
            env, self.renderer, self.sampler, simulator, context=self.context, limits=LIMITS, seed=seed, rollout=rollout
        )

    async def judge(self, trajectory):
        return await RuleJudge().judge(trajectory, None)

    async def teach(self, rollout, group):
        trajectory, judgement = group[rollout].trajectory, group[rollout].judged.judgement
        sibling = group[rollout - 1].trajectory
        contexts = [
            teacher_context(
                self.renderer, self.context, trajectory, feedback=feedback, sibling=solution, limit=LIMITS.max_seq_len
            )
            for feedback, solution in ((None, None), (judgement.rationale, None), (judgement.rationale, sibling))
        ]
        return [await teacher_logprobs(self.sampler, context, trajectory) for context in contexts]


def on_stage(tiny, tau_bench_dir, act, *, steps=1):
    """Run `act(stage)` in a session of its own, with a sampler of a freshly initialised adapter."""

    async def main():
        async with connect(tiny.base_url, tiny.api_key) as backend:
            trainer = await backend.training(tiny.model_name, rank=8, seed=0)
            for step in range(steps - 1):
                await warm(trainer, step)
            stage = Stage(backend, await trainer.snapshot("stage"), retail.load(tau_bench_dir))
            stage.trainer = trainer
            return await act(stage)

    return asyncio.run(main())


async def warm(trainer, step):
    """One update, so that the adapter is no longer nothing."""
    tokens = [step + i % 50 + 5 for i in range(40)]
    await trainer.forward_backward([cross_entropy_datum(tokens, [0.0] + [1.0] * 39)], "cross_entropy")
    await trainer.optim_step(1e-2)


def gaps(collected, which):
    """Teacher minus sampler logprob of every sampled token, of one of the three contexts."""
    trajectory = collected.trajectory
    rows = zip(collected.teacher[which], trajectory.sampler_logprobs, trajectory.mask, strict=True)
    return [teacher - sampled for teacher, sampled, mask in rows if mask]


def test_an_empty_block_has_no_advantage_and_a_block_has_one(tiny, tau_bench_dir):
    async def act(stage):
        return await collect_step(TASKS, 2, stage.play, stage.judge, stage.teach)

    groups = on_stage(tiny, tau_bench_dir, act, steps=3)
    everyone = flat(groups)
    assert all(sum(c.trajectory.mask) > 10 for c in everyone)
    # The noise floor of this server: its sampled and recomputed logprobs differ by less than this (nats).
    assert max(abs(gap) for c in everyone for gap in gaps(c, 0)) < 1e-4
    for c in everyone:
        sizes = [sum(map(abs, gaps(c, which))) / sum(c.trajectory.mask) for which in range(3)]
        assert sizes[1] > 0.01
        assert sizes[2] > 0.01
        assert abs(sizes[2] - sizes[1]) > 1e-4


def test_the_batch_is_the_same_at_any_concurrency(tiny, tau_bench_dir):
    async def all_at_once(stage):
        return await collect_step(TASKS, 3, stage.play, stage.judge)

    async def one_by_one(stage):
        return [[(await stage.play(task, r)) for r in range(3)] for task in reversed(TASKS)][::-1]

    together = on_stage(tiny, tau_bench_dir, all_at_once)
    one_at_a_time = on_stage(tiny, tau_bench_dir, one_by_one)
    assert [[c.trajectory for c in group.rollouts] for group in together] == one_at_a_time


def test_a_served_user_plays_along(tiny, tau_bench_dir):
    async def act(stage):
        return await asyncio.gather(*(stage.play(0, r, user="model") for r in range(3)))

    for trajectory in on_stage(tiny, tau_bench_dir, act):
        assert trajectory.ended_by in ("token_limit", "turn_limit", "user_stop", "user_fault", "sequence_limit")


def test_gold_episodes_and_trajectories_train(tiny, tau_bench_dir):
    async def act(stage):
        gold = gold_trajectory(stage.source, "train", 0, stage.renderer, stage.context)
        before = await stage.trainer.forward_backward(
            [cross_entropy_datum(gold.tokens, [float(m) for m in gold.mask])], "cross_entropy"
        )
        await stage.trainer.optim_step(1e-2)
        after = await stage.trainer.forward(
            [cross_entropy_datum(gold.tokens, [float(m) for m in gold.mask])], "cross_entropy"
        )
        trajectory = await stage.play(0, 0)
        datum = policy_gradient_datum(
            trajectory.tokens, trajectory.mask, trajectory.sampler_logprobs, [0.5 * m for m in trajectory.mask]
        )
        # On the policy that sampled, every ratio is 1: the loss is minus the sum of the advantages.
        fresh = await stage.backend.training(stage.sampler.base_model, rank=8, seed=0)
        passed = await fresh.forward_backward([datum])
        return before.loss, after.loss, passed.loss, -0.5 * sum(trajectory.mask)

    before, after, policy_loss, expected = on_stage(tiny, tau_bench_dir, act)
    assert after < before
    assert policy_loss == pytest.approx(expected, rel=1e-4)


def test_episodes_leak_no_memory_no_task_and_no_connection(tiny, tau_bench_dir):
    episodes = soak(quick=24, full=200)
    process = psutil.Process()

    def open_now():
        gc.collect()
        sockets = [c for c in process.net_connections(kind="tcp") if c.status == "ESTABLISHED"]
        mine = ("paritygate.agent", "paritygate.retail.episode")  # not the cached goals of a source
        ours = [o for o in gc.get_objects() if str(type(o).__module__).startswith(mine)]
        files = len(os.listdir("/proc/self/fd"))
        return len(asyncio.all_tasks()), len(sockets), files, process.memory_info().rss, len(ours)

    async def act(stage):
        counts = []
        for batch in range(episodes // 8):
            await collect_step([batch % 20], 8, stage.play, stage.judge)
            until = time.monotonic() + 10  # a probe of the service that is under way ends by itself
            while counts and len(asyncio.all_tasks()) > counts[0][0] and time.monotonic() < until:
                await asyncio.sleep(0.05)
            counts.append(open_now())
        return counts

    assert closed(process)  # those of earlier sessions
    counts = on_stage(tiny, tau_bench_dir, act)
    tasks, sockets, files, memory, ours = zip(*counts, strict=True)
    assert max(ours[1:]) <= ours[0]  # no episode, trajectory, user or database stays alive
    assert max(tasks[1:]) <= tasks[0]
    # A pool may grow by one connection for each of the 8 episodes side by side, and both ends are in this process;
    # one that every episode left open would be 16 by the third batch, 32 ends.
    assert max(sockets[1:]) <= sockets[0] + 2 * 8
    others = [all_files - ends for all_files, ends in zip(files, sockets, strict=True)]
    assert max(others[1:]) <= others[0] + 4
    # Allocators settle within the first batches, and the server, in this process too, keeps answers for a while.
    settled = len(memory) // 3
    assert memory[-1] - memory[settled] < (episodes - 8 * settled) * 100_000 + 15_000_000
    assert closed(process)


def closed(process, *, seconds=10.0):
    """Whether no TCP connection of this process is left; the SDK's transport closes them a moment after its session."""
    until = time.monotonic() + seconds
    while any(c.status == "ESTABLISHED" for c in process.net_connections(kind="tcp")):
        if time.monotonic() > until:
            return False
        gc.collect()
        time.sleep(0.1)
    return True
