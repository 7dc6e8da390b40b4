"""Our environment against every recorded transcript of upstream's.

Texts compare byte for byte. One rule is loose, for texts that come from Python itself and so from its version: an
observation that `LOOSE` names needs only be an "Error: " too, on another Python than the recorded one.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from paritygate import retail

Read = Callable[[str], list[dict[str, Any]]]
LOOSE = re.compile(
    r"Error: (.*invoke\(\) .*|unhashable type: .*|.* object (is not iterable|has no .*)"
    r"|object of type .*|.*\(<string>.*"
    r"|'in <string>' requires .*|float\(\) argument .*|int too large .*|\(34, .*|unsupported operand .*|eval\(\) .*"
    r"|maximum recursion .*|Exceeds the limit .*|'.*' object is not callable)",
    re.DOTALL,
)
RECORDED_PYTHON = (3, 11)


def same(ours: str, theirs: str) -> bool:
    if ours == theirs or sys.version_info[:2] == RECORDED_PYTHON:
        return ours == theirs
    return bool(LOOSE.fullmatch(theirs)) and ours.startswith("Error: ")


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_gold_actions_give_the_recorded_observations_hashes_and_rewards(
    source: retail.Source, transcript: Read, split: str
) -> None:
    records = transcript(f"gold_{split}")
    assert len(records) == len(source.tasks(split))
    for record in records:
        index = record["task_index"]
        episode = retail.RetailEpisode(source, split, index)
        assert not episode.db.changes()
        assert source.initial_hash == record["data_hash_before"]
        for step in record["steps"] + [step for step in record["final"] if step["name"] != "respond"]:
            assert same(episode.call(step["name"], step["kwargs"]), step["observation"]), (split, index, step["name"])
            assert episode.done == step["done"]
        after = episode.db.changes()
        assert retail.database_hash(episode.db) == record["data_hash_after"], (split, index)
        assert retail.database_hash(source.goal(split, index).database) == record["gt_data_hash"], (split, index)
        messages = [step["kwargs"]["content"] for step in record["final"] if step["name"] == "respond"]
        grade = episode.grade(messages)
        assert grade.reward == record["reward"], (split, index)
        assert grade.outputs == record["reward_info"].get("outputs", {})
        assert episode.db.changes() == after


def test_single_calls_and_error_paths(source: retail.Source, transcript: Read) -> None:
    for record in transcript("error_paths"):
        db = source.database()
        assert same(retail.call(db, record["name"], record["kwargs"]), record["observation"]), record["id"]
        assert retail.database_hash(db) == record["data_hash_after"], record["id"]
        assert bool(db.changes()) == record["changed"], record["id"]
    assert retail.database_hash(source.database()) == source.initial_hash


def test_random_sequences(source: retail.Source, transcript: Read) -> None:
    for record in transcript("random_sequences"):
        db = source.database()
        for step in record["steps"]:
            assert same(retail.call(db, step["name"], step["kwargs"]), step["observation"]), (record["id"], step)
        assert retail.database_hash(db) == record["data_hash_after"], record["id"]
