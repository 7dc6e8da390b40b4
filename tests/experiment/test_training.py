"""Training and evaluation: arms differ in the advantage alone, NaN stops before the step, nothing is imputed."""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paritygate.agent.seeds import derive
from paritygate.backend import ServiceDown
from paritygate.backend.guard import billing
from paritygate.errors import BackendError, GateStopped
from paritygate.experiment.run.journal import read_lines
from paritygate.receipts import PhaseChain
from tests.experiment.scaled_spec import brief
from tests.scripted_service import JUDGE, POLICY, Script, ScriptedService

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


def test_nan_stops_before_the_step_and_says_where(run_spec: Any, scripted: Any, audited: Any, tmp_path: Path) -> None:
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
    audited(tmp_path / "run")


def test_a_diverging_advantage_stops_training(run_spec: Any, scripted: Any, audited: Any, tmp_path: Path) -> None:
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
    audited(tmp_path / "run")


def stopped_by_a_bill(run_spec: Any, service: ScriptedService, run: Path, phase: str, call: int, episodes: int) -> None:
    """402 from this call of the judge on: a sentence at once (exit 5), no episode judged twice, no missing item."""
    asked: list[int] = []

    def unpaid(seed: int) -> None:
        asked.append(seed)
        if len(asked) >= call:
            raise billing(service.endpoint, "no funds")

    service.script.judge_says = unpaid
    sentence = r"a matter of billing \(HTTP 402: no funds\); settle it .* --resume"
    with pytest.raises(ServiceDown, match=sentence) as stopped:
        run_spec(brief(), resume=True, until=phase)
    assert stopped.value.exit_code == 5
    assert call <= len(asked) <= episodes
    assert phase not in PhaseChain(run).completed
    assert not list((run / "units").glob("evaluate-missed-*"))
    service.script.judge_says = lambda seed: None


def test_an_item_without_a_judgement_leaves_the_evaluation_resumable(
    run_spec: Any, scripted: Any, audited: Any, tmp_path: Path
) -> None:
    """Exit 5; a resume tries the missing items alone, with other seeds; the result is then as final as any.

    A bill that is not paid, at the judge alone, in training or here, is no judgement that is missing.
    """
    service = scripted(ScriptedService())
    run_spec(brief(), until="activation_pilot")
    stopped_by_a_bill(run_spec, service, tmp_path / "run", "train", call=3, episodes=8)
    run_spec(brief(), resume=True, until="train")
    paths = (tmp_path / "run" / "trajectories").glob("train-*.jsonl")
    assert {len(line["judge_answers"]) for path in paths for line in read_lines(path)} == {1}
    stopped_by_a_bill(run_spec, service, tmp_path / "run", "evaluate", call=1, episodes=4)
    lost = {derive(0, "judge", "test", 1, 0, derive(0, "evaluate", 1, 0, a), t) for a in range(3) for t in range(3)}
    service.script.judge_says = lambda seed: "five stars" if seed in lost else None
    before = len(service.samples)
    with pytest.raises(BackendError, match="the evaluation is incomplete: no judgement after 3 tries") as stopped:
        run_spec(brief(), resume=True)
    assert "task 1 of grpo (the judge was not parsed), task 1 of sdpo_token" in str(stopped.value)
    assert "--resume tries these 2 of 4 again" in str(stopped.value)
    judged = [s for s in service.samples[before:] if s["model"] == JUDGE]
    assert len(judged) == 2 * (1 + 3 * 3)  # arms: item 0 once, item 1 in 3 episodes of 3 tries
    for name in ("verdict.json", "items.jsonl", "receipt.json"):
        assert not (tmp_path / "run" / name).exists()
    assert "evaluate" not in PhaseChain(tmp_path / "run").completed
    committed = (tmp_path / "run" / "units" / "evaluate-grpo" / "task-0000-0.json").read_bytes()

    before = len(service.samples)
    run_spec(brief(), resume=True)
    again = [s for s in service.samples[before:] if s["model"] == JUDGE]
    assert len(again) == 2  # the missing item of each arm, and nothing else
    assert lost.isdisjoint(sample["seed"] for sample in again)
    assert (tmp_path / "run" / "units" / "evaluate-grpo" / "task-0000-0.json").read_bytes() == committed
    items = read_lines(tmp_path / "run" / "items.jsonl")
    assert [(item["arm"], item["task_index"], item["tries"]) for item in items] == [
        (arm, task, tries) for arm in ("grpo", "sdpo_token") for task, tries in ((0, 1), (1, 4))
    ]
    assert all(item["composite"] is not None for item in items)
    assert (tmp_path / "run" / "verdict.json").is_file()
    # Every try is kept, with what the judge said, and the receipt of the phase stands on it.
    missed = sorted((tmp_path / "run" / "units" / "evaluate-missed-grpo").iterdir())
    assert [path.name for path in missed] == [f"task-0001-0-try-000{n}.json" for n in range(3)]
    for path in missed:
        [line] = read_lines(tmp_path / "run" / json.loads(path.read_bytes())["trajectories"])
        assert [answer["text"] for answer in line["judge_answers"]] == ["five stars"] * 3
    deviations = read_lines(tmp_path / "run" / "deviations.jsonl")
    assert [line["kind"] for line in deviations if line["phase"] == "evaluate"] == ["missing_item_tried_again"] * 2
    audited(tmp_path / "run")


def test_a_judge_that_never_answers_never_ends_the_evaluation(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    service = scripted(ScriptedService())
    run_spec(brief(), until="train")
    service.script.judge_says = lambda seed: ""
    seeds: list[set[int]] = []
    for _ in range(2):
        before = len(service.samples)
        with pytest.raises(BackendError, match=r"these 4 of 4 again"):
            run_spec(brief(), resume=True)
        seeds.append({s["seed"] for s in service.samples[before:] if s["model"] == JUDGE})
    assert seeds[0].isdisjoint(seeds[1])
    assert "evaluate" not in PhaseChain(tmp_path / "run").completed


def test_a_probe_without_a_judgement_fails_and_shows_the_answer(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    service = scripted(ScriptedService(Script(judge_says=lambda seed: "The agent did well, I would say 9/10.")))
    with pytest.raises(BackendError, match=r"gpt-oss-120b gave no judgement .* 3 tries.*I would say 9/10"):
        run_spec(brief())
    assert not service.updates  # no client was trained on it
    [line] = read_lines(tmp_path / "run" / "trajectories" / "service_preflight.jsonl")
    assert [answer["error"] for answer in line["judge_answers"]] == ["it is no judgement"] * 3
    service.script.judge_says = lambda seed: None
    run_spec(brief(), resume=True, until="service_preflight")


def test_the_judge_may_think_for_thousands_of_tokens_and_longer_at_a_second_try(
    run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    service = scripted(ScriptedService(Script(judge_says=lambda seed: "no")))
    with pytest.raises(BackendError, match="gave no judgement"):
        run_spec(brief())
    assert [s["max_tokens"] for s in service.samples if s["model"] == JUDGE] == [4096, 8192, 8192]


def test_evaluation_is_bounded_by_the_services_context_and_training_by_the_spec(
    run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    """An episode of tool calls without end: training stops it at max_seq_len, the evaluation at the context."""
    service = scripted(ScriptedService(Script(context_length=2600)))
    spec = brief() | {"max_seq_len": 1200}
    spec["protocol"]["rollout"] |= {"max_turns": 40, "max_tokens_per_turn": 120}
    service.script.talkative = True
    run_spec(spec, until="evaluate")
    sequences = {}
    for path in sorted((tmp_path / "run" / "trajectories").glob("*.jsonl")):
        for line in read_lines(path):
            sequences.setdefault(path.name.split("-")[0], []).append((len(line["tokens"]), line["ended_by"]))
    train = [length for name, rows in sequences.items() if name != "evaluate" for length, _ in rows]
    assert max(train) <= 1200
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):  # what was cut is counted, each step
        rows = read_lines(tmp_path / "run" / "trajectories" / f"{line['phase']}-{line['arm']}-{line['step']:03d}.jsonl")
        cut = sum(row["ended_by"] == "sequence_limit" for row in rows)
        assert line["ended_by"]["sequence_limit"] == cut > 0
    assert {ended for _, ended in sequences["evaluate"]} <= {"sequence_limit", "turn_limit"}
    assert 1200 < max(length for length, _ in sequences["evaluate"]) <= 2600
    facts = PhaseChain(tmp_path / "run").record("evaluate")["facts"]
    assert facts["max_seq_len"] == 2600


def test_a_context_too_short_for_max_seq_len_is_a_deviation(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    scripted(ScriptedService(Script(context_length=1200)))
    run_spec(brief() | {"max_seq_len": 1200}, until="service_preflight")
    [deviation] = [d for d in read_lines(tmp_path / "run" / "deviations.jsonl") if d["kind"] == "short_context"]
    assert "a context of 1,200 tokens at this service: training ends an episode at 1,199" in deviation["what"]


def test_another_model_than_the_specs_ends_the_preflight_and_another_name_of_it_is_a_deviation(
    run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    """Before anything is sampled: until then only the activation gate saw it, after the warm start and the proof."""
    service = scripted(ScriptedService(Script(executed_model="Qwen/Qwen3.5-2B")))
    with pytest.raises(BackendError, match=rf"an adapter of Qwen/Qwen3.5-2B, asked was {POLICY}\.$"):
        run_spec(brief(), until="service_preflight")
    assert not service.samples
    scripted(ScriptedService(Script(executed_model=f"{POLICY}/instruct")))
    run_spec(brief(), until="service_preflight", output=tmp_path / "alias")
    [deviation] = [d for d in read_lines(tmp_path / "alias" / "deviations.jsonl") if d["kind"] == "model_name"]
    assert deviation["what"].startswith(f"the service calls {POLICY} {POLICY}/instruct: ")


def test_a_temperature_other_than_1_is_a_deviation(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    for temperature, kinds in ((0.7, ["temperature"]), (1.0, [])):
        scripted(ScriptedService())
        spec = brief()
        spec["protocol"]["rollout"]["temperature"] = temperature
        output = tmp_path / f"at-{temperature}"
        run_spec(spec, until="spec_preflight", output=output)
        lines = read_lines(output / "deviations.jsonl")
        assert [line["kind"] for line in lines if line["kind"] == "temperature"] == kinds
        assert all("0.7" in line["what"] for line in lines if line["kind"] == "temperature")


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


def test_several_rollouts_of_an_item_are_drawn_as_in_training(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    """Each with seeds of its own, which both arms share; a single one is greedy (test_wiring)."""
    service, spec = scripted(ScriptedService()), brief()
    spec["eval"]["rollouts_per_task"] = 2
    spec["protocol"]["rollout"]["temperature"] = 0.7
    run_spec(spec, until="evaluate")
    evaluated = [sample for sample in service.samples if "-final-" in str(sample["path"])]
    assert {sample["temperature"] for sample in evaluated} == {0.7}
    seeds = Counter(sample["seed"] for sample in evaluated)
    assert set(seeds.values()) == {2}  # arms
    [turns] = {line["turns"] for path in (tmp_path / "run" / "trajectories").glob("eval*") for line in read_lines(path)}
    assert len(seeds) == 2 * 2 * turns


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
