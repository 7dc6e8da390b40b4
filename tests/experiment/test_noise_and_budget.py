"""A service that does not repeat its bits, and a budget that binds: measured, recorded, stopped only where it must."""

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paritygate.agent.judge import DIMENSIONS, Judged, Judgement
from paritygate.agent.rollouts import Group, Rollout
from paritygate.agent.trajectory import Trajectory
from paritygate.experiment.phases import activation_pilot
from paritygate.experiment.phases.preflight import forced_checks, restoration_preflight
from paritygate.experiment.run.account.budget import Account, BudgetSpentError
from paritygate.experiment.run.journal import Timings, read_lines
from paritygate.experiment.run.options import Settings
from paritygate.experiment.run.outcome import PhaseStopped
from paritygate.experiment.run.state import State
from paritygate.experiment.run.tokenizers import tokenizer_digest
from paritygate.experiment.step.metrics import gate_values, tally, tool_calls
from paritygate.receipts import PhaseChain
from paritygate.spec import load
from paritygate.spec.experiment import Budget
from paritygate.spec.schema import spec_folder
from tests.experiment.scaled_spec import brief
from tests.scripted_service import Script, ScriptedService

FACTS = {
    "largest_difference_before": 0.0,
    "largest_difference_after": 0.0,
    "noise_floor_before": 0.0,
    "noise_floor_after": 0.0,
    "moved_by_the_update": 0.5,
}


def state() -> Any:
    """The spec as asked for, and what is recorded as a deviation."""
    recorded: list[str] = []
    exp = load(spec_folder() / "sdpo.json")
    return SimpleNamespace(exp=exp, recorded=recorded, deviation=lambda phase, kind, what: recorded.append(kind))


@pytest.mark.parametrize(
    ("facts", "stop"),
    [
        ({}, None),
        ({"largest_difference_before": 1e-9}, "do not start from the same state"),  # a service that repeats its bits
        ({"largest_difference_after": 1e-9}, "do not start from the same state"),
        ({"noise_floor_before": 1e-3, "largest_difference_before": 4e-3}, None),  # exactly four times the noise
        ({"noise_floor_before": 1e-3, "largest_difference_before": 4.1e-3}, "do not start from the same state"),
        ({"noise_floor_after": 1e-3, "largest_difference_after": 4.1e-3}, "do not start from the same state"),
        ({"noise_floor_before": 0.06, "largest_difference_before": 0.01}, r"0\.05 are allowed"),
        ({"noise_floor_before": math.inf}, r"0\.05 are allowed"),
        ({"moved_by_the_update": 0.0}, "moved no logprob"),
        ({"largest_difference_before": math.inf, "noise_floor_before": 1e-3}, "do not start from the same state"),
    ],
)
def test_restoration_is_held_to_a_multiple_of_the_noise_floor(facts: dict[str, float], stop: str | None) -> None:
    if stop is None:
        restoration_preflight.refuse_unequal(state(), FACTS | facts)
        return
    with pytest.raises(PhaseStopped, match=stop):
        restoration_preflight.refuse_unequal(state(), FACTS | facts)


def test_an_update_that_drowns_in_noise_is_recorded_and_stops_nothing() -> None:
    run = state()
    restoration_preflight.refuse_unequal(run, FACTS | {"noise_floor_after": 1e-3, "moved_by_the_update": 4e-3})
    assert run.recorded == ["restoration_unresolved"]


def test_the_negative_control_is_recorded_and_stops_only_what_it_must() -> None:
    """Noise that passes a gate by itself is a deviation; a sibling that moves nothing beyond it stops."""
    run = state()
    noisy = forced_checks.Gap.of([0.02, 0.03])
    forced_checks.record_noise(run, noisy)
    assert run.recorded == ["gate_within_noise"]
    assert forced_checks.find_problems(noisy, forced_checks.Gap.of([0.5, 0.9])) == []
    assert "changes no advantage" in forced_checks.find_problems(noisy, noisy)[0]
    broken = forced_checks.Gap.of([math.nan])
    assert "advantages are nan" in forced_checks.find_problems(broken, noisy)[0]
    quiet = state()
    forced_checks.record_noise(quiet, forced_checks.Gap.of([0.0, 0.009]))
    assert quiet.recorded == []


@pytest.mark.usefixtures("lean")
def test_preflights_pass_at_a_service_with_noise(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    """1e-3 nats between two calls: the same seed gives the same state, and the noise is measured and written down."""
    scripted(ScriptedService(Script(noise=1e-3)))
    run_spec(brief(advantage={"student": "recomputed"}), until="forced_checks")
    facts = PhaseChain(tmp_path / "run").record("restoration_preflight")["facts"]
    assert 1e-3 < facts["noise_floor_before"] < 1e-2
    assert 0 < facts["largest_difference_before"] <= 4 * facts["noise_floor_before"]
    control = PhaseChain(tmp_path / "run").record("forced_checks")["facts"]["negative_control"]
    assert 0 < control["mean"] < 5e-3  # one scoring against another: the advantage that training takes


def test_the_fixed_batch_holds_assistant_turns(tau_bench_dir: Path) -> None:
    from tests.experiment.test_wiring import collector_of

    collector = collector_of(tau_bench_dir)
    batch = restoration_preflight.fixed_batch(collector)
    for task, datum in zip(collector.train_tasks(), batch, strict=False):
        gold = collector.gold("train", task)
        assert datum.tokens == gold.tokens[-restoration_preflight.LONGEST :]
        assert sum(gold.mask[-restoration_preflight.LONGEST :]) > 10


# Metrics --------------------------------------------------------------------------------------------------------------


def rollout(tries: int, parsed: bool, ended_by: Any = "user_stop", observations: tuple[str, ...] = ()) -> Rollout:
    judgement = Judgement(1.0, 1.0, 1.0, rationale=dict.fromkeys(DIMENSIONS, "fine")) if parsed else None
    trajectory = Trajectory(
        split="train", task_index=0, rollout=0, seed=0, tokens=(1, 2), mask=(0, 1), sampler_logprobs=(None, -1.0),
        prompt_length=1, spans=((1, 2),), messages=tuple({"role": "tool", "content": text} for text in observations),
        ended_by=ended_by, turns=1, reward=0.0, grade={},
    )  # fmt: skip
    return Rollout(trajectory, Judged(judgement, tries, first_try_parsed=parsed and tries == 1))


def test_the_parse_rate_counts_judge_calls_not_spoilt_episodes() -> None:
    rollouts = (rollout(1, True), rollout(1, True), rollout(2, True), rollout(0, False, "user_fault"))
    counts = tally([Group(0, rollouts)])
    assert counts["judge_calls"] == 3
    assert gate_values(counts, "model")["judge_parse_success_rate"] == 2 / 3
    spoilt = tally([Group(0, (rollout(0, False, "user_fault"),))])
    assert gate_values(spoilt, "model")["judge_parse_success_rate"] is None


def test_malformed_and_failed_tool_calls_are_counted() -> None:
    observations = (
        "Error: the tool call was not run, since it is not valid JSON.",
        "Error: the tool call cannot be read (KeyError).",
        "Error: user not found",
        "Unknown action fly",
        '{"order_id": "#W0000000"}',
    )
    assert tool_calls([rollout(1, True, observations=observations)]) == {
        "tool_calls": 5,
        "malformed_tool_calls": 2,
        "failed_tool_calls": 2,
        "malformed_tool_call_rate": 0.4,
        "failed_tool_call_rate": 0.4,
    }
    assert tool_calls([rollout(1, True)])["malformed_tool_call_rate"] is None


# The budget -----------------------------------------------------------------------------------------------------------


def test_what_is_spent_is_counted_over_processes_and_binds(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "timings.jsonl")
    for phase, variant, seconds in (("train", "", 3000), ("activation_pilot", "max_turns", 500), ("train", "", 100)):
        timings.append(phase, what="spent", variant=variant, seconds=seconds)
    timings.append("train", what="rollouts", variant="", step=0, seconds=9000)  # a part of what is counted already
    account = Account(timings, Budget(gpu_hours=1.0, max_wall_minutes=60.0))
    assert account.seconds() == 3600
    assert account.seconds("activation_pilot", fallbacks=True) == 500
    assert account.exceeded() is None  # exactly all of it is no more than all of it
    timings.append("evaluate", what="spent", variant="", seconds=60)
    with pytest.raises(BudgetSpentError, match=r"61\.0 minutes are spent, 60 are allowed") as spent:
        account.check()
    assert spent.value.exit_code == 4
    account.grants = 2
    account.check()
    served = Account(timings, Budget(gpu_hours=0.5, max_wall_minutes=600.0))
    served.check()
    served.gpus = 1
    with pytest.raises(BudgetSpentError, match=r"1\.02 GPU hours are spent, 0\.5 are allowed"):
        served.check()


@pytest.mark.parametrize(("gpus", "budget"), [(0, Budget(9.0, 1.0)), (1, Budget(1 / 60, 9000.0))])
def test_a_budget_stops_at_the_first_tenth_of_a_millisecond_over_it(tmp_path: Path, gpus: int, budget: Budget) -> None:
    """600 times 0.1 s are a minute, exactly, whatever their float sum is; what is written has four decimals."""
    path = tmp_path / "timings.jsonl"
    path.write_text('{"phase": "train", "what": "spent", "variant": "", "seconds": 0.1}\n' * 600)
    account = Account(Timings(path), budget)
    account.gpus = gpus
    account.check()
    Timings(path).append("train", what="spent", variant="", seconds=0.0001)
    with pytest.raises(BudgetSpentError):
        account.check()


@pytest.mark.usefixtures("lean")
def test_a_spent_budget_stops_between_steps_and_a_resume_goes_on(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    scripted(ScriptedService())
    run_spec(brief(), until="activation_pilot")
    minutes = brief()["budget"]["max_wall_minutes"]
    Timings(tmp_path / "run" / "timings.jsonl").append("train", what="spent", variant="", seconds=60 * minutes)
    open_run = Account.check
    calls: list[int] = []

    def at_the_second_step(account: Account) -> None:
        calls.append(1)
        open_run(account)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Account, "check", at_the_second_step)
        patch.setattr(State, "_grant_budget", lambda _: None)
        with pytest.raises(BudgetSpentError):
            run_spec(brief(), resume=True)
    assert calls
    assert "train" not in PhaseChain(tmp_path / "run").completed  # nothing was refused: nothing is final
    run_spec(brief(), resume=True, until="train")
    deviations = read_lines(tmp_path / "run" / "deviations.jsonl")
    assert [line["kind"] for line in deviations].count("over_budget") == 1
    assert json.loads((tmp_path / "run" / "spec.json").read_bytes())["budget"]["max_wall_minutes"] == minutes


def test_a_fallback_takes_no_step_past_the_minutes_that_all_have(tmp_path: Path) -> None:
    run = state()
    timings = Timings(tmp_path / "timings.jsonl")
    run.account = Account(timings, run.exp.budget)
    timings.append(activation_pilot.PHASE, what="spent", variant="max_turns", seconds=60 * 15 + 1)
    timings.append(activation_pilot.PHASE, what="spent", variant="", seconds=10_000)
    assert activation_pilot.fallback_seconds(run) == 901


def test_a_fallback_steps_up_to_exactly_its_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = state()
    timings = Timings(tmp_path / "timings.jsonl")
    run.account = Account(timings, run.exp.budget)

    async def one_step(runs: Any, steps: int, collector: Any, before: Any) -> None:
        before()

    async def collector(state: Any, settings: Any) -> None:
        return None

    monkeypatch.setattr(activation_pilot, "advance", one_step)
    monkeypatch.setattr(activation_pilot.Collector, "of", collector)
    seconds = 60 * run.exp.protocol.pilot.max_fallback_minutes
    timings.append(activation_pilot.PHASE, what="spent", variant="max_turns", seconds=seconds)
    asyncio.run(activation_pilot.pilot(run, [], Settings(12, "current"), "max_turns"))
    timings.append(activation_pilot.PHASE, what="spent", variant="max_turns", seconds=0.0001)
    asyncio.run(activation_pilot.pilot(run, [], Settings(12, "current"), ""))
    with pytest.raises(activation_pilot.FallbacksTimedOut):
        asyncio.run(activation_pilot.pilot(run, [], Settings(12, "current"), "max_turns"))


def test_a_tokenizer_has_a_digest_that_follows_its_ids() -> None:
    def words(shift: int) -> Any:
        return SimpleNamespace(encode=lambda text: [ord(c) + shift for c in text])

    assert tokenizer_digest(words(0)) == tokenizer_digest(words(0))
    assert tokenizer_digest(words(0)) != tokenizer_digest(words(1))
