"""Each activation gate has a run that fails at it: exit 4, logs kept, fallbacks in order, nothing relaxed."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import GateStopped
from paritygate.experiment.run.journal import read_lines
from paritygate.experiment.step.gates import check_gate
from paritygate.receipts import PhaseChain
from paritygate.spec import GateCheck
from tests.experiment.scaled_spec import brief
from tests.scripted_service import Script, ScriptedService

pytestmark = pytest.mark.usefixtures("lean")


def constant(_seed: int, _length: int) -> list[float]:
    return [1.0, 0.5, 0.5]


def after_the_probe(says: Callable[[int], str | None]) -> Callable[[int], str | None]:
    """A judge that judges the service preflight's episode, its first call, and from then on answers as `says`."""
    calls = itertools.count()
    return lambda seed: says(seed) if next(calls) else None


DIVERGING = "sdpo_mean_abs_token_adv above"  # divergence: stop and record, no fallback
FAILING: dict[str, Script] = {
    "sdpo_frac_tokens_abs_adv_gt_0.1": Script(gap=0.11),
    "sdpo_mean_abs_token_adv": Script(gap=0.02),
    "sdpo_mean_abs_token_adv above": Script(gap=20.0),
    "sdpo_frac_trajectories_with_feedback": Script(judge_says=after_the_probe(lambda seed: "no" if seed % 4 else None)),
    "grpo_frac_groups_nonzero_adv": Script(scores=constant),
    "judge_parse_success_rate": Script(
        judge_says=after_the_probe(lambda seed: "I would say 0.5." if seed % 5 == 0 else None)
    ),
    "executed_base_model": Script(executed_model="Qwen/Qwen3.5-2B", executed_from=2),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_failing_gate_stops_the_run(case: str, run_spec: Any, scripted: Any, audited: Any, tmp_path: Path) -> None:
    scripted(ScriptedService(FAILING[case]))
    with pytest.raises(GateStopped) as stopped:
        run_spec(brief())
    assert stopped.value.exit_code == 4
    metric = case.removesuffix(" above")
    assert f"{metric} fails" in str(stopped.value)
    record = PhaseChain(tmp_path / "run").record("activation_pilot")
    assert record["outcome"] == "stopped"
    fallbacks = [] if case == DIVERGING else ["frozen_initial_teacher", "max_turns"]
    assert [attempt["fallback"] for attempt in record["facts"]["fallbacks"]] == fallbacks
    kinds = [line["kind"] for line in read_lines(tmp_path / "run" / "deviations.jsonl") if "pilot" in line["phase"]]
    assert kinds == (["divergence"] if case == DIVERGING else [])
    assert all(attempt["outcome"] != "every gate passes" for attempt in record["facts"]["fallbacks"])
    check_logs_and_cap(tmp_path / "run", record)
    audited(tmp_path / "run")


def check_logs_and_cap(run: Path, record: dict[str, Any]) -> None:
    """The pilots' trajectories and metrics are there; the gates are the spec's; fallbacks took four steps at most."""
    pilots = [line for line in read_lines(run / "metrics.jsonl") if line["phase"] == "activation_pilot"]
    assert len([line for line in pilots if not line["variant"]]) == 4
    assert len([line for line in pilots if line["variant"]]) <= 4
    for line in pilots:
        name = "-".join(filter(None, ["activation_pilot", line["arm"], line["variant"], f"{line['step']:03d}"]))
        assert len(read_lines(run / "trajectories" / f"{name}.jsonl")) == 4
    asked = json.loads((run / "spec.json").read_text())["activation_gate"]["checks"]
    for table in record["facts"]["gates"].values():
        for row in table:
            [check] = [check for check in asked if check["metric"] == row["metric"]]
            assert all(f"{check[side]:g}" in row["asked"] for side in ("min", "max") if check.get(side) is not None)
    assert (run / "report.html").is_file()


def test_a_stopped_run_stays_stopped(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    scripted(ScriptedService(FAILING["grpo_frac_groups_nonzero_adv"]))
    with pytest.raises(GateStopped):
        run_spec(brief())
    before = sorted((path, path.read_bytes()) for path in (tmp_path / "run").rglob("*.json*") if path.is_file())
    service = scripted(ScriptedService())
    with pytest.raises(GateStopped, match="never tried again"):
        run_spec(brief(), resume=True)
    assert not service.samples
    after = sorted((path, path.read_bytes()) for path in (tmp_path / "run").rglob("*.json*") if path.is_file())
    assert after == before


def test_a_frozen_teacher_that_passes_is_adopted(run_spec: Any, scripted: Any, audited: Any, tmp_path: Path) -> None:
    service = scripted(ScriptedService(Script(gap=0.02, frozen_gap=1.0)))
    run_spec(brief())
    facts = PhaseChain(tmp_path / "run").record("activation_pilot")["facts"]
    assert [attempt["outcome"] for attempt in facts["fallbacks"]] == ["every gate passes"]
    assert facts["fallbacks"][0]["arms"] == ["sdpo_token"]
    assert facts["settings"] == {"max_turns": 12, "teacher": "frozen_initial"}
    deviations = read_lines(tmp_path / "run" / "deviations.jsonl")
    assert [line["kind"] for line in deviations if line["phase"] == "activation_pilot"] == ["fallback"]
    assert any("train-sdpo_token-initial-" in path for path in service.ever_saved)
    audited(tmp_path / "run")


def test_more_turns_that_pass_are_adopted_for_both_arms(
    run_spec: Any, scripted: Any, audited: Any, tmp_path: Path
) -> None:
    """Composites vary only in episodes of more than twelve turns, which only the second fallback allows."""

    def late(seed: int, length: int) -> list[float]:
        return [1.0, (seed % 3) / 2 if length > LONG else 0.5, 0.5]

    scripted(ScriptedService(Script(scores=late, talkative=True)))
    run_spec(brief())
    facts = PhaseChain(tmp_path / "run").record("activation_pilot")["facts"]
    outcomes = {attempt["fallback"]: attempt["outcome"] for attempt in facts["fallbacks"]}
    assert outcomes["frozen_initial_teacher"].startswith("not piloted: grpo has no teacher")
    assert outcomes["max_turns"] == "every gate passes"
    assert facts["settings"] == {"max_turns": 16, "teacher": "current"}
    trained = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "train"]
    assert {line["turns"] for line in trained} == {16}
    assert {line["arm"] for line in trained} == {"grpo", "sdpo_token"}
    audited(tmp_path / "run")


LONG = 2050  # tokens of a judge prompt: about 2,000 with twelve turns, 2,110 with sixteen


@pytest.mark.parametrize(
    ("bounds", "value", "passes"),
    [
        ({"min": 0.05}, 0.05, True),
        ({"min": 0.05}, 0.049999, False),
        ({"max": 3.0}, 3.0, True),
        ({"min": 0.01, "max": 3.0}, float("nan"), False),
        ({"max": 3.0}, float("inf"), False),
        ({"max": 3.0}, float("nan"), False),
        ({}, float("nan"), False),
        ({"min": 0.5}, True, False),
        ({"min": 0.0}, None, False),
        ({"one_of": ("a",)}, "a", True),
        ({"one_of": ("a",)}, "a, b", False),
    ],
)
def test_a_gate(bounds: dict[str, Any], value: Any, passes: bool) -> None:
    check = GateCheck("m", "says", **({"min": None, "max": None, "one_of": None} | bounds))
    assert check_gate(check, value).passed is passes
