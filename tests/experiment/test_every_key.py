"""Every key of an experiment is honoured or refused: another value of it is refused, or changes what a run would do."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paritygate import retail
from paritygate.agent import renderer
from paritygate.errors import BackendError, GateStopped
from paritygate.experiment.check import plan
from paritygate.experiment.phases import timing_pilot
from paritygate.experiment.plan.price import tokens_at_most
from paritygate.spec import SpecError, load
from tests.experiment.scaled_spec import brief
from tests.experiment.tiny_spec import ROOT
from tests.scripted_service import JUDGE, USER, Script, ScriptedSampler, ScriptedService

FULL = json.loads((ROOT / "spec" / "sdpo.json").read_text("utf-8"))
TESTS = ROOT / "tests"

# For people: what is meant, why, and what somebody should know. It is in the frozen spec, and so in the run's identity.
PROSE = [
    "/activation_gate/checks/*/measures",
    "/activation_gate/reason",
    "/arms/*/advantage",
    "/baseline",
    "/command",
    "/correctness_preflight/status",
    "/dataset/split",
    "/decision_rule/estimand",
    "/eval/benchmark",
    "/eval/metric",
    "/hypothesis",
    "/method",
    "/preflight/probe",
    "/preflight/riskiest_assumption",
    "/preflight/tuning",
    "/restoration_preflight/reason",
    "/success_criterion",
    "/feasibility_check/problems/*",
    "/protocol/train/why",
    "/protocol/evaluation/why",
    "/protocol/context/why",
]

# Read where generation_audit is required, and that is refused: no training data is generated.
OF_AN_AUDIT = [
    f"/generation_audit/{key}"
    for key in ("answer_comparison", "max_eval_overlaps", "max_label_errors", "min_sample_size")
]

REFUSED: dict[str, Any] = {
    "/activation_gate/applicable": False,
    "/activation_gate/checks/*/metric": "accuracy",
    "/activation_gate/checks/*/one_of": ["a"],
    "/arms/*/lr": 5e-5,
    "/arms/*/name": "other",
    "/arms/*/seed": 1,
    "/arms/*/hybrid_weight": 0.5,
    "/arms/*/top_k": 10,
    "/arms/*/loss": "my_losses:gspo",  # of another kind than these arms
    "/arms/*/teacher": True,
    "/batch_size": 8,
    "/correctness_preflight/paths/*/baseline_revision": "tinker-cookbook==9.9",
    "/correctness_preflight/paths/*/reference_revision": "tinker-cookbook==9.9",
    "/correctness_preflight/paths/*/id": "other",
    "/correctness_preflight/paths/*/kind": "model",
    "/correctness_preflight/required": False,
    "/dataset/hf_path": "a/b",
    "/dataset/n_examples": 40,
    "/dataset/name": "tau-bench retail",
    "/decision_rule/criteria/*/bounds/*": -1,
    "/decision_rule/criteria/*/id": "other",
    "/decision_rule/criteria/*/metric": "tau_bench_task_reward",
    "/decision_rule/criteria/*/weights/baseline": 1,
    "/decision_rule/criteria/*/weights/treatment": 2,
    "/decision_rule/method": "t_test",
    "/decision_rule/seeds/*": 1,
    "/decision_rule/unit": "episodes",
    "/decision_rule/version": 2,
    "/eval/aggregation": "mean",
    "/eval/n_examples": 50,
    "/feasibility": {},
    "/feasibility_check/gpu_hours": 1.0,
    "/feasibility_check/known_gpu_hours": 1,
    "/feasibility_check/phases": {"train": 1},
    "/feasibility_check/status": "feasible",
    "/feasibility_check/wall_seconds": 1.0,
    "/generation_audit/required": True,
    "/optimizer/lr": 5e-5,
    "/optimizer/name": "sgd",
    "/primary_endpoint": "heldout_reward_mean",
    "/restoration_preflight/applicable": False,
    "/restoration_preflight/fixed_batch_required": False,
    "/restoration_preflight/groups/*/arms/*/name": "other",
    "/restoration_preflight/groups/*/arms/*/optimizer": "sgd",
    "/restoration_preflight/groups/*/arms/*/optimizer_config/lora_rank": 8,
    "/restoration_preflight/groups/*/arms/*/optimizer_config/learning_rate": 5e-5,
    "/restoration_preflight/groups/*/arms/*/optimizer_config/beta1": 0.8,  # of one arm alone; of both: see `rates`
    "/restoration_preflight/groups/*/arms/*/optimizer_config/beta2": 0.8,
    "/restoration_preflight/groups/*/arms/*/optimizer_config/eps": 1e-6,
    "/lora_rank": 8,
    "/spec_preflight/findings": ["a finding"],
    "/spec_preflight/status": "failed",
    "/steps": 10,
    "/training_type": "sft",
    "/base_model": "Qwen/Qwen3-8B",
    "/activation_gate/checks/*/one_of/*": "Qwen/Qwen3-8B",
    "/protocol/rollout/tasks_per_step": 2,
    "/protocol/rollout/rollouts_per_task": 2,
    "/protocol/train/split": "dev",
    "/protocol/train/first": 40,
    "/protocol/train/tasks": [1],
    "/protocol/evaluation/split": "dev",
    "/protocol/evaluation/first": 50,
    "/protocol/evaluation/tasks": [1],
    "/protocol/service/embedded_dtype": "bfloat16",
    **{f"/experiment_features/{key}": not value for key, value in FULL["experiment_features"].items()},
}

PLANNED: dict[str, Any] = {  # what --check says of the run is another
    "/title": "Another",
    "/activation_gate/checks/*/min": 0.5,
    "/activation_gate/checks/*/max": 9.0,
    "/arms/*/kind": "sdpo_sequence",
    "/budget/gpu_hours": 1.0,
    "/budget/max_wall_minutes": 60,
    "/decision_rule/alpha": 0.1,
    "/decision_rule/criteria/*/margin": 0.02,
    "/eval/rollouts_per_task": 2,
    "/max_seq_len": 4096,
    "/protocol/rollout/max_turns": 10,
    "/protocol/rollout/max_tokens_per_turn": 256,
    "/protocol/user/kind": "scripted",
    "/protocol/user/model": "Qwen/Qwen3-4B",
    "/protocol/user/max_tokens": 100,
    "/protocol/judge/kind": "rule",
    "/protocol/judge/model": "openai/gpt-oss-20b",
    "/protocol/judge/max_tokens": 2048,
    "/protocol/judge/tries": 2,
    "/protocol/context/kind": "compact",
    "/protocol/warm_start": {"tasks": {"split": "dev", "first": 4}, "learning_rate": 1e-3, "batch_size": 2},
    "/protocol/pilot/steps": 3,
    "/protocol/pilot/max_fallback_steps": 2,
    "/protocol/comparison/treatment": "grpo",
    "/protocol/comparison/baseline": "sdpo_token",
    "/protocol/service/embedded_model": "tiny",
}

TESTED = {  # what a run does with it is held elsewhere
    "/budget/prices": "experiment/test_cost.py::test_a_table_that_is_not_there_is_named",
    "/correctness_preflight/paths/*/tolerances/*": (
        "experiment/test_correctness.py::test_every_tolerance_of_the_spec_is_compared_with"
    ),
    "/feasibility_required": "experiment/test_every_key.py::test_a_projection_over_the_budget_stops_where_it_must",
    "/protocol/rollout/temperature": "experiment/test_training.py::test_a_temperature_other_than_1_is_a_deviation",
    "/protocol/advantage/clip": "experiment/test_parts.py::test_sdpo_is_the_clipped_difference_on_the_mask",
    "/protocol/advantage/sibling_threshold": (
        "experiment/test_wiring.py::test_the_siblings_threshold_and_rule_are_the_specs"
    ),
    "/protocol/advantage/sibling_rule": "experiment/test_wiring.py::test_the_siblings_threshold_and_rule_are_the_specs",
    "/protocol/advantage/success_wording": "experiment/test_wiring.py::test_the_wording_for_a_success_is_the_specs",
    "/protocol/advantage/teacher": "experiment/test_gates.py::test_a_frozen_teacher_that_passes_is_adopted",
    "/protocol/advantage/student": (
        "experiment/test_recomputed_student.py"
        "::test_recomputed_student_logprobs_replace_the_sampled_ones_in_the_advantage_alone"
    ),
    "/protocol/train/shuffle_seed": "experiment/test_every_key.py::test_a_shuffle_is_by_the_specs_seed",
    "/protocol/evaluation/shuffle_seed": "experiment/test_every_key.py::test_a_shuffle_is_by_the_specs_seed",
    "/protocol/pilot/fallbacks/*": "experiment/test_gates.py::test_a_frozen_teacher_that_passes_is_adopted",
    "/protocol/service/undecided": (
        "experiment/test_service_proof.py::test_what_is_not_shown_needs_a_reason_in_the_spec"
    ),
    "/protocol/renderer": "agent/test_renderers.py::test_",
    "/protocol/pilot/fallback_max_turns": (
        "experiment/test_gates.py::test_more_turns_that_pass_are_adopted_for_both_arms"
    ),
    "/protocol/pilot/max_fallback_minutes": (
        "experiment/test_noise_and_budget.py::test_a_fallback_takes_no_step_past_the_minutes_that_all_have"
    ),
    "/protocol/noise/multiple": (
        "experiment/test_noise_and_budget.py::test_restoration_is_held_to_a_multiple_of_the_noise_floor"
    ),
    "/protocol/noise/at_most": (
        "experiment/test_noise_and_budget.py::test_restoration_is_held_to_a_multiple_of_the_noise_floor"
    ),
    **{
        f"/protocol/{key}": "experiment/test_every_key.py::test_judge_and_user_are_asked_as_the_spec_says"
        for key in (
            "user/prompt",
            "user/temperature",
            "judge/prompt",
            "judge/temperature",
            "judge/retry_max_tokens",
            "judge/reasoning_effort",
        )
    },
}


def leaves(node: Any, at: str = "") -> Iterator[str]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{at}/{key}")
    elif isinstance(node, list) and node:
        for index, value in enumerate(node):
            yield from leaves(value, f"{at}/{index}")
    else:
        yield at


def general(pointer: str) -> str:
    """A pointer with * for every index; the four tolerances of a path and their numbers are one."""
    starred = re.sub(r"/\d+(?=/|$)", "/*", pointer)
    return re.sub(r"/tolerances/.*", "/tolerances/*", starred)


def changed(pointer: str, value: Any) -> dict[str, Any]:
    """The full experiment, every default written out, with another value at the first place that `pointer` names."""
    document = copy.deepcopy(dict(load(ROOT / "spec" / "sdpo.json").frozen))
    *parents, last = pointer.removeprefix("/").split("/")
    nodes: list[Any] = [document]
    for key in parents:
        nodes = [child for node in nodes for child in (node if key == "*" else [node[key]] if key in node else [])]
    node = next(n for n in nodes if n and (last == "*" or last in n))
    node[0 if last == "*" else last] = value
    return document


def planned(document: dict[str, Any], folder: Path) -> list[Any]:
    """What the plan says of an experiment, and how many tokens it may take."""
    path = folder / "spec.json"
    path.write_text(json.dumps(document), "utf-8")
    exp: Any = load(path)
    return [plan(exp, tau_bench=folder / "none").text(), tokens_at_most(exp, 4291, 11_000)]


def test_every_key_is_somewhere() -> None:
    there = {general(pointer) for pointer in leaves(dict(load(ROOT / "spec" / "sdpo.json").frozen))}
    sorted_in = [*PROSE, *OF_AN_AUDIT, *REFUSED, *PLANNED, *TESTED]
    assert len(sorted_in) == len(set(sorted_in))
    assert set(sorted_in) == there


@pytest.mark.parametrize("pointer", REFUSED)
def test_another_value_is_refused(pointer: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(changed(pointer, REFUSED[pointer])), "utf-8")
    try:
        exp: Any = load(path)
    except SpecError:
        return
    assert exp.unresolved  # and no run starts of such a one (exit 3)


def test_another_value_is_another_plan(tmp_path: Path) -> None:
    before = planned(dict(load(ROOT / "spec" / "sdpo.json").frozen), tmp_path)
    for pointer, value in PLANNED.items():
        document = changed(pointer, value)
        if "comparison" in pointer:
            document["protocol"]["comparison"] = {"treatment": "grpo", "baseline": "sdpo_token"}
        if "warm_start" in pointer:
            document["experiment_features"]["warmup_adaptation"] = True
        assert planned(document, tmp_path) != before, pointer


def test_what_is_held_elsewhere_is_there() -> None:
    for pointer, place in TESTED.items():
        file, name = place.split("::")
        assert f"def {name}" in (TESTS / file).read_text("utf-8"), pointer


def test_a_shuffle_is_by_the_specs_seed() -> None:
    import random

    exp: Any = load(ROOT / "spec" / "sdpo.json")
    order = list(range(500))
    random.Random(0).shuffle(order)
    assert exp.protocol.train.indices(500) == tuple(order[:80])
    assert exp.protocol.evaluation.indices(115) == tuple(range(60))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every request for a sample, its prompt as text."""
    requests: list[dict[str, Any]] = []
    real = ScriptedSampler.sample

    async def sample(self: ScriptedSampler, tokens: Any, **options: Any) -> Any:
        requests.append({"model": self.model, "text": self.tokenizer.decode(list(tokens)), **options})
        return await real(self, tokens, **options)

    monkeypatch.setattr(ScriptedSampler, "sample", sample)
    return requests


@pytest.mark.usefixtures("lean")
def test_judge_and_user_are_asked_as_the_spec_says(
    run_spec: Any, scripted: Any, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tau_bench_dir: Path
) -> None:
    """By the requests that reach the service, in the probe, whose judge never answers: every try is seen.

    The judge reads the policy whole, though the agent has a compact prompt here.
    """
    service = scripted(ScriptedService(Script(judge_says=lambda seed: "no")))
    made: dict[str, dict[str, Any]] = {}
    load_renderer = renderer.load

    def seen(name: str, tokenizer: Any, *, model: str | None = None, **options: Any) -> Any:
        made[str(model)] = options
        return load_renderer(name, tokenizer, model=model, **options)

    monkeypatch.setattr(renderer, "load", seen)
    judge = {"prompt": "Judge it, friend.", "temperature": 0.25, "max_tokens": 700, "retry_max_tokens": 1900}
    user = {"prompt": "Be this: {instruction} Nothing else.", "temperature": 0.75, "max_tokens": 99}
    judge |= {"tries": 4, "reasoning_effort": "high"}
    with pytest.raises(BackendError, match="no judgement of the probe's episode in 4 tries"):
        run_spec(brief(judge=judge, user=user))
    judged = [request for request in asked if request["model"] == JUDGE]
    assert [request["max_tokens"] for request in judged] == [700, 1900, 1900, 1900]
    assert {request["temperature"] for request in judged} == {0.25}
    assert len({request["seed"] for request in judged}) == 4
    assert all("Judge it, friend." in request["text"] for request in judged)
    policy = retail.load(tau_bench_dir).wiki
    assert policy.startswith("# Retail agent policy\n")
    assert all(policy in request["text"] for request in judged)
    assert made[JUDGE] == {"thinking": True, "effort": "high"}
    assert made[USER] == {"thinking": False, "effort": None}
    spoken = [request for request in asked if request["model"] == USER]
    assert spoken
    assert {(request["temperature"], request["max_tokens"]) for request in spoken} == {(0.75, 99)}
    assert all("Be this: " in request["text"] and " Nothing else." in request["text"] for request in spoken)
    assert service.samples


@pytest.mark.usefixtures("lean")
def test_a_judge_is_asked_for_no_more_than_its_context_holds(
    run_spec: Any, scripted: Any, asked: list[dict[str, Any]]
) -> None:
    service = scripted(ScriptedService(Script(judge_says=lambda seed: "no")))
    service.context_lengths[JUDGE] = 6000
    with pytest.raises(BackendError, match="no judgement"):
        run_spec(brief())
    judged = [request for request in asked if request["model"] == JUDGE]
    prompts = [sample["prompt"] for sample in service.samples if sample["model"] == JUDGE]
    assert [request["max_tokens"] for request in judged] == [
        min(limit, 6000 - prompt) for limit, prompt in zip((4096, 8192, 8192), prompts, strict=True)
    ]
    assert judged[-1]["max_tokens"] < 8192


@pytest.mark.usefixtures("lean")
@pytest.mark.parametrize("required", [True, False])
def test_a_projection_over_the_budget_stops_where_it_must(
    required: bool, run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(ScriptedService())
    real = timing_pilot.project

    def over(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **options) | {"problems": ["too long"], "status": "infeasible"}

    monkeypatch.setattr(timing_pilot, "project", over)
    spec = brief()
    spec["feasibility_required"] = required
    if required:
        with pytest.raises(GateStopped, match="over budget"):
            run_spec(spec, until="timing_pilot")
    else:
        run_spec(spec, until="timing_pilot")
    assert json.loads((tmp_path / "run" / "feasibility.json").read_bytes())["status"] == "infeasible"
