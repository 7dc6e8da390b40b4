"""A small run directory, made up: the shape of a real one, numbers that a reader can check."""

import json
import random
from pathlib import Path
from typing import Any

from paritygate.receipts import canonical
from paritygate.spec import Experiment, load
from paritygate.spec.schema import spec_folder
from paritygate.statistics import decide_frozen

WORDS = [
    "<s>",
    "You",
    " are",
    " an",
    " agent",
    ".",
    "\n",
    "User",
    ":",
    " cancel",
    " #W12",
    "Assistant",
    " <b>done</b>",
    "!",
]
HOSTILE = "</div><script>alert(1)</script>"


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(canonical(row) + b"\n" for row in rows))


def step_metrics(phase: str, arm: str, step: int, rng: random.Random) -> dict[str, Any]:
    teacher = arm != "grpo"
    row: dict[str, Any] = {
        "phase": phase,
        "arm": arm,
        "variant": "",
        "step": step,
        "tasks": [step * 4 + offset for offset in range(4)],
        "loss": rng.uniform(-1, 1),
        "datums": 12,
        "groups_with_mixed_composite": 3.0,
        "groups_with_mixed_reward": 1.0,
        "grpo_frac_groups_nonzero_adv": 0.75,
        "judge_parse_success_rate": 1.0,
        "executed_base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "composite_rubric_score": 0.5 + 0.05 * step + rng.uniform(0, 0.05),
        "invalid_tool_use": rng.random(),
        "ungrounded_claims": rng.random(),
        "upfront_clarification": rng.random(),
        "tau_bench_task_reward": rng.random(),
        "turns": 3.5,
        "tokens": 420.0,
        "ended_by": {"user_stop": 12, "sequence_limit": 4},
        "abs_advantage_mean": rng.uniform(0, 1),
        "abs_advantage_max": 4.2,
        "frac_clipped": 0.01,
        "sampler_recomputed_max_abs_diff": 1e-6,
    }
    if teacher:
        row |= {
            "sdpo_mean_abs_token_adv": rng.uniform(0.2, 0.9),
            "sdpo_frac_tokens_abs_adv_gt_0.1": rng.uniform(0.3, 0.6),
        }
        row |= {"teacher_with_sibling": 5, "teacher_shortened": 2, "teacher_told_unsuccessful": 3}
        row |= {"left_their_group": 1}
    return row


def trajectory(arm: str, task: int, rollout: int, rng: random.Random) -> dict[str, Any]:
    tokens = [rng.randrange(1, len(WORDS)) for _ in range(60)]
    mask = [int(10 <= t < 20 or t >= 40) for t in range(60)]
    return {
        "split": "train",
        "task_index": task,
        "rollout": rollout,
        "tokens": tokens,
        "mask": mask,
        "sampler_logprobs": [-0.5 if on else None for on in mask],
        "prompt_length": 5,
        "turns": 2,
        "messages": [{"role": "user", "content": f"Hello, task {task} <here>."}],
        "reward": float(rollout % 2),
        "ended_by": "user_stop",
        "advantages": [rng.uniform(-2, 2) * on for on in mask],
        "judgement": {
            "composite": rollout / 4,
            "rationale": {"invalid_tool_use": HOSTILE, "ungrounded_claims": "none"},
        },
        "teacher": None if arm == "grpo" else {"logprobs": [-0.4 if on else None for on in mask]},
    }


def items(exp: Experiment, rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm.name,
            "task_index": task,
            "rollout": 0,
            "composite": (score := rng.random()),
            "dimensions": dict.fromkeys(("invalid_tool_use", "ungrounded_claims", "upfront_clarification"), score),
            "reward": float(rng.random() < 0.5),
            "ended_by": "user_stop",
            "grade": {"substring_only": task == exp.protocol.evaluation.indices(500)[0]},
            "judge_first_try_parsed": True,
        }
        for arm in exp.arms
        for task in exp.protocol.evaluation.indices(500)
    ]


def phase(directory: Path, index: int, name: str, facts: dict[str, Any], outcome: str = "done") -> None:
    record = {
        "outcome": outcome,
        "decided": f"{name} decided this",
        "because": f"{name} had that reason",
        "facts": facts,
    }
    path = directory / "phases" / f"{index:02}-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(canonical({"index": index, "phase": name, "previous": "0" * 64, "record": record, "files": {}}))


def make(directory: Path, *, until: str = "report") -> Path:
    """A run of spec/sdpo-local.json that went as far as `until`: activation_pilot (stopped), train or report."""
    exp = load(spec_folder() / "sdpo-local.json")
    assert isinstance(exp, Experiment)
    rng = random.Random(0)
    directory.mkdir()
    (directory / "spec.json").write_bytes(canonical(dict(exp.frozen)))
    gate = {"metric": "judge_parse_success_rate", "asked": ">= 0.95", "measured": 0.5, "passed": False, "sentence": "s"}
    phase(
        directory, 1, "design_check", {"lines": ["half-width 0.662"], "notes": ["Doing nothing scores 1.0 on 0 tasks."]}
    )
    stopped = until == "activation_pilot"
    gates = {"grpo": [gate | {"measured": 0.5 if stopped else 1.0, "passed": not stopped}], "sdpo_token": []}
    fallbacks = [{"fallback": "max_turns", "outcome": "a gate fails", "gates": {"grpo": [gate]}}] if stopped else []
    facts = {"gates": gates, "fallbacks": fallbacks}
    phase(directory, 2, "activation_pilot", facts, "stopped" if stopped else "done")
    metrics = [step_metrics("activation_pilot", arm.name, step, rng) for arm in exp.arms for step in range(2)]
    lines(directory / "timings.jsonl", [{"phase": "activation_pilot", "what": "phase", "seconds": 132.0}])
    if not stopped:
        metrics += [step_metrics("train", arm.name, step, rng) for step in range(4) for arm in exp.arms]
        for arm in exp.arms:
            rows = [trajectory(arm.name, task, rollout, rng) for task in range(4) for rollout in range(4)]
            lines(directory / "trajectories" / f"train-{arm.name}-003.jsonl", rows)
        phase(directory, 3, "train", {})
    lines(directory / "metrics.jsonl", metrics)
    if until == "report":
        rows = items(exp, rng)
        lines(directory / "items.jsonl", rows)
        lines(directory / "deviations.jsonl", [{"phase": "train", "kind": "resumed", "what": "went on <from> a save"}])
        verdict = decide_frozen(exp.frozen, rows)
        (directory / "verdict.json").write_bytes(canonical(json.loads(json.dumps(verdict.to_json()))))
        agree = {"composite": {"n": 40.0, "mean_abs_difference": 0.125, "correlation": None}}
        phase(directory, 4, "evaluate", {"agreement": agree})
        phase(directory, 5, "decide", {"outcome": verdict.outcome})
    return directory
