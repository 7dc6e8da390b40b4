"""Per-item results -> the verdict, by the rule that was declared before they existed."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paritygate.errors import BadInputError
from paritygate.spec import Criterion, DecisionRule
from paritygate.spec.protocol import DIMENSIONS
from paritygate.statistics.betting import betting_interval
from paritygate.statistics.hoeffding import paired_hoeffding

Outcome = Literal["validated", "failed", "inconclusive", "incomplete"]

# Which key of an item holds which metric of a decision rule.
ITEM_KEYS = {"composite_rubric_score": "composite", "tau_bench_task_reward": "reward"}


@dataclass(frozen=True, slots=True)
class CriterionResult:
    """One criterion: the deciding interval of treatment - baseline, and the secondary betting interval.

    `above` and `below` say whether the whole deciding interval lies above or below the margin.
    """

    id: str
    metric: str
    margin: float
    n: int
    treatment_mean: float
    baseline_mean: float
    mean: float
    low: float
    high: float
    half_width: float
    above: bool
    below: bool
    betting_low: float
    betting_high: float


@dataclass(frozen=True, slots=True)
class DimensionResult:
    """One judged dimension, descriptive only: its betting interval is not adjusted for looking at several."""

    dimension: str
    n: int
    treatment_mean: float
    baseline_mean: float
    mean: float
    betting_low: float
    betting_high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome, what it rests on, and why in plain words; `missing` names what an incomplete evaluation lacks."""

    outcome: Outcome
    treatment: str
    baseline: str
    criteria: tuple[CriterionResult, ...]
    dimensions: tuple[DimensionResult, ...]
    missing: tuple[str, ...]
    why: str

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Per-task means of every metric of one arm; None where a rollout of the task has none."""

    composite: dict[int, float | None]
    reward: dict[int, float | None]
    dimensions: dict[str, dict[int, float | None]]


def decide(
    decision_rule: DecisionRule,
    items: Iterable[Mapping[str, Any]],
    *,
    treatment: str,
    baseline: str,
    tasks: Sequence[int],
    rollouts_per_task: int = 1,
) -> Verdict:
    """The verdict of a declared rule on per-item results; pure: the same items give the same bits.

    An item has `arm`, `task_index`, `composite`, `reward` (each in the criterion's bounds, or None where there is no
    parsed judge or the simulator failed) and `dimensions`. Tasks are the unit: rollouts of one task are averaged. A
    task of `tasks` without exactly `rollouts_per_task` complete items in both arms makes the evaluation incomplete;
    nothing is imputed. Raises BadInputError for an item that is no such record.
    """
    rows, wanted = list(items), list(tasks)
    scores = {arm: _gather(rows, arm, rollouts_per_task) for arm in (treatment, baseline)}
    missing = tuple(_missing(scores, wanted, decision_rule.criteria))
    dimensions = tuple(_dimensions(scores, treatment, baseline, wanted, decision_rule.alpha))
    if missing or not wanted:
        times = "once" if rollouts_per_task == 1 else f"{rollouts_per_task} times"
        what = f"{len(missing)} results are not there exactly {times}, e.g. {missing[0]}" if missing else "no tasks"
        why = f"The evaluation is incomplete: {what}. Nothing is imputed and nothing is decided."
        return Verdict("incomplete", treatment, baseline, (), dimensions if wanted else (), missing, why)
    results = tuple(
        _criterion(criterion, decision_rule, scores[treatment], scores[baseline], wanted)
        for criterion in decision_rule.criteria
    )
    outcome = _outcome(results)
    return Verdict(outcome, treatment, baseline, results, dimensions, (), _why(outcome, results))


def _task(row: Mapping[str, Any]) -> int:
    task = row.get("task_index")
    if not isinstance(task, int) or isinstance(task, bool):
        raise BadInputError(f"a per-item result has no task_index: {dict(row)}")
    return task


def _score(row: Mapping[str, Any], key: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadInputError(f"{key} of task {row.get('task_index')} in arm {row.get('arm')} is {value!r}, not a number")
    return float(value)


def _gather(rows: Sequence[Mapping[str, Any]], arm: str, rollouts_per_task: int) -> _Scores:
    by_task: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("arm") == arm:
            by_task.setdefault(_task(row), []).append(row)

    def means(key: str, of: str | None = None) -> dict[int, float | None]:
        result: dict[int, float | None] = {}
        for task, group in by_task.items():
            values = [_score(row, of or key, (row.get(key) or {}).get(of) if of else row.get(key)) for row in group]
            present = [value for value in values if value is not None]
            complete = len(present) == len(values) == rollouts_per_task
            result[task] = math.fsum(present) / len(present) if complete else None
        return result

    return _Scores(means("composite"), means("reward"), {name: means("dimensions", name) for name in DIMENSIONS})


def _missing(scores: Mapping[str, _Scores], tasks: Sequence[int], criteria: Sequence[Criterion]) -> Iterable[str]:
    for arm, arm_scores in scores.items():
        for task in tasks:
            for criterion in criteria:
                key = ITEM_KEYS[criterion.metric]
                if getattr(arm_scores, key).get(task) is None:
                    yield f"{key} of task {task} in arm {arm}"


def _criterion(
    criterion: Criterion, rule: DecisionRule, treated: _Scores, base: _Scores, tasks: Sequence[int]
) -> CriterionResult:
    key, count = ITEM_KEYS[criterion.metric], len(rule.criteria)
    treatment = [getattr(treated, key)[task] for task in tasks]
    baseline = [getattr(base, key)[task] for task in tasks]
    try:
        interval = paired_hoeffding(treatment, baseline, bounds=criterion.bounds, alpha=rule.alpha, criteria=count)
    except ValueError as error:
        raise BadInputError(f"criterion {criterion.id}: {error}") from None
    span = criterion.bounds[1] - criterion.bounds[0]
    betting = betting_interval(
        [t - b for t, b in zip(treatment, baseline, strict=True)], bounds=(-span, span), alpha=rule.alpha / count
    )
    return CriterionResult(
        id=criterion.id,
        metric=criterion.metric,
        margin=criterion.margin,
        n=interval.n,
        treatment_mean=math.fsum(treatment) / interval.n,
        baseline_mean=math.fsum(baseline) / interval.n,
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        half_width=interval.half_width,
        above=interval.low > criterion.margin,
        below=interval.high < criterion.margin,
        betting_low=betting.low,
        betting_high=betting.high,
    )


def _dimensions(
    scores: Mapping[str, _Scores], treatment: str, baseline: str, tasks: Sequence[int], alpha: float
) -> Iterable[DimensionResult]:
    """Over the tasks that both arms have: descriptive, so a missing one is left out and n says so."""
    for name in DIMENSIONS:
        treated, base = scores[treatment].dimensions[name], scores[baseline].dimensions[name]
        pairs = [(t, b) for task in tasks if (t := treated.get(task)) is not None and (b := base.get(task)) is not None]
        if not pairs:
            continue
        interval = betting_interval([t - b for t, b in pairs], bounds=(-1.0, 1.0), alpha=alpha)
        means = [math.fsum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1)]
        yield DimensionResult(name, len(pairs), means[0], means[1], interval.mean, interval.low, interval.high)


def _outcome(results: Sequence[CriterionResult]) -> Outcome:
    primary = next(result for result in results if result.id == "primary")
    if all(result.above for result in results):
        return "validated"
    return "failed" if primary.below else "inconclusive"


def _why(outcome: Outcome, results: Sequence[CriterionResult]) -> str:
    parts: list[str] = []
    for result in results:
        where = "entirely above" if result.above else "entirely below" if result.below else "on both sides of"
        parts.append(
            f"{result.id} ({result.metric}): the difference over {result.n} tasks is {result.mean:+.3f}, its interval "
            f"[{result.low:+.3f}, {result.high:+.3f}] lies {where} {result.margin:+.2f}"
        )
    return f"{outcome.capitalize()}. " + "; ".join(parts) + "."
