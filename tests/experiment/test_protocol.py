"""The protocol as asked for, on a scripted service: counts, order, seeds, advantages and receipts against the spec."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paritygate.experiment.run.journal import read_lines
from paritygate.receipts import PhaseChain
from paritygate.spec import load
from tests.counts import soak
from tests.experiment.scaled_spec import asked_for
from tests.experiment.tiny_spec import ROOT
from tests.scripted_service import JUDGE, POLICY, USER, ScriptedService

STEPS, ITEMS = soak(quick=6, full=20), soak(quick=15, full=60)


@pytest.fixture
def finished(run_spec: Any, scripted: Any, tmp_path: Path) -> tuple[ScriptedService, Path]:
    """A whole run and the service that saw it."""
    service = scripted(ScriptedService())
    run_spec(asked_for(STEPS, ITEMS))
    return service, tmp_path / "run"


def test_the_protocol_whole(finished: tuple[ScriptedService, Path]) -> None:
    service, run = finished
    metrics = read_lines(run / "metrics.jsonl")
    check_training(metrics)
    check_service(service)
    check_items(run)
    check_chain(run)


def check_training(metrics: list[dict[str, Any]]) -> None:
    """Both arms, every step, the tasks that random.Random(0) gives, in that order, 16 episodes a step."""
    order = list(range(500))
    random.Random(0).shuffle(order)
    for arm in ("grpo", "sdpo_token"):
        lines = [line for line in metrics if line["phase"] == "train" and line["arm"] == arm]
        assert [line["step"] for line in lines] == list(range(STEPS))
        assert [task for line in lines for task in line["tasks"]] == order[: 4 * STEPS]
        assert all(sum(line["ended_by"].values()) == 16 for line in lines)
        assert all(line["sampler_recomputed_max_abs_diff"] == 0 for line in lines)
    assert Counter(line["phase"] for line in metrics) == {"timing_pilot": 1, "activation_pilot": 4, "train": 2 * STEPS}
    assert [line["index"] for line in metrics] == list(range(len(metrics)))


def check_service(service: ScriptedService) -> None:
    """Who was sampled, how: greedy in evaluation alone, 512 tokens a turn, one judge call an episode, Adam as asked."""
    by_model = Counter(sample["model"] for sample in service.samples)
    episodes = 1 + 4 + 16 + 4 * 16 + 2 * STEPS * 16 + 2 * ITEMS  # probe, forced checks, pilots, training, evaluation
    assert by_model[JUDGE] == episodes
    policy = [sample for sample in service.samples if sample["model"] == POLICY]
    greedy = [sample for sample in policy if sample["temperature"] == 0.0]
    assert {sample["path"].split("/")[-1].rsplit("-", 1)[0] for sample in greedy} == {
        "train-grpo-final",
        "train-sdpo_token-final",
    }
    assert {sample["temperature"] for sample in policy} == {0.0, 1.0}
    assert {sample["max_tokens"] for sample in policy} <= set(range(1, 513))
    assert by_model[USER] >= 2 * episodes
    adams = {update["adam"] for update in service.updates if "adam" in update}
    assert adams == {(4e-05, 0.9, 0.95, 1e-08)}


def check_items(run: Path) -> None:
    """One item an arm and task, in order; the verdict speaks of them all."""
    items = read_lines(run / "items.jsonl")
    assert [(item["arm"], item["task_index"]) for item in items] == [
        (arm, task) for arm in ("grpo", "sdpo_token") for task in range(ITEMS)
    ]
    assert all(item["composite"] is not None and item["reward"] in (0.0, 1.0) for item in items)
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["outcome"] in ("validated", "failed", "inconclusive")
    assert {criterion["n"] for criterion in verdict["criteria"]} == {ITEMS}


def check_chain(run: Path) -> None:
    """Every phase has its receipt, in order, with a reason; nothing that one vouches for has changed."""
    chain = PhaseChain(run)
    assert chain.completed == [
        "spec_preflight",
        "design_check",
        "correctness_preflight",
        "service_preflight",
        "service_proof",
        "restoration_preflight",
        "forced_checks",
        "timing_pilot",
        "activation_pilot",
        "train",
        "evaluate",
        "decide",
        "report",
    ]
    chain.verify()
    for phase in chain.completed:
        record = chain.record(phase)
        assert record["outcome"] == "done"
        assert record["decided"]
        assert record["because"]
    assert (run / "receipt.json").is_file()
    assert (run / "report.html").is_file()
    assert (run / "spec.json").read_bytes()
    assert load(ROOT / "spec" / "sdpo.json").steps == 20
