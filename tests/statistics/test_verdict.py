"""The rule of the decision at its edges; what is missing is never imputed."""

import dataclasses
import json
import math
import random

import pytest

from paritygate.errors import BadInputError
from paritygate.statistics import Verdict, betting_interval, decide, decide_frozen
from tests.statistics.test_simulation import ARMS, RULE

TASKS = range(60)


def judge(items: list[dict[str, object]], **options: object) -> Verdict:
    return decide(RULE, items, **{**ARMS, "tasks": TASKS, **options})


def rows(arm: str, composite: float, reward: float, tasks: range = TASKS) -> list[dict[str, object]]:
    dimensions = dict.fromkeys(("invalid_tool_use", "ungrounded_claims", "upfront_clarification"), composite)
    return [
        {"arm": arm, "task_index": task, "composite": composite, "reward": reward, "dimensions": dict(dimensions)}
        for task in tasks
    ]


@pytest.mark.parametrize(
    ("composite", "reward", "outcome"),
    [
        (0.5, 0.5, "validated"),  # .5 - .382 > .03
        (0.41, 0.5, "inconclusive"),  # .41 - .382 < .03
        (0.5, 0.28, "inconclusive"),  # the guard's .28 - .382 < -.10
        (0.5, 0.283, "validated"),
        (-0.36, 0.5, "failed"),  # -.36 + .382 < .03
        (-0.35, 0.5, "inconclusive"),
        (-0.5, -0.5, "failed"),
        (0.0, 0.0, "inconclusive"),
        (0.0, -0.5, "inconclusive"),  # the guard's whole interval lies below -.10, the primary's does not lie below .03
    ],
)
def test_the_rule_at_its_edges(composite: float, reward: float, outcome: str):
    items = rows("sdpo_token", 0.5 + composite / 2, 0.5 + reward / 2) + rows(
        "grpo", 0.5 - composite / 2, 0.5 - reward / 2
    )
    verdict = judge(items)
    assert verdict.outcome == outcome
    assert verdict.criteria[0].mean == pytest.approx(composite)
    assert verdict.why.startswith(outcome.capitalize())


def test_the_secondary_interval_shares_alpha_too():
    items = rows("sdpo_token", 0.75, 1.0) + rows("grpo", 0.25, 0.5)
    for result in judge(items).criteria:
        alone = betting_interval([0.5] * 60, bounds=(-1, 1), alpha=RULE.alpha / 2)
        assert (result.betting_low, result.betting_high) == (alone.low, alone.high)


@pytest.mark.parametrize("end", ["low", "high"])
def test_an_interval_that_touches_the_margin_lies_on_neither_side_of_it(end: str):
    """The margin is put exactly where the interval ends, then one float nearer: only then is all of it beyond."""
    items = rows("sdpo_token", 0.75, 1.0) + rows("grpo", 0.25, 0.0)
    edge = getattr(judge(items).criteria[0], end)

    def at(margin: float) -> tuple[bool, bool]:
        moved = dataclasses.replace(RULE.criteria[0], margin=margin)
        rule = dataclasses.replace(RULE, criteria=(moved, *RULE.criteria[1:]))
        result = decide(rule, items, **{**ARMS, "tasks": TASKS}).criteria[0]
        return result.above, result.below

    assert at(edge) == (False, False)
    outside = math.nextafter(edge, -math.inf if end == "low" else math.inf)
    assert at(outside) == (end == "low", end == "high")


def test_the_order_of_the_items_changes_nothing():
    rng = random.Random(0)
    items = [
        {**row, "composite": rng.random(), "reward": float(rng.random() < 0.5)}
        for row in rows("sdpo_token", 0, 0) + rows("grpo", 0, 0)
    ]
    shuffled = items[:]
    rng.shuffle(shuffled)
    assert judge(items) == judge(shuffled)


@pytest.mark.parametrize("key", ["composite", "reward"])
def test_a_missing_score_makes_the_evaluation_incomplete(key: str):
    items = rows("sdpo_token", 1.0, 1.0) + rows("grpo", 0.0, 0.0)
    items[7][key] = None
    verdict = judge(items)
    assert verdict.outcome == "incomplete"
    assert verdict.criteria == ()
    assert verdict.missing == (f"{key} of task 7 in arm sdpo_token",)


def test_a_missing_item_makes_the_evaluation_incomplete():
    items = rows("sdpo_token", 1.0, 1.0) + rows("grpo", 0.0, 0.0)
    assert judge(items[:-1]).outcome == "incomplete"
    assert judge([*items[:59], *items[60:119]]).outcome == "incomplete"
    assert judge(items, tasks=range(61)).outcome == "incomplete"
    assert judge([*items, items[0]]).outcome == "incomplete"  # an item that is there twice
    assert judge([]).outcome == "incomplete"


def test_tasks_stay_the_unit_when_they_have_several_rollouts():
    items = [row for reward in (0.0, 1.0) for row in rows("sdpo_token", 0.5, reward) + rows("grpo", 0.5, 0.0)]
    verdict = judge(items, rollouts_per_task=2)
    assert [result.n for result in verdict.criteria] == [60, 60]
    assert verdict.criteria[1].treatment_mean == 0.5
    assert judge(items[:-1], rollouts_per_task=2).outcome == "incomplete"


def test_dimensions_are_descriptive_and_say_their_n():
    items = rows("sdpo_token", 0.75, 1.0) + rows("grpo", 0.25, 0.5)
    items[0]["dimensions"] = None
    verdict = judge(items)
    assert verdict.outcome == "validated"
    assert {result.dimension: result.n for result in verdict.dimensions} == {
        "invalid_tool_use": 59,
        "ungrounded_claims": 59,
        "upfront_clarification": 59,
    }
    assert all(result.mean == pytest.approx(0.5) for result in verdict.dimensions)
    interval = betting_interval([0.5] * 59, bounds=(-1.0, 1.0), alpha=0.05)  # not adjusted for looking at three
    for result in verdict.dimensions:
        assert (result.betting_low, result.betting_high) == (interval.low, interval.high)


@pytest.mark.parametrize("value", ["0.5", True, float("nan"), float("inf"), 1.5, -0.1])
def test_a_score_that_is_none_is_named(value: object):
    items = rows("sdpo_token", 1.0, 1.0) + rows("grpo", 0.0, 0.0)
    items[3]["composite"] = value
    with pytest.raises(BadInputError, match=r"composite of task 3|treatment\[3\]"):
        judge(items)


def test_the_verdict_of_a_run_s_own_files_is_the_same():
    frozen = {
        "decision_rule": {
            "alpha": 0.05,
            "criteria": [
                {"id": c.id, "metric": c.metric, "margin": c.margin, "bounds": [0, 1], "weights": dict(c.weights)}
                for c in RULE.criteria
            ],
            "estimand": "",
            "method": "paired_hoeffding",
            "unit": "fixed_checkpoint_items",
            "seeds": [0],
            "version": 1,
        },
        "protocol": {
            "evaluation": {"split": "test", "first": 60},
            "comparison": {"treatment": "sdpo_token", "baseline": "grpo"},
        },
        "eval": {"rollouts_per_task": 1},
    }
    items = rows("sdpo_token", 0.8, 1.0) + rows("grpo", 0.1, 0.0)
    verdict = decide_frozen(json.loads(json.dumps(frozen)), json.loads(json.dumps(items)))
    assert verdict == judge(items)
    assert json.loads(json.dumps(verdict.to_json()))["outcome"] == "validated"
    assert (
        decide_frozen(frozen, rows("sdpo_token", 0.8, 1.0, range(59)) + rows("grpo", 0.1, 0.0)).outcome == "incomplete"
    )
    twice = frozen | {"eval": {"rollouts_per_task": 2}}
    assert (decide_frozen(twice, items).outcome, decide_frozen(twice, items * 2).outcome) == ("incomplete", "validated")
