"""Training and evaluation: arms differ in the advantage alone, NaN stops before the step, nothing is imputed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from paritygate.agent.seeds import derive
from paritygate.errors import GateStopped
from paritygate.experiment.run.journal import read_lines
from paritygate.receipts import PhaseChain
from tests.experiment.scaled_spec import brief
from tests.scripted_service import Script, ScriptedService

pytestmark = pytest.mark.usefixtures("lean")


def final(run: Path) -> tuple[bytes, bytes, bytes]:
    """Metrics, items and verdict as bytes."""
    metrics, items, verdict = (run / name for name in ("metrics.jsonl", "items.jsonl", "verdict.json"))
    return metrics.read_bytes(), items.read_bytes(), verdict.read_bytes()


def training(service: ScriptedService, run: Path) -> dict[str, list[dict[str, Any]]]:
    """The optimiser steps of each arm's training, as the service saw them (probe and pilots left out)."""
    steps = len([line for line in read_lines(run / "metrics.jsonl") if line["phase"] == "train"])
    updates = [update for update in service.updates if "adam" in update][-steps:]
    clients = sorted({update["client"] for update in updates})
    assert len(clients) == 2
    return {
        arm: [update for update in updates if update["client"] == client]
        for arm, client in zip(("grpo", "sdpo_token"), clients, strict=True)
    }


def test_arms_differ_in_the_advantage_alone(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    """At the first step, where both have the same weights, the datums differ in nothing but `advantages`."""
    service = scripted(ScriptedService())
    run_spec(brief())
    arms = training(service, tmp_path / "run")
    first = {arm: {datum.tokens: datum.inputs for datum in updates[0]["data"]} for arm, updates in arms.items()}
    assert set(first["grpo"]) <= set(first["sdpo_token"])  # a GRPO datum of a group without variance weighs nothing
    assert first["grpo"]
    for tokens, inputs in first["grpo"].items():
        other = first["sdpo_token"][tokens]
        assert {**inputs, "advantages": None} == {**other, "advantages": None}
        assert inputs["advantages"] != other["advantages"]
        assert [a != 0 for a in inputs["advantages"]].count(True) <= [p != 0 for p in inputs["logprobs"]].count(True)
        assert all(a == 0 for a, p in zip(other["advantages"], other["logprobs"], strict=True) if p == 0)
    for updates in arms.values():
        assert {update["adam"] for update in updates} == {(4e-05, 0.9, 0.95, 1e-08)}
        assert {update["loss_fn"] for update in updates} == {"importance_sampling"}


def test_two_arms_with_the_same_advantage_are_the_same(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    """A/A: every number of the two arms is equal, so the difference is exactly 0."""
    spec = brief()
    other = copy.deepcopy(spec["arms"][0]) | {"name": "grpo_again", "kind": "grpo"}
    spec["arms"] = [spec["arms"][0], other]
    spec["restoration_preflight"]["groups"][0]["arms"][1]["name"] = "grpo_again"
    spec["protocol"]["comparison"] = {"treatment": "grpo_again", "baseline": "grpo"}
    spec["experiment_features"]["custom_loss"] = False
    scripted(ScriptedService())
    run_spec(spec)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "train"]
    halves = [[strip(line) for line in lines if line["arm"] == arm] for arm in ("grpo", "grpo_again")]
    assert halves[0] == halves[1]
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert [criterion["mean"] for criterion in verdict["criteria"]] == [0, 0]


def strip(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in ("arm", "index")}


def test_nan_stops_before_the_step_and_says_where(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    reference = scripted(ScriptedService())
    run_spec(brief(), output=tmp_path / "reference")
    updates = training(reference, tmp_path / "reference")
    position = reference.updates.index(updates["sdpo_token"][1]) + 1
    datum = updates["sdpo_token"][1]["data"][3]
    place = next(t for t, advantage in enumerate(datum.inputs["advantages"]) if advantage)
    service = scripted(ScriptedService(Script(nan_at=(position, 3))))
    with pytest.raises(GateStopped) as stopped:
        run_spec(brief())
    message = str(stopped.value)
    assert "train, arm sdpo_token, step 1: stopped before the optimiser step" in message
    assert f"position {place + 1}, token {datum.tokens[place + 1]}" in message
    lines = read_lines(tmp_path / "reference" / "metrics.jsonl")
    [tasks] = [line["tasks"] for line in lines if (line["phase"], line["arm"], line["step"]) == ("train", "grpo", 1)]
    assert f"the trajectory of task {tasks[1]}, rollout 1 at" in message  # the last of two tasks with two rollouts
    assert "adam" not in service.updates[-1]
    assert PhaseChain(tmp_path / "run").record("train")["outcome"] == "stopped"
    assert len([line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "train"]) == 3


def test_a_diverging_advantage_stops_training(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    """The pilots pass, then the teacher's distance passes the gate's upper bound: stop and record, no tuning."""
    service = ScriptedService()
    scripted(service)
    run_spec(brief(), until="activation_pilot")
    service.script.gap = 20.0
    with pytest.raises(GateStopped, match="sdpo_mean_abs_token_adv fails") as stopped:
        run_spec(brief(), resume=True)
    assert "arm sdpo_token at step 0" in str(stopped.value)
    deviations = read_lines(tmp_path / "run" / "deviations.jsonl")
    assert [line["kind"] for line in deviations if line["phase"] == "train"] == ["divergence"]


def test_an_item_without_a_judgement_makes_the_evaluation_incomplete(
    run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    service = scripted(ScriptedService())
    run_spec(brief(), until="train")
    service.script.judge_says = lambda seed: "five stars"
    before = len(service.samples)
    with pytest.raises(GateStopped, match="the evaluation is incomplete: no judgement after 3 tries") as stopped:
        run_spec(brief(), resume=True)
    assert "task 0 of grpo (the judge was not parsed)" in str(stopped.value)
    judged = [s for s in service.samples[before:] if s["model"] == "openai/gpt-oss-120b"]
    assert len(judged) == 2 * 2 * 3 * 3  # arms, items, episodes, the judge's own tries
    assert len({sample["seed"] for sample in judged}) == 2 * 3 * 3  # the arms are judged alike, every try is another
    assert not (tmp_path / "run" / "verdict.json").exists()
    assert "decide" not in PhaseChain(tmp_path / "run").completed
    items = read_lines(tmp_path / "run" / "items.jsonl")
    assert [item["composite"] for item in items] == [None] * 4


def test_a_simulator_that_fails_once_is_asked_again_with_another_seed(
    run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    service = scripted(ScriptedService())
    run_spec(brief(), until="train")
    episode = derive(derive(0, "evaluate", 0, 0, 0), "simulator")  # the first try of task 0, the same in both arms
    silent = {derive(episode, "user", 2, attempt) for attempt in range(3)}
    service.script.user_fails = lambda seed: seed in silent
    run_spec(brief(), resume=True)
    items = read_lines(tmp_path / "run" / "items.jsonl")
    assert [item["tries"] for item in items] == [2, 1, 2, 1]
    assert all(item["composite"] is not None and item["missing"] is None for item in items)


@pytest.mark.parametrize("kind", ["sdpo_sequence", "hybrid"])
def test_other_arms_go_the_same_path(kind: str, run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    spec = brief()
    spec["arms"][1]["kind"] = kind
    service = scripted(ScriptedService())
    run_spec(spec, until="train")
    update = training(service, tmp_path / "run")["sdpo_token"][0]
    for datum in update["data"]:
        trained = {a for a, p in zip(datum.inputs["advantages"], datum.inputs["logprobs"], strict=True) if p}
        assert (len(trained) == 1) is (kind == "sdpo_sequence")


def test_the_same_run_twice_is_the_same_run(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        scripted(ScriptedService())
        run_spec(brief(), output=tmp_path / name)
    assert final(tmp_path / "one") == final(tmp_path / "two")
