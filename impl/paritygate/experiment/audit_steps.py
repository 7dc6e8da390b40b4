"""The training steps of a finished run held against their trajectories, the pilot's gates and the cost against both.

All of it is computed anew, offline: tasks and seeds by the spec's rule, counts, metrics and siblings by the
trajectories, gates by the counts, tokens and money by timings.jsonl. What only the service could say (losses,
logprobs, answers) is taken as it stands.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from paritygate.agent.judge.judgement import judgements_in
from paritygate.agent.judge.rules import judge_messages
from paritygate.agent.rollouts import Group, Rollout, flat
from paritygate.agent.seeds import derive
from paritygate.agent.trajectory import Trajectory
from paritygate.errors import Refused
from paritygate.experiment.phases.evaluate import summary
from paritygate.experiment.run.account.cost import TABLE, cost_of
from paritygate.experiment.run.entry_points import GroupAdvantages
from paritygate.experiment.run.journal import Record, by_number, finite
from paritygate.experiment.step.advantages import group_advantages
from paritygate.experiment.step.gates import check_gates
from paritygate.experiment.step.metrics import add_tallies, derived_metrics, measured_over, tally
from paritygate.losses.sdpo import select_sibling
from paritygate.receipts import PhaseChain
from paritygate.spec import Experiment
from paritygate.spec.findings import SPLIT_SIZES
from paritygate.spec.prices import load_prices
from paritygate.spec.protocol import DIMENSIONS
from paritygate.spec.strict import parse_json, read_plain

CLOSE = 1e-9
"""Of a number computed anew: another NumPy or torch may sum in another order."""


def check_steps(
    run_dir: Path, exp: Experiment, losses: Mapping[str | None, GroupAdvantages]
) -> list[tuple[Path, Trajectory]]:
    """The trajectories of all training steps with their files; Refused unless each step is what they say.

    losses: those that arms name by entry points, as they ran.
    """
    trajectories: list[tuple[Path, Trajectory]] = []
    seen: Counter[str] = Counter()
    for path in sorted((run_dir / "units").glob("*/step-*.json"), key=lambda path: by_number(str(path))):
        record = record_of(path)
        metrics, arm = record["metrics"], record["metrics"]["arm"]
        phase, variant, step = metrics["phase"], metrics["variant"], metrics["step"]
        key = "-".join(filter(None, [phase, arm, variant]))
        name = f"trajectories/{key}-{step:03d}.jsonl"
        if path.relative_to(run_dir).as_posix() != f"units/{key}/step-{seen[key]:03d}.json" or step != seen[key]:
            raise Refused(f"{path} is not step {seen[key]} of {key}: a step was removed, renamed or added.")
        if record["trajectories"] != name:
            raise Refused(f"{path} names {record['trajectories']}, not {name}.")
        seen[key] += 1
        lines = lines_of(run_dir / name)
        groups = groups_of(lines)
        check_groups(run_dir / name, exp, phase, step, groups)
        check_advantages(run_dir / name, exp, arm, groups, lines, losses)
        advantages = [[float(value) for value in line["advantages"]] for line in lines]
        rule = exp.protocol.advantage
        counts = tally(groups, success_wording=rule.success_wording)
        derived = derived_metrics(groups, advantages, metrics["executed_base_model"], rule)
        for stated, computed in ((record["tally"], counts), (metrics, derived)):
            for entry, value in finite(computed).items():
                if entry not in stated or not alike(stated[entry], value):
                    raise Refused(f"{path}: {entry} is {stated.get(entry)!r}, {value!r} by {run_dir / name}.")
        trajectories += [(run_dir / name, rollout.trajectory) for rollout in flat(groups)]
    return trajectories


def groups_of(lines: Sequence[Mapping[str, Any]]) -> list[Group]:
    """The groups that a trajectories file holds, as they were written."""
    rollouts = [Rollout.from_json(line) for line in lines]
    return [Group(task, tuple(rows)) for task, rows in groupby(rollouts, key=lambda r: r.trajectory.task_index)]


def check_groups(path: Path, exp: Experiment, phase: str, step: int, groups: Sequence[Group]) -> None:
    """Refused unless these are the tasks, rollouts and seeds of that step, each episode and sibling as it has to be."""
    selection, rollout = exp.protocol.train, exp.protocol.rollout
    order = selection.indices(SPLIT_SIZES[selection.split])
    per_step = rollout.tasks_per_step
    wanted = [order[place % len(order)] for place in range(step * per_step, (step + 1) * per_step)]
    tasks = [group.task_index for group in groups]
    timed = phase == "timing_pilot" and tasks == wanted[: len(tasks)]  # the embedded server is timed on fewer
    if tasks != wanted and not timed:
        raise Refused(f"{path} holds tasks {tasks}, the spec has {wanted} at step {step}.")
    for group in groups:
        if [r.trajectory.rollout for r in group.rollouts] != list(range(rollout.rollouts_per_task)):
            raise Refused(
                f"{path}: task {group.task_index} has not the {rollout.rollouts_per_task} rollouts of the spec."
            )
        for index, member in enumerate(group.rollouts):
            seed = derive(derive(exp.arms[0].seed, phase, step), group.task_index, index)
            check_episode(path, exp, member, selection.split, seed)
            check_sibling(path, exp, group, index)


def check_episode(path: Path, exp: Experiment, episode: Rollout, split: str, seed: int) -> None:
    """Refused unless tokens, mask, spans and logprobs fit each other; split, seed, judgement as they should be."""
    trajectory, judged = episode.trajectory, episode.judged
    where = f"{path}: task {trajectory.task_index}, rollout {trajectory.rollout}"
    if (trajectory.split, trajectory.seed) != (split, seed):
        raise Refused(f"{where} has split {trajectory.split} and seed {trajectory.seed}, not {split} and {seed}.")
    sampled = {place for start, end in trajectory.spans for place in range(start, end)}
    agreed = all(
        (place in sampled) == bool(mask) == (logprob is not None)
        for place, (mask, logprob) in enumerate(zip(trajectory.mask, trajectory.sampler_logprobs, strict=True))
    )
    stated = sum(message["role"] == "assistant" for message in trajectory.messages)
    if not agreed or not trajectory.turns == len(trajectory.spans) == stated:
        raise Refused(f"{where}: its mask, spans, turns and logprobs are not of the same sampled tokens.")
    judgement = judged.judgement
    if judgement is None or not trajectory.trains:
        return
    if exp.protocol.judge.kind == "rule":
        by_rules = judge_messages(trajectory.messages)
        if any(getattr(by_rules, name) != getattr(judgement, name) for name in DIMENSIONS):
            raise Refused(f"{where}: the rules give {by_rules}, not {judgement}.")
    elif not judged.answers or judgement not in judgements_in(judged.answers[-1].text):
        raise Refused(f"{where}: its judgement is not in the judge's last answer.")


def check_sibling(path: Path, exp: Experiment, group: Group, index: int) -> None:
    """Refused unless the teacher was shown the sibling that the spec's rule selects, or, for want of room, none."""
    teacher = group.rollouts[index].teacher
    if teacher is None or teacher.sibling is None:
        return
    rule = exp.protocol.advantage
    composites = [r.judged.judgement.composite if r.judged.judgement else None for r in group.rollouts]
    if teacher.sibling != select_sibling(composites, index, rule.sibling_threshold, rule.sibling_rule):
        raise Refused(f"{path}: task {group.task_index}, rollout {index} was shown another sibling than the spec's.")


def check_advantages(
    path: Path,
    exp: Experiment,
    name: str,
    groups: Sequence[Group],
    lines: Sequence[Mapping[str, Any]],
    losses: Mapping[str | None, GroupAdvantages],
) -> None:
    """Refused unless the advantages are those of the groups' composites and logprobs, by the arm's kind."""
    [arm] = [arm for arm in exp.arms if arm.name == name]
    if arm.kind == "sdpo_logit" or any(isinstance(value, str) for line in lines for value in line["advantages"]):
        return  # of logits, which are not written down; or not finite, and the step was refused
    written = iter(lines)
    for group in groups:
        rows = group_advantages(
            arm.kind,
            [rollout.composite for rollout in group.rollouts],
            [rollout.trajectory.mask for rollout in group.rollouts],
            [rollout.student_logprobs for rollout in group.rollouts],
            [rollout.teacher_logprobs for rollout in group.rollouts],
            clip=exp.protocol.advantage.clip,
            hybrid_weight=arm.hybrid_weight,
            loss=losses.get(arm.loss),
        )
        for index, row in enumerate(rows):
            if not alike(next(written)["advantages"], row):
                where = f"task {group.task_index}, rollout {index}"
                raise Refused(f"{path}: the advantages of {where} are not those of its composites and logprobs.")


def check_facts(run_dir: Path, exp: Experiment) -> None:
    """Refused unless the pilot's gates, and what training and evaluation came to, are those of units and items."""
    chain = PhaseChain(run_dir)
    if "activation_pilot" in chain.completed:
        facts = chain.record("activation_pilot")["facts"]
        tables = [("", facts.get("gates", {}))]
        tables += [(attempt["fallback"], attempt.get("gates", {})) for attempt in facts.get("fallbacks", [])]
        for variant, table in tables:
            for arm, rows in table.items():
                steps = steps_of(run_dir, "activation_pilot", arm, variant)
                results = check_gates(exp.activation_gate.checks, measured_over(steps))
                again = [{**dataclasses.asdict(result), "sentence": result.sentence()} for result in results]
                if not alike(rows, json.loads(json.dumps(finite(again)))):
                    raise Refused(f"{run_dir / 'phases'}: the gates of {arm} are not those of its pilot's units.")
        passed = any(table and all(row["passed"] for rows in table.values() for row in rows) for _, table in tables)
        if chain.record("activation_pilot")["outcome"] == "done" and not passed:
            raise Refused(f"{run_dir / 'phases'} say that the activation pilot is done, and a gate of it failed.")
    if "train" in chain.completed and chain.record("train")["outcome"] == "done":
        facts = chain.record("train")["facts"]
        for arm in exp.arms:
            steps = steps_of(run_dir, "train", arm.name)
            if len(steps) != exp.steps or facts["steps"] != exp.steps:
                raise Refused(f"{run_dir / 'units'} hold {len(steps)} steps of {arm.name}, the spec has {exp.steps}.")
            if not alike(facts["counts"][arm.name], add_tallies([step["tally"] for step in steps])):
                raise Refused(f"{run_dir / 'phases'}: the counts of {arm.name} are not those of its units.")
    if "evaluate" in chain.completed and chain.record("evaluate")["outcome"] == "done":
        stated, path = chain.record("evaluate"), run_dir / "items.jsonl"
        sentence, facts = summary(exp, lines_of(path))
        if stated["decided"] != sentence or any(not alike(stated["facts"][name], facts[name]) for name in facts):
            raise Refused(f"{run_dir / 'phases'}: what the evaluation came to is not what {path} gives.")


def steps_of(run_dir: Path, phase: str, arm: str, variant: str = "") -> list[Record]:
    """The committed steps of an arm in a phase, in their order."""
    folder = run_dir / "units" / "-".join(filter(None, [phase, arm, variant]))
    return [record_of(path) for path in sorted(folder.glob("step-*.json"), key=lambda path: by_number(path.name))]


def check_cost(run_dir: Path, exp: Experiment) -> None:
    """Refused unless cost.json is what timings.jsonl and the run's prices give; a run before its report has none."""
    if not (run_dir / "cost.json").exists():
        return
    stated, entries = record_of(run_dir / "cost.json"), lines_of(run_dir / "timings.jsonl")
    used: Counter[str] = Counter()
    for entry in entries:
        used.update(entry.get("used", {}))
    spent = [round(seconds / 3600, 4) for seconds in accumulate(e["seconds"] for e in entries if e["what"] == "spent")]
    prices = load_prices(run_dir / TABLE) if (run_dir / TABLE).exists() else None
    cost = cost_of(exp, used, (stated["hours"], stated["gpu_hours"]), prices)
    again = json.loads(json.dumps(finite(cost.to_json())))
    if stated["hours"] not in spent or stated["gpu_hours"] not in (0, stated["hours"]) or not alike(stated, again):
        raise Refused(f"{run_dir / 'cost.json'} is not what {run_dir / 'timings.jsonl'} and its prices give.")


def alike(stated: Any, computed: Any) -> bool:
    """Whether two JSON values are equal, numbers to CLOSE."""
    if isinstance(stated, Mapping) and isinstance(computed, Mapping):
        return stated.keys() == computed.keys() and all(alike(stated[name], computed[name]) for name in stated)
    if isinstance(stated, list | tuple) and isinstance(computed, list | tuple):
        return len(stated) == len(computed) and all(map(alike, stated, computed))
    if isinstance(stated, bool) or isinstance(computed, bool):
        return stated is computed
    if isinstance(stated, int | float) and isinstance(computed, int | float):
        return abs(stated - computed) <= CLOSE * max(1.0, abs(computed))
    return stated == computed


def record_of(path: Path) -> Record:
    """The JSON object in a file of the run."""
    return parse_json(read_plain(path))


def lines_of(path: Path) -> list[Record]:
    """The JSON objects in a file of the run, one a line."""
    return [parse_json(line) for line in read_plain(path, most=2**33).splitlines()]
