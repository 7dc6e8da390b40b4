"""The facts that a report must say, computed from the data and held to the numbers of the upstream commit."""

from collections.abc import Callable
from typing import Any

from paritygate import retail
from paritygate.retail import facts
from paritygate.retail.tools import WRITE_TOOLS

EVALUATED = range(60)


def test_sizes(source: retail.Source) -> None:
    assert [len(source.tasks(split)) for split in ("train", "dev", "test")] == [500, 20, 115]
    assert {name: len(table) for name, table in source.base.tables.items()} == {
        "orders": 1000,
        "products": 50,
        "users": 500,
    }


def test_tasks_solved_by_doing_nothing(source: retail.Source) -> None:
    assert facts.do_nothing(source, "train") == [161, 214, 229, 288, 349]
    assert facts.do_nothing(source, "dev") == [17]
    assert facts.do_nothing(source, "test") == [10, 12, 25, 50, 57, 65, 106]
    for split in ("train", "dev", "test"):
        idle = [
            i for i in range(len(source.tasks(split))) if retail.RetailEpisode(source, split, i).grade([]).reward == 1
        ]
        assert idle == facts.do_nothing(source, split)


def test_gold_actions_that_fail(source: retail.Source) -> None:
    failing = [24, 27, 81, 148, 161, 214, 229, 252, 253, 288, 314, 349, 351, 369, 376, 427, 431, 441, 469]
    assert facts.failing_gold(source, "train") == failing
    assert facts.failing_gold(source, "dev") == []
    assert facts.failing_gold(source, "test", writes_only=True) == [12, 13, 64, 106]
    texts = [text for index in failing for text in source.goal("train", index).observations if text.startswith("Error")]
    assert all("gift card balance" in text for text in texts)


def test_evaluated_tasks_are_no_independent_draws(source: retail.Source) -> None:
    assert len(facts.users(source, "test", EVALUATED)) == 23
    assert facts.same_gold(source, "test", EVALUATED) == [(24, 57), (36, 37), (41, 42)]
    assert source.tasks("test")[93] == source.tasks("test")[95]


def test_splits_share_users_and_orders(source: retail.Source) -> None:
    assert facts.overlap(source) == facts.Overlap(users=53, users_shared=43, orders=90, orders_shared=60)


def test_train_tasks_hold_writes_only_and_name_their_orders(source: retail.Source) -> None:
    for task in source.tasks("train"):
        assert {action.name for action in task.actions} <= set(WRITE_TOOLS)
        assert not task.outputs
        assert all(action.arguments["order_id"] in task.instruction for action in task.actions)


def test_goal_hashes_are_the_recorded_ones(source: retail.Source, transcript: Callable[[str], list[Any]]) -> None:
    recorded = {
        (r["split"], r["task_index"]): r["gt_data_hash"] for s in ("dev", "test") for r in transcript(f"gold_{s}")
    }
    assert {key: retail.database_hash(source.goal(*key).database) for key in recorded} == recorded
