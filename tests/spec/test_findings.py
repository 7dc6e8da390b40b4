"""Every contradiction between keys is found, where it is, and alone."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paritygate.spec import SpecError, load
from paritygate.spec.schema import spec_folder
from tests.spec.refusals import refusal

FULL = json.loads((spec_folder() / "sdpo.json").read_text("utf-8"))
LOCAL = json.loads((spec_folder() / "sdpo-local.json").read_text("utf-8"))


def findings_of(tmp_path: Path, document: Any) -> dict[str, str]:
    """The findings of a document by pointer; {} where it is accepted."""
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(document), "utf-8")
    error = refusal(path)
    assert error is None or all(finding.pointer in str(error) for finding in error.findings)
    return {finding.pointer: finding.message for finding in error.findings} if error else {}


def edited(base: dict[str, Any], edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = copy.deepcopy(base)
    edit(document)
    return document


def put(pointer: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit that sets one place; missing objects on the way are made."""

    def edit(document: dict[str, Any]) -> None:
        *parents, last = pointer.removeprefix("/").split("/")
        node: Any = document
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        node[int(last) if isinstance(node, list) else last] = value

    return edit


CONTRADICTIONS: list[tuple[str, Any, set[str]]] = [
    ("/steps", 19, {"/dataset/n_examples"}),
    ("/batch_size", 15, {"/batch_size"}),
    ("/batch_size", 17, {"/batch_size"}),
    ("/dataset/n_examples", 81, {"/dataset/n_examples", "/protocol/train"}),
    ("/eval/n_examples", 61, {"/protocol/evaluation"}),
    ("/protocol/rollout/tasks_per_step", 5, {"/dataset/n_examples", "/batch_size"}),
    ("/protocol/rollout/max_tokens_per_turn", 9000, {"/protocol/rollout/max_tokens_per_turn"}),
    ("/protocol/evaluation", {"split": "test", "first": 116}, {"/protocol/evaluation"}),
    ("/protocol/evaluation", {"split": "dev", "first": 60}, {"/protocol/evaluation"}),
    ("/protocol/evaluation", {"split": "train", "first": 60}, {"/protocol/evaluation"}),  # shares tasks with training
    ("/protocol/evaluation", {"split": "test"}, {"/protocol/evaluation"}),
    (
        "/protocol/evaluation",
        {"split": "test", "tasks": [115]},
        {"/protocol/evaluation", "/protocol/evaluation/tasks/0"},
    ),
    ("/protocol/train", {"split": "train", "first": 80, "tasks": [1]}, {"/protocol/train"}),
    ("/arms/1/lr", 5e-5, {"/arms/1/lr"}),
    ("/optimizer/lr", 5e-5, {f"/arms/{i}/lr" for i in (0, 1)} | {f"{p}/learning_rate" for p in ("a0", "a1")}),
    ("/arms/1/seed", 1, {"/arms/1/seed"}),
    ("/arms/1/name", "grpo", {"/arms/1/name"}),
    ("/arms/1/name", "mine", {"/arms/1/kind"}),
    ("/protocol/comparison", {"treatment": "grpo"}, {"/protocol/comparison"}),
    ("/protocol/comparison", {"treatment": "other"}, {"/protocol/comparison/treatment"}),
    ("/lora_rank", 16, {"a0/lora_rank", "a1/lora_rank"}),
    ("/restoration_preflight/groups/0/arms/1/name", "other", {"/restoration_preflight/groups/0/arms"}),
    ("/restoration_preflight/groups/0/arms/1/optimizer_config/eps", 1e-12, {"a1"}),
    ("/restoration_preflight/applicable", False, {"/restoration_preflight/applicable"}),
    ("/restoration_preflight/fixed_batch_required", False, {"/restoration_preflight/fixed_batch_required"}),
    ("/correctness_preflight/required", False, {"/correctness_preflight/required"}),
    ("/primary_endpoint", "heldout_accuracy", {"/primary_endpoint"}),
    ("/primary_endpoint", "heldout_tau_bench_task_reward_mean", {"/primary_endpoint"}),
    ("/generation_audit/required", True, {"/generation_audit/required"}),
    ("/spec_preflight/findings", ["steps are too few"], {"/spec_preflight"}),
    ("/spec_preflight/status", "failed", {"/spec_preflight"}),
    ("/feasibility_check/status", "feasible", {"/feasibility_check/status"}),
    ("/feasibility_check/wall_seconds", 3600, {"/feasibility_check/wall_seconds"}),
    ("/feasibility_check/known_gpu_hours", 1, {"/feasibility_check/known_gpu_hours"}),
    ("/activation_gate/applicable", False, {"/activation_gate/applicable"}),
    ("/activation_gate/checks/0/metric", "no_such", {"/activation_gate/checks/0/metric"}),
    ("/activation_gate/checks/0/min", None, {"/activation_gate/checks/0"}),
    ("/activation_gate/checks/1/min", 4, {"/activation_gate/checks/1"}),
    ("/activation_gate/checks/0/one_of", ["a"], {"/activation_gate/checks/0"}),
    ("/activation_gate/checks/5/one_of", ["another"], {"/activation_gate/checks/5/one_of"}),
    ("/activation_gate/checks/5/min", 0, {"/activation_gate/checks/5"}),
    ("/base_model", "Qwen/Qwen3-8B", {"/activation_gate/checks/5/one_of"}),
    ("/decision_rule/criteria/0/bounds", [1, 0], {"/decision_rule/criteria/0/bounds"}),
    ("/decision_rule/criteria/0/bounds", [0, 2], {"/decision_rule/criteria/0/bounds"}),
    ("/decision_rule/criteria/0/margin", 1.0, {"/decision_rule/criteria/0/margin"}),
    ("/decision_rule/criteria/0/id", "other", {"/decision_rule/criteria"}),
    ("/decision_rule/criteria/1/id", "primary", {"/decision_rule/criteria/1/id"}),
    ("/decision_rule/seeds", [1], {"/decision_rule/seeds"}),
    ("/experiment_features/custom_loss", False, {"/experiment_features/custom_loss"}),
    ("/experiment_features/checkpoint_restore", True, {"/experiment_features/checkpoint_restore"}),
    ("/experiment_features/warmup_adaptation", True, {"/experiment_features/warmup_adaptation"}),
    ("/protocol/user", {"model": None}, {"/protocol/user/model"}),
    ("/protocol/user", {"prompt": "You are a customer."}, {"/protocol/user/prompt"}),
    ("/protocol/judge", {"model": None}, {"/protocol/judge/model"}),
    ("/dataset/name", "sierra-research/tau-bench@" + "0" * 40, {"/dataset/name"}),
    ("/correctness_preflight/paths/1/id", "grpo_via_new_advantage_path", {"/correctness_preflight/paths/1/id"}),
    (
        "/correctness_preflight/paths/0/baseline_revision",
        "lasgroup/SDPO@" + "0" * 40,
        {"/correctness_preflight/paths/0/baseline_revision"},
    ),
]
ADAM = "/restoration_preflight/groups/0/arms/{}/optimizer_config"


@pytest.mark.parametrize(("pointer", "value", "expected"), CONTRADICTIONS)
def test_a_contradiction_is_found_where_it_is(tmp_path: Path, pointer: str, value: Any, expected: set[str]):
    wanted = {ADAM.format(place[1]) + place[2:] if place.startswith("a") else place for place in expected}
    assert set(findings_of(tmp_path, edited(FULL, put(pointer, value)))) == wanted


SCHEMA_VIOLATIONS: list[tuple[str, Any, str, str]] = [
    ("/step", 20, "/step", "did you mean 'steps'"),
    ("/protocol/rollout/max_turn", 3, "/protocol/rollout/max_turn", "did you mean 'max_turns'"),
    ("/steps", "20", "/steps", "expected integer, found string"),
    ("/steps", 20.0, "/steps", "expected integer, found number"),
    ("/steps", True, "/steps", "expected integer, found boolean"),
    ("/steps", None, "/steps", "expected integer, found null"),
    ("/steps", 0, "/steps", "minimum"),
    ("/steps", 10**9, "/steps", "maximum"),
    ("/arms", [], "/arms", "minItems"),
    ("/arms/0/name", "Grpo arm", "/arms/0/name", "pattern"),
    ("/decision_rule/alpha", 1, "/decision_rule/alpha", "exclusiveMaximum"),
    ("/decision_rule/method", "t_test", "/decision_rule/method", "const"),
    ("/correctness_preflight/required", False, "/correctness_preflight/required", "const"),
    ("/feasibility", {"wall": 1}, "/feasibility", "expected null, found object"),
    ("/protocol/warm_start", 5, "/protocol/warm_start", "expected object"),
    ("/protocol/warm_start", {"tasks": {"split": "train"}}, "/protocol/warm_start/learning_rate", "missing key"),
    ("/protocol/evaluation", {"split": "test", "tasks": [1, 1]}, "/protocol/evaluation/tasks", "uniqueItems"),
    ("/activation_gate/checks/0/mins", 1, "/activation_gate/checks/0/mins", "did you mean 'min'"),
]


@pytest.mark.parametrize(("pointer", "value", "place", "words"), SCHEMA_VIOLATIONS)
def test_what_the_schema_forbids_is_found_where_it_is(tmp_path: Path, pointer: str, value: Any, place: str, words: str):
    findings = findings_of(tmp_path, edited(FULL, put(pointer, value)))
    assert words in findings[place]


@pytest.mark.parametrize("key", sorted(FULL))
def test_every_key_of_the_experiment_is_needed(tmp_path: Path, key: str):
    assert findings_of(tmp_path, edited(FULL, lambda document: document.pop(key))) == {f"/{key}": "missing key"}


def test_all_findings_come_at_once(tmp_path: Path):
    document = edited(FULL, put("/batch_size", 15))
    put("/arms/1/seed", 3)(document)
    put("/decision_rule/seeds", [9])(document)
    assert set(findings_of(tmp_path, document)) == {"/batch_size", "/arms/1/seed", "/decision_rule/seeds"}


def test_warm_start_training_and_evaluation_share_no_task(tmp_path: Path):
    trained = LOCAL["protocol"]["train"]["tasks"]
    document = edited(
        LOCAL, put("/protocol/warm_start/tasks/tasks", [trained[0], *LOCAL["protocol"]["evaluation"]["tasks"]])
    )
    assert set(findings_of(tmp_path, document)) == {"/protocol/warm_start/tasks"}
    assert set(findings_of(tmp_path, edited(LOCAL, put("/experiment_features/warmup_adaptation", False)))) == {
        "/experiment_features/warmup_adaptation"
    }


def test_two_arms_of_one_kind_are_an_a_a_experiment(tmp_path: Path):
    document = edited(FULL, put("/arms/1", {**FULL["arms"][0], "name": "grpo_again", "kind": "grpo"}))
    put("/restoration_preflight/groups/0/arms/1/name", "grpo_again")(document)
    put("/experiment_features/custom_loss", False)(document)
    assert findings_of(tmp_path, document) == {}


def test_a_third_arm_is_data(tmp_path: Path):
    document = edited(FULL, lambda d: d["arms"].append({**d["arms"][0], "name": "hybrid"}))
    group = document["restoration_preflight"]["groups"][0]["arms"]
    group.append({**group[0], "name": "hybrid"})
    assert findings_of(tmp_path, document) == {}
    spec = load(tmp_path / "spec.json")
    assert {arm.name: arm.hybrid_weight for arm in spec.arms}["hybrid"] == 0.9
    assert (spec.comparison.treatment, spec.comparison.baseline) == ("sdpo_token", "grpo")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1,}', "line 1, column"),
        (b"[]", "one JSON object"),
        (b'{"steps": 1, "steps": 2}', "'steps' occurs twice"),
        (b'{"steps": NaN}', "NaN is no JSON number"),
        (b'{"steps": -Infinity}', "-Infinity is no JSON number"),
        (b'{"steps": 1e999}', "too large"),
        (b'{"steps": ' + b"9" * 5000 + b"}", r"beyond 2\^53"),
        (b'{"steps": -9007199254740992}', r"beyond 2\^53"),
        (b'{"title": "\\ud800"}', "surrogate"),
        (b"\xff\xfe", "UTF-8"),
        (b'\xef\xbb\xbf{"steps": 1}', "JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b" " * (5 * 2**20), "larger than"),
    ],
)
def test_what_is_no_json_object_is_one_sentence(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "spec.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_key_that_would_command_the_terminal_is_shown_escaped(tmp_path: Path):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(FULL | {"\x1b[2J\nrun.py: all is well": 1}), "utf-8")
    error = refusal(path)
    assert error is not None
    assert str(error).endswith("/\\u001b[2J\\u000arun.py: all is well: unknown key")


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path):
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(SpecError):
            load(path)
