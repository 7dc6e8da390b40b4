"""Evaluation: the same held-out tasks for every arm, greedy, the same judge; what is missing is never imputed."""

import asyncio
import statistics
import time
from typing import Any

from paritygate.agent.judge import Judgement, RuleJudge, agreement
from paritygate.agent.rollouts import Rollout
from paritygate.backend import Sampler
from paritygate.errors import BackendError
from paritygate.experiment.run.journal import Record, finite
from paritygate.experiment.run.outcome import Decided
from paritygate.experiment.run.state import State
from paritygate.experiment.run.trajectories import write_trajectories
from paritygate.experiment.step.collector import EVALUATED_AT_ONCE, Collector
from paritygate.receipts import canonical, write_atomic
from paritygate.spec.experiment import Arm, Experiment
from paritygate.spec.protocol import DIMENSIONS

PHASE = "evaluate"
TRIES = 3  # an episode spoilt by the simulator or left without a judgement is tried again with other seeds


async def evaluate(state: State) -> Decided:
    """One item an arm, task and rollout, each committed by itself.

    Raises BackendError (exit 5) when one stays without a judgement: nothing is imputed and nothing is final, --resume
    tries the missing items again, with other seeds, and only those.
    """
    collector = await Collector.of(state, state.settings())
    items = await all_items(state, collector)
    missing = [item for item in items if item["composite"] is None]
    if missing:
        named = ", ".join(f"task {item['task_index']} of {item['arm']} ({item['missing']})" for item in missing)
        raise BackendError(
            f"the evaluation is incomplete: no judgement after {TRIES} tries with other seeds for {named}; a missing "
            f"item is never imputed, --resume tries these {len(missing)} of {len(items)} again."
        )
    write_atomic(state.directory / "items.jsonl", b"".join(canonical(finite(item)) + b"\n" for item in items))
    files = ["items.jsonl", *state.journal.files(PHASE)]
    what, facts = summary(state.exp, items)
    why = "every item has a parsed judgement and no simulator's fault"
    return Decided(what, why, {**facts, "max_seq_len": collector.longest_evaluated}, files)


def summary(exp: Experiment, items: list[Record]) -> tuple[str, Record]:
    """What the items come to, in a sentence and as facts."""
    means = _means(exp, items)
    scores = ", ".join(f"{arm} {row['composite']:.3f} (reward {row['reward']:.3f})" for arm, row in means.items())
    facts: Record = {"items": len(items), "arms": means, "agreement": agreement_with_rules(items)}
    return f"{len(items)} items judged; mean composite: {scores}", facts


async def all_items(state: State, collector: Collector) -> list[Record]:
    """The items of all arms, evaluated side by side, in the arms' order; the first failure once all have ended."""
    arms = (evaluate_arm(state, arm, collector) for arm in state.exp.arms)
    items: list[Record] = []
    for evaluated in await asyncio.gather(*arms, return_exceptions=True):
        if isinstance(evaluated, BaseException):
            raise evaluated
        items += evaluated
    return items


async def evaluate_arm(state: State, arm: Arm, collector: Collector) -> list[Record]:
    """The arm's items in the order of (task, rollout); those that are committed already are read, not run again."""
    backend = await state.backend(state.exp.arms.index(arm))
    sampler = await backend.sampling(model_path=state.facts("train")["samplers"][arm.name])
    slots = asyncio.Semaphore(EVALUATED_AT_ONCE)
    jobs = [
        (task, rollout) for task in collector.evaluation_tasks() for rollout in range(state.exp.eval.rollouts_per_task)
    ]
    before = len(state.journal.units(f"{PHASE}-{arm.name}/"))
    done, started = 0, time.monotonic()

    async def one(task: int, rollout: int) -> Record:
        nonlocal done
        async with slots:
            item = await evaluate_item(state, arm, sampler, collector, task, rollout)
        done += 1
        state.progress.update(f"{arm.name}, {done} of {len(jobs)} episodes")
        if done > before and (done % EVALUATED_AT_ONCE == 0 or done == len(jobs)):
            left = (time.monotonic() - started) / (done - before) * (len(jobs) - done)
            state.log(f"{PHASE}, {arm.name}: {done} of {len(jobs)} episodes", left)
        return item

    with state.timings.measure(PHASE, what="episodes", arm=arm.name):
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(task, rollout)) for task, rollout in jobs]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the rest were cancelled; one sentence, one exit code
    return [task.result() for task in tasks]


async def evaluate_item(
    state: State, arm: Arm, sampler: Sampler, collector: Collector, task: int, rollout: int
) -> Record:
    """One item, committed whole: the first try that is judged and without a simulator's fault.

    Every try without is committed by itself, so that the next has other seeds, after a resume too. After TRIES more of
    them the item of the last is returned, its composite None, and not committed: it is still to be had.
    """
    unit = f"{PHASE}-{arm.name}/task-{task:04d}-{rollout}"
    committed = state.journal.committed(unit)
    if committed is not None:
        return committed["item"]
    state.account.record()
    state.account.check()
    missed = f"{PHASE}-missed-{arm.name}/task-{task:04d}-{rollout}-try-"
    before = len(state.journal.units(missed))
    item: Record = {}
    for attempt in range(before, before + TRIES):
        episode = await collector.evaluation_episode(sampler, task, rollout, attempt)
        name = f"{PHASE}-{arm.name}-{task:04d}-{rollout}"
        item = item_of(arm, task, rollout, episode, attempt + 1)
        if item["composite"] is not None:
            path = write_trajectories(state.directory, name, [episode])
            item |= {"rules": await by_rules(state, collector, episode)}
            if attempt >= TRIES:
                what = f"{arm.name}, task {task}, rollout {rollout}: judged at try {attempt + 1}, after a resume"
                state.deviation(PHASE, "missing_item_tried_again", what)
            state.account.record()  # what is committed is counted, wherever the process ends
            return state.journal.commit(unit, {"item": item, "trajectories": path})["item"]
        path = write_trajectories(state.directory, f"{name}-try-{attempt:04d}", [episode])
        state.account.record()
        state.journal.commit(f"{missed}{attempt:04d}", {"missing": item["missing"], "trajectories": path})
    return item


async def by_rules(state: State, collector: Collector, episode: Rollout) -> Record | None:
    """What the rules say of an episode that a model judged; None where the rules are the judge."""
    if state.exp.protocol.judge.kind == "rule" or not episode.trajectory.trains:
        return None
    task = collector.source.task(episode.trajectory.split, episode.trajectory.task_index)
    judged = await RuleJudge().judge(episode.trajectory, task)
    return None if judged.judgement is None else {name: getattr(judged.judgement, name) for name in DIMENSIONS}


def agreement_with_rules(items: list[Record]) -> Record | None:
    """How far the model judge agrees with the rules over all items that both judged; None where the rules judge."""
    rows = [(item["dimensions"], item["rules"]) for item in items if item["rules"] is not None]
    if not rows:
        return None
    by_model, by_rules_alone = (
        [None if row is None else Judgement(**row, rationale={}) for row in side] for side in zip(*rows, strict=True)
    )
    return agreement(by_model, by_rules_alone)


def item_of(arm: Arm, task: int, rollout: int, episode: Rollout, tries: int) -> Record:
    """One line of items.jsonl; `composite` None (and `missing` saying why) where there is nothing to decide with."""
    judgement, trajectory = episode.judged.judgement, episode.trajectory
    scored = episode.composite is not None and judgement is not None
    missing = None if scored else trajectory.fault or "the judge was not parsed"
    return {
        "arm": arm.name,
        "task_index": task,
        "rollout": rollout,
        "composite": episode.composite,
        "dimensions": {name: getattr(judgement, name) for name in DIMENSIONS} if scored else None,
        "reward": trajectory.reward,
        "ended_by": trajectory.ended_by,
        "turns": trajectory.turns,
        "assistant_tokens": sum(trajectory.mask),
        "grade": dict(trajectory.grade),
        "tries": tries,
        "judge_tries": episode.judged.tries,
        "judge_first_try_parsed": episode.judged.first_try_parsed,
        "missing": missing,
    }


def _means(exp: Experiment, items: list[Record]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for arm in exp.arms:
        of_arm = [item for item in items if item["arm"] == arm.name]
        scored = [item["composite"] for item in of_arm if item["composite"] is not None]
        means[arm.name] = {
            "composite": statistics.fmean(scored) if scored else None,
            "reward": statistics.fmean(item["reward"] for item in of_arm),
            "judge_parse_first_rate": _rate([item["judge_first_try_parsed"] for item in of_arm if item["judge_tries"]]),
            "judged": len(scored),
        }
    return means


def _rate(parsed: list[bool]) -> float | None:
    return statistics.fmean(parsed) if parsed else None
