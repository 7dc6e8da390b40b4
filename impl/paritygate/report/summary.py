"""What the page says in words and small tables, computed from the run's files."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paritygate.report.files import Record, RunFiles

LARGE = 8  # billions of parameters from which the paper's gains are reported

OUTCOMES = {
    "validated": "Validated: every interval lies entirely above its margin.",
    "failed": "Failed: the primary interval lies entirely below its margin.",
    "inconclusive": "Inconclusive: the intervals do not settle it at this number of tasks.",
    "incomplete": "Incomplete: results are missing, nothing is imputed and nothing is decided.",
    "stopped": "Stopped by a gate of the protocol; its logs are kept.",
    "unfinished": "Not finished: no verdict yet.",
}


def outcome(run: RunFiles) -> str:
    """A key of OUTCOMES."""
    if run.verdict is not None and run.verdict["outcome"] in OUTCOMES:
        return run.verdict["outcome"]
    return "stopped" if run.stopped is not None else "unfinished"


def headline(run: RunFiles) -> str:
    """What came out, in one or two plain sentences."""
    if run.verdict is not None:
        return run.verdict["why"].removeprefix(f"{run.verdict['outcome'].capitalize()}. ")
    if run.stopped is not None:
        return f"{run.stopped.name}: {run.stopped.decided}."
    done = run.phases[-1].name if run.phases else "nothing"
    return f"The last phase that is done is {done}; run.py --resume goes on from there."


def mixed_groups(run: RunFiles) -> list[Record]:
    """Per arm: how many groups of a training task's rollouts had unequal composites, and unequal rewards."""
    rows: list[Record] = []
    for arm in run.arms:
        steps = run.training(arm)
        groups = sum(len(row["tasks"]) for row in steps)
        rows.append(
            {
                "arm": arm,
                "groups": groups,
                "composite": int(sum(row.get("groups_with_mixed_composite") or 0 for row in steps)),
                "reward": int(sum(row.get("groups_with_mixed_reward") or 0 for row in steps)),
            }
        )
    return [row for row in rows if row["groups"]]


def gate_rows(run: RunFiles) -> list[Record]:
    """Every gate of the activation pilot: the arm, the fallback it was tried under, and what was measured."""
    facts = run.facts("activation_pilot")
    tables = [("", facts.get("gates", {}))]
    tables += [(attempt["fallback"], attempt.get("gates", {})) for attempt in facts.get("fallbacks", [])]
    return [
        {"variant": variant or "as specified", "arm": arm, **row}
        for variant, table in tables
        for arm, rows in table.items()
        for row in rows
    ]


def step_rows(run: RunFiles) -> list[Record]:
    """The training metrics, one row an arm and step."""
    return [row for arm in run.arms for row in run.training(arm)]


def paired_items(run: RunFiles) -> list[Record]:
    """Per evaluated task: both arms' composite and reward (means over rollouts), and the differences."""
    treatment, baseline = comparison(run)
    tasks = sorted({row["task_index"] for row in run.items})
    rows: list[Record] = []
    for task in tasks:
        row: Record = {"task": task}
        for role, arm in (("treatment", treatment), ("baseline", baseline)):
            items = [item for item in run.items if item["arm"] == arm and item["task_index"] == task]
            row[role] = {key: _mean([item.get(key) for item in items]) for key in ("composite", "reward")}
            row[role]["ended_by"] = ", ".join(sorted({str(item.get("ended_by")) for item in items}))
        for key in ("composite", "reward"):
            pair = row["treatment"][key], row["baseline"][key]
            row[f"{key}_difference"] = None if None in pair else pair[0] - pair[1]
        rows.append(row)
    return rows


def comparison(run: RunFiles) -> tuple[str, str]:
    """(treatment, baseline)."""
    named = run.spec["protocol"]["comparison"]
    return named["treatment"], named["baseline"]


def pass_hat(run: RunFiles) -> list[Record]:
    """pass^k of every arm for k up to the rollouts of a task: the chance that k of them all succeed."""
    most = run.spec["eval"]["rollouts_per_task"]
    rows: list[Record] = []
    for arm in run.arms:
        wins: dict[int, list[bool]] = {}
        for item in run.items:
            if item["arm"] == arm:
                wins.setdefault(item["task_index"], []).append(item["reward"] == 1.0)
        if not wins:
            continue
        values = [
            _mean([math.comb(sum(won), k) / math.comb(len(won), k) for won in wins.values() if len(won) >= k])
            for k in range(1, most + 1)
        ]
        rows.append({"arm": arm, "values": values})
    return rows


def dimension_answer(run: RunFiles) -> str | None:
    """Whether treatment is better on some dimensions than on others, as far as descriptive intervals can say."""
    rows: Sequence[Record] = (run.verdict or {}).get("dimensions") or ()
    if not rows:
        return None
    clear = [row for row in rows if row["betting_low"] > 0 or row["betting_high"] < 0]
    parts = [f"{row['dimension'].replace('_', ' ')} {row['mean']:+.3f}" for row in rows]
    answer = (
        "no dimension's interval excludes 0"
        if not clear
        else "the interval excludes 0 for " + ", ".join(row["dimension"].replace("_", " ") for row in clear)
    )
    listed = "; ".join(parts)
    return f"By dimension, the difference is {listed}: {answer}. Descriptive, not adjusted for looking at several."


def honest_notes(run: RunFiles) -> list[str]:
    """What must be said beside the numbers: the tasks' defects, the partners, the room, the grading."""
    notes = [*_evidence_notes(run), *run.facts("design_check").get("notes", [])]
    notes += _partner_notes(run.spec["protocol"])
    notes += _grading_notes(run)
    notes += _room_notes(run)
    notes += _teacher_notes(run)
    notes.append(
        "The benchmark's README calls these tasks outdated (its successors fix 26 retail tasks). All tasks of tau2 "
        "retail derive from this benchmark's test split, so a model trained on those has seen it."
    )
    return notes


def _evidence_notes(run: RunFiles) -> list[str]:
    """What a reader must not overlook: how much a result at this size shows, and what was replaced."""
    model, protocol = run.spec["base_model"], run.spec["protocol"]
    notes = [
        "An extension of arXiv 2601.20802, which tested neither multi-turn agents nor rewards of a judge: no "
        "replication of it."
    ]
    size = re.search(r"(\d+(?:\.\d+)?)([BM])\b", model, re.IGNORECASE)
    if size is None or size[2].upper() == "M" or float(size[1]) < LARGE:
        notes.append(
            f"Weak evidence: {model} is small, and the paper reports that SDPO gains less at small scale, so a null "
            f"result here says little of {LARGE}B and above."
        )
    user = protocol["user"]["model"] if protocol["user"]["kind"] == "model" else "a script"
    notes.append(f"The benchmark's user simulator, GPT-4o, is replaced by {user}.")
    environment = run.facts("spec_preflight").get("environment", "own")
    graded = "this project's own retail environment" if environment == "own" else "upstream's tau_bench package"
    notes.append(f"Episodes ran in, and rewards were graded by, {graded}.")
    return notes


def _partner_notes(protocol: Record) -> list[str]:
    user, judge, context = protocol["user"], protocol["judge"], protocol["context"]
    notes = [
        "The user is scripted from the task's instruction, no model: not comparable with published numbers."
        if user["kind"] == "scripted"
        else f"The user simulator is {user['model']} at temperature {user['temperature']:g}; the benchmark fixes "
        "neither prompt nor model nor temperature, ours are in the frozen spec below.",
        "The judge is a set of rules over the transcript, not a model."
        if judge["kind"] == "rule"
        else f"The judge is {judge['model']} at temperature {judge['temperature']:g}, frozen.",
    ]
    if context["kind"] == "compact":
        notes.append(
            "The agent's prompt is compact: " + (context.get("why") or "tools as signatures, policy abridged") + "."
        )
    if protocol["warm_start"] is not None:
        warm = protocol["warm_start"]
        count = len(warm["tasks"]["tasks"] or []) or warm["tasks"]["first"]
        notes.append(
            f"All arms start from a warm start on {count} gold episodes, which are in no other part of the run."
        )
    return notes


def _grading_notes(run: RunFiles) -> list[str]:
    if not run.items:
        return []
    loose = [item for item in run.items if (item.get("grade") or {}).get("substring_only")]
    first = [item.get("judge_first_try_parsed") for item in run.items]
    parsed = [item.get("composite") is not None for item in run.items]
    return [
        f"{len(loose)} evaluated rewards rest on an expected number found inside a longer one (the benchmark's rule).",
        f"Judge answers parsed at evaluation: {_share(first)} at the first try, {_share(parsed)} in the end.",
        f"{sum((item.get('tries') or 1) > 1 for item in run.items)} evaluated episodes were played again after a fault "
        "of the user simulator or of the judge.",
    ]


def _room_notes(run: RunFiles) -> list[str]:
    endings: Counter[str] = Counter()
    for row in step_rows(run):
        endings.update(row.get("ended_by") or {})
    total = sum(endings.values())
    if not total:
        return []
    ended = ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(endings.items()))
    return [f"Of {total} training episodes, ended by: {ended}."]


def _teacher_notes(run: RunFiles) -> list[str]:
    notes: list[str] = []
    for arm in run.arms:
        rows = [row for row in run.training(arm) if "teacher_shortened" in row]
        if rows:
            episodes = sum(sum((row.get("ended_by") or {}).values()) for row in rows)
            contexts = episodes - sum(row.get("left_their_group") or 0 for row in rows)
            notes.append(
                f"{arm}: of {contexts} teacher contexts {sum(row['teacher_with_sibling'] for row in rows):g} held a "
                f"sibling, {sum(row['teacher_shortened'] for row in rows):g} were shortened, and "
                f"{sum(row['teacher_told_unsuccessful'] for row in rows):g} told a successful episode that it had "
                "failed (the wording asked for)."
            )
    return notes


def _mean(values: Sequence[Any]) -> float | None:
    present = [float(value) for value in values if value is not None]
    return math.fsum(present) / len(present) if present and len(present) == len(values) else None


def _share(flags: Sequence[Any]) -> str:
    return f"{sum(bool(flag) for flag in flags) / len(flags):.1%}"
