"""The numbers of the page by hand: pairs, pass^k, the steps of a pilot, dimensions whose interval excludes 0."""

from pathlib import Path
from typing import Any

import pytest

from paritygate.report import summary
from paritygate.report.files import RunFiles

SPEC = {
    "arms": [{"name": "old"}, {"name": "new"}],
    "protocol": {"comparison": {"treatment": "new", "baseline": "old"}},
    "eval": {"rollouts_per_task": 3},
}


def run(**files: Any) -> RunFiles:
    empty = {"phases": (), "metrics": (), "items": (), "deviations": (), "verdict": None, "cost": None}
    nothing = {"directory": Path(), "spec": SPEC, "parity": None, "parity_name": None}
    return RunFiles(**(nothing | empty | files))


def item(arm: str, task: int, composite: float | None, reward: float) -> dict[str, Any]:
    return {"arm": arm, "task_index": task, "composite": composite, "reward": reward, "ended_by": "user_stop"}


def test_a_difference_is_treatment_minus_baseline_of_the_means_over_rollouts() -> None:
    items = (
        *(item("old", 4, score, 0.0) for score in (0.25, 0.5)),
        *(item("new", 4, score, reward) for score, reward in ((0.5, 1.0), (1.0, 0.0))),
    )
    [row] = summary.paired_items(run(items=items))
    assert (row["treatment"]["composite"], row["baseline"]["composite"]) == (0.75, 0.375)
    assert (row["composite_difference"], row["reward_difference"]) == (0.375, 0.5)


def test_a_missing_score_is_not_imputed_by_those_that_are_there() -> None:
    items = (item("old", 4, 0.5, 0.0), item("new", 4, None, 0.0), item("new", 4, 1.0, 1.0))
    [row] = summary.paired_items(run(items=items))
    assert (row["treatment"]["composite"], row["composite_difference"]) == (None, None)
    assert (row["treatment"]["reward"], row["reward_difference"]) == (0.5, 0.5)


def test_pass_hat_k_is_the_chance_that_k_drawn_without_replacement_all_succeed() -> None:
    items = tuple(item("new", 4, 1.0, reward) for reward in (1.0, 1.0, 0.0))
    [row] = summary.pass_hat(run(items=items))
    assert row == {"arm": "new", "values": pytest.approx([2 / 3, 1 / 3, 0.0], abs=1e-12)}


def test_the_pilot_is_the_first_without_fallbacks_in_the_order_of_its_steps() -> None:
    line = {"phase": "activation_pilot", "arm": "new"}
    pilots = [line | {"step": step, "variant": variant} for step, variant in ((1, ""), (0, "max_turns"), (0, ""))]
    metrics = (*pilots, {"phase": "train", "arm": "new", "step": 7, "variant": ""})
    assert [row["step"] for row in run(metrics=metrics).pilot("new")] == [0, 1]
    assert [row["step"] for row in run(metrics=metrics).training("new")] == [7]


CLEAR = [(0.01, 0.2, True), (-0.2, -0.01, True), (-0.1, 0.1, False), (0.0, 0.2, False), (-0.2, 0.0, False)]


@pytest.mark.parametrize(("low", "high", "clear"), CLEAR)
def test_an_interval_excludes_0_on_either_side_and_not_where_it_touches(low: float, high: float, clear: bool) -> None:
    row = {"dimension": "ungrounded_claims", "mean": (low + high) / 2, "betting_low": low, "betting_high": high}
    answer = summary.dimension_answer(run(verdict={"dimensions": [row]}))
    assert answer is not None
    assert ("the interval excludes 0 for ungrounded claims" in answer) is clear
    assert ("no dimension's interval excludes 0" in answer) is not clear
