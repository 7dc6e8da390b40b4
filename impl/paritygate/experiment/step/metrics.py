"""The metrics of a step, from its rollouts and advantages alone: pure, and free of wall times."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paritygate.agent.judge.rules import is_error
from paritygate.agent.rollouts import Group, Rollout, flat
from paritygate.agent.turns import MALFORMED
from paritygate.spec.protocol import DIMENSIONS, Advantage

QUANTILES = ("abs_advantage_p50", "abs_advantage_p90", "abs_advantage_p99", "abs_advantage_max")
TEACHER_COUNTS = ("teacher_with_sibling", "teacher_shortened", "teacher_told_unsuccessful")


def gaps(rollout: Rollout) -> list[float]:
    """Teacher minus student logprob (nats, unclipped) of every assistant token of a rollout that trains."""
    if rollout.teacher is None or rollout.composite is None:
        return []
    rows = zip(rollout.trajectory.mask, rollout.teacher.logprobs, rollout.student_logprobs, strict=True)
    return [_number(teacher) - _number(student) for mask, teacher, student in rows if mask]


def tally(groups: Sequence[Group], *, success_wording: bool = False) -> dict[str, float]:
    """Counts that add over steps, so that a gate is measured over all tokens and calls of a pilot at once.

    success_wording: the spec's; with it no context calls an episode of reward 1 unsuccessful.
    """
    rollouts = flat(groups)
    counts: dict[str, float] = {
        "groups": len(groups),
        "groups_with_variance": sum(_varies(group.composites()) for group in groups),
        "groups_with_mixed_reward": sum(_varies([r.trajectory.reward for r in group.rollouts]) for group in groups),
        "judge_calls": sum(rollout.judged.tries > 0 for rollout in rollouts),  # none for an episode that was spoilt
        "judge_parsed_first": sum(rollout.judged.first_try_parsed for rollout in rollouts),
        "judge_parsed": sum(rollout.judged.judgement is not None for rollout in rollouts),
    }
    taught = [(rollout, rollout.teacher) for rollout in rollouts if rollout.teacher is not None]
    if taught:
        distances = [abs(gap) for rollout, _ in taught for gap in gaps(rollout)]
        counts |= {
            "teacher_trajectories": len(taught),
            "teacher_with_feedback": sum(teacher.has_feedback for _, teacher in taught),
            "teacher_with_sibling": sum(teacher.sibling is not None for _, teacher in taught),
            "teacher_shortened": sum(teacher.shortened_tokens > 0 for _, teacher in taught),
            "teacher_told_unsuccessful": sum(
                teacher.has_feedback and rollout.trajectory.reward == 1.0 and not success_wording
                for rollout, teacher in taught
            ),
            "loss_tokens": len(distances),
            "loss_tokens_over_0.1": sum(distance > 0.1 for distance in distances),
            "sum_abs_gap": math.fsum(distances) if all(map(math.isfinite, distances)) else math.inf,
        }
    return counts


def derived_metrics(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], base_model: str, rule: Advantage
) -> dict[str, Any]:
    """What of a step's line in metrics.jsonl its trajectories alone determine; loss and recomputed logprobs do not.

    rule: how the spec builds an advantage and the teacher's context.
    """
    rollouts, counts = flat(groups), tally(groups, success_wording=rule.success_wording)
    return {
        "tasks": [group.task_index for group in groups],
        "groups_with_mixed_composite": counts["groups_with_variance"],
        "groups_with_mixed_reward": counts["groups_with_mixed_reward"],
        **gate_values(counts, base_model),
        **teacher_counts(counts),
        **episode_metrics(rollouts),
        **advantage_metrics(rollouts, advantages, rule.clip),
    }


def measured_over(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every activation metric over the records of committed steps: counts are added, not rates averaged."""
    metrics = [step["metrics"] for step in steps]
    names = sorted({line["executed_base_model"] for line in metrics})
    differences = [line["sampler_recomputed_max_abs_diff"] for line in metrics]
    largest = max((float(value) for value in differences if value is not None), default=None)
    counts = add_tallies([step["tally"] for step in steps])
    return {**gate_values(counts, ", ".join(names)), "sampler_recomputed_max_abs_diff": largest}


def teacher_counts(counts: Mapping[str, float]) -> dict[str, float]:
    """What the teacher's contexts of a step held; nothing for an arm without a teacher."""
    return {name: counts[name] for name in TEACHER_COUNTS if name in counts}


def add_tallies(tallies: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The sum of tallies, key by key."""
    total: dict[str, float] = {}
    for counts in tallies:
        for key, value in counts.items():
            total[key] = total.get(key, 0.0) + float(value)  # "inf" comes back from JSON as text
    return total


def gate_values(counts: Mapping[str, float], base_model: str) -> dict[str, float | str | None]:
    """Every activation metric that these counts speak of; None where nothing was counted."""
    values: dict[str, float | str | None] = {
        "grpo_frac_groups_nonzero_adv": _share(counts, "groups_with_variance", "groups"),
        "judge_parse_success_rate": _share(counts, "judge_parsed_first", "judge_calls"),
        "executed_base_model": base_model,
    }
    if "teacher_trajectories" in counts:
        values |= {
            "sdpo_frac_tokens_abs_adv_gt_0.1": _share(counts, "loss_tokens_over_0.1", "loss_tokens"),
            "sdpo_mean_abs_token_adv": _share(counts, "sum_abs_gap", "loss_tokens"),
            "sdpo_frac_trajectories_with_feedback": _share(counts, "teacher_with_feedback", "teacher_trajectories"),
        }
    return values


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Scores, rewards, lengths and endings of a set of episodes; None for the mean of nothing."""
    judged = [r.judged.judgement for r in rollouts if r.composite is not None and r.judged.judgement is not None]
    trajectories = [rollout.trajectory for rollout in rollouts]
    return {
        "composite_rubric_score": _mean([judgement.composite for judgement in judged]),
        **{name: _mean([getattr(judgement, name) for judgement in judged]) for name in DIMENSIONS},
        "tau_bench_task_reward": _mean([t.reward for t in trajectories]),
        "judge_parse_final_rate": _mean([float(r.judged.judgement is not None) for r in rollouts if r.judged.tries]),
        **tool_calls(rollouts),
        "assistant_tokens": _mean([float(sum(t.mask)) for t in trajectories]),
        "tokens": _mean([float(len(t.tokens)) for t in trajectories]),
        "turns": _mean([float(t.turns) for t in trajectories]),
        "ended_by": dict(sorted(Counter(t.ended_by for t in trajectories).items())),
        "left_their_group": sum(rollout.composite is None for rollout in rollouts),
    }


def tool_calls(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """How many tool calls were attempted, could not be read as calls, or were answered with an error; and the rates."""
    results = [str(m["content"]) for r in rollouts for m in r.trajectory.messages if m["role"] == "tool"]
    malformed = sum(result.startswith(MALFORMED) for result in results)
    failed = sum(map(is_error, results)) - malformed
    return {
        "tool_calls": len(results),
        "malformed_tool_calls": malformed,
        "failed_tool_calls": failed,
        "malformed_tool_call_rate": malformed / len(results) if results else None,
        "failed_tool_call_rate": failed / len(results) if results else None,
    }


def advantage_metrics(
    rollouts: Sequence[Rollout], advantages: Sequence[Sequence[float]], clip: float
) -> dict[str, Any]:
    """Mean and quantiles of |A| over assistant tokens of rollouts that train, and the fraction clipped (SDPO)."""
    sizes = [
        abs(value)
        for rollout, row in zip(rollouts, advantages, strict=True)
        if rollout.composite is not None
        for mask, value in zip(rollout.trajectory.mask, row, strict=True)
        if mask
    ]
    distances = [abs(gap) for rollout in rollouts for gap in gaps(rollout)]
    quantiles: list[float | None] = (
        np.quantile(np.asarray(sizes), [0.5, 0.9, 0.99, 1.0]).tolist() if sizes else [None] * 4
    )
    return {
        "abs_advantage_mean": _mean(sizes),
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "frac_clipped": _mean([float(distance > clip) for distance in distances]),
    }


def logprob_difference(rollouts: Sequence[Rollout], recomputed: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """|recomputed - sampler| logprob (nats) over assistant tokens; `recomputed[i][t]` is of token t + 1.

    None where nothing was recomputed: a logit-level pass scores other tokens than the sampled ones.
    """
    differences = [
        abs(row[t - 1] - _number(rollout.trajectory.sampler_logprobs[t]))
        for rollout, row in (zip(rollouts, recomputed, strict=True) if recomputed else ())
        for t, mask in enumerate(rollout.trajectory.mask)
        if mask
    ]
    return {
        "sampler_recomputed_mean_abs_diff": _mean(differences),
        "sampler_recomputed_max_abs_diff": max(differences, default=None),
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _varies(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) != min(values)


def _share(counts: Mapping[str, float], part: str, whole: str) -> float | None:
    return counts[part] / counts[whole] if counts.get(whole) else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
