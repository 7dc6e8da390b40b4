"""What a run costs: every token of every kind counted and priced by hand, before the run, in its log, at its end."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import BadInputError
from paritygate.experiment.plan import forecast
from paritygate.experiment.run.account.budget import Account
from paritygate.experiment.run.journal import Journal, Timings, read_lines
from paritygate.spec import load
from tests.experiment import stub_proof
from tests.experiment.scaled_spec import brief
from tests.scripted_service import JUDGE, POLICY, USER, ScriptedService

PRICES = {
    "as_of": "2026-11-30",
    "currency": "USD",
    "gpu_hour": 3.0,
    "models": {
        POLICY: {"prefill": 1.0, "sampled": 10.0, "trained": 100.0, "source": "a test", "as_of": "2026-11-01"},
        JUDGE: {"prefill": 2.0, "sampled": 20.0, "source": "a test", "as_of": None},
    },
}


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(PRICES))
    return path


@pytest.fixture
def finished(
    run_spec: Any, scripted: Any, lean: None, tmp_path: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[ScriptedService, Path, str]:
    """A scripted run with those prices, its service, and what it log on stderr."""
    service = scripted(ScriptedService())
    run_spec(brief(), prices=prices, quiet=False)
    return service, tmp_path / "run", capsys.readouterr().err


def test_every_token_is_counted_and_priced(finished: tuple[ScriptedService, Path, str]) -> None:
    """Against what the service itself saw: prompts whole, each time; trained tokens are targets, one less a datum."""
    service, run, log = finished
    seen = {
        f"{role}/prefill": sum(call["prompt"] for call in service.samples if call["model"] == model)
        for role, model in (("policy", POLICY), ("user", USER), ("judge", JUDGE))
    }
    seen["policy/prefill"] += sum(len(call["tokens"]) for call in service.scores)
    seen["policy/prefill"] += service.forwarded
    seen |= {
        f"{role}/sampled": sum(call["sampled"] for call in service.samples if call["model"] == model)
        for role, model in (("policy", POLICY), ("user", USER), ("judge", JUDGE))
    }
    seen |= {f"proof/{kind}": tokens for kind, tokens in stub_proof.USED.items()}
    seen["policy/trained"] = sum(len(datum.tokens) - 1 for update in service.updates for datum in update["data"])
    cost = json.loads((run / "cost.json").read_bytes())
    assert {f"{row['role']}/{row['kind']}": row["tokens"] for row in cost["rows"]} == seen
    assert cost["saved_states"] == len(service.limits)
    of_policy = seen["policy/prefill"] + 10 * seen["policy/sampled"] + 100 * seen["policy/trained"]
    of_policy += 1 * 9000 + 10 * 2500 + 100 * 3100  # of the proof, at the policy's prices
    money = (of_policy + 2 * seen["judge/prefill"] + 20 * seen["judge/sampled"]) / 1e6 + 3.0 * cost["gpu_hours"]
    assert cost["money"] == pytest.approx(money, rel=1e-12, abs=0.0)
    assert [sentence.split(" for ")[1].split(":")[0] for sentence in cost["unknown"]] == [
        f"prefill tokens of {USER}",
        f"sampled tokens of {USER}",
    ]
    check_log(log)
    check_receipt(run, seen)


def test_what_is_asked_is_what_was_forecast(finished: tuple[ScriptedService, Path, str]) -> None:
    """Without fallbacks: as many episodes as trajectories were written, as many scorings as the service had."""
    service, run, _ = finished
    exp: Any = load(run / "spec.json")
    written = sum(len(read_lines(path)) for path in (run / "trajectories").glob("*.jsonl"))
    assert written == sum(forecast.episodes(exp).values()) - forecast.episodes(exp)["fallbacks"]
    assert len(service.scores) == sum(forecast.scorings(exp).values()) - forecast.scorings(exp)["fallbacks"]


def check_log(log: str) -> None:
    """A line a step and one an arm's evaluation, in a log too (stderr is no terminal here), with an ETA."""
    for step in (1, 2):
        [line] = [line for line in log.splitlines() if f"train, step {step} of 2" in line]
        assert "composite grpo 0." in line
        assert "tokens: prefill " in line
        assert ", proof 14,600, " in line
        assert "USD (prices of 2026-11-01, unknown date)" in line
        assert "min of this phase to go" in line
    totals = [float(line.split("at least ")[1].split(" USD")[0]) for line in log.splitlines() if "to go" in line]
    assert totals == sorted(totals)
    assert totals[-1] > 0
    assert sum("evaluate, " in line and "2 of 2 episodes" in line for line in log.splitlines()) == 2


def check_receipt(run: Path, seen: dict[str, int]) -> None:
    """What was used, and by which prices, is in the receipt; the projection before training in feasibility.json."""
    named = json.loads((run / "receipt.json").read_bytes())["predicate"]["buildDefinition"]["resolvedDependencies"]
    by_name = {entry["name"]: entry for entry in named}
    used = by_name["service"]["annotations"]["used"]
    assert {name: used[name] for name in seen} == seen
    assert by_name["prices"]["annotations"] == {"as_of": "2026-11-30", "currency": "USD"}
    projected = json.loads((run / "feasibility.json").read_bytes())["cost"]
    trained = {f"{row['role']}/{row['kind']}": row["tokens"] for row in projected["rows"]}["policy/trained"]
    assert 0.8 * seen["policy/trained"] < trained < 1.5 * seen["policy/trained"]


def test_a_kill_loses_no_more_than_the_step_under_way(tmp_path: Path) -> None:
    """What was used is written down with the time that was spent, and read back by the next process."""
    from paritygate.spec.experiment import Budget

    first = Account(Timings(tmp_path / "timings.jsonl"), Budget(gpu_hours=1.0, max_wall_minutes=60.0))
    first.begin("train")
    first.usage["policy/prefill"] += 1000
    first.record()
    first.usage["policy/prefill"] += 10
    assert first.used() == {"policy/prefill": 1010}
    after_a_kill = Account(Timings(tmp_path / "timings.jsonl"), Budget(gpu_hours=1.0, max_wall_minutes=60.0))
    assert after_a_kill.used() == {"policy/prefill": 1000}
    assert [sorted(line["used"]) for line in read_lines(tmp_path / "timings.jsonl")] == [["policy/prefill"]]


def test_a_proof_that_is_killed_leaves_its_tokens_in_the_account(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written down with each obligation, before it is committed."""

    def killed(*_: Any, usage: Any, save: Any, **__: Any) -> Any:
        usage.count("trained", 700)
        usage.count("prefill", 11)
        save(stub_proof.report_of("http://scripted", POLICY, load(tmp_path / "spec.json")))
        raise KeyboardInterrupt

    scripted(ScriptedService())
    monkeypatch.setattr("paritygate.experiment.phases.preflight.service_proof.prove_at", killed)
    with pytest.raises(KeyboardInterrupt):
        run_spec(brief(), until="service_proof")
    of_proof = [line["used"] for line in read_lines(tmp_path / "run" / "timings.jsonl") if line.get("used")]
    assert {"proof/trained": 700, "proof/prefill": 11} in of_proof


@pytest.mark.usefixtures("lean")
def test_what_is_committed_is_counted_wherever_the_process_ends(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluated item and its tokens reach the disk in this order: tokens, item; then the process is killed."""
    scripted(ScriptedService())
    killed: list[str] = []
    commit, record = Journal.commit, Account.record

    def commit_and_die(journal: Journal, unit: str, what: Any) -> Any:
        made = commit(journal, unit, what)
        if unit.startswith("evaluate-"):
            killed.append(unit)
            raise SystemExit
        return made

    def record_alive(account: Account, variant: str = "") -> None:
        if not killed:
            record(account, variant)

    monkeypatch.setattr(Journal, "commit", commit_and_die)
    monkeypatch.setattr(Account, "record", record_alive)
    with pytest.raises(BaseException):  # noqa: B017 - a group of it, or itself
        run_spec(brief())
    assert killed
    counted: Counter[str] = Counter()
    for line in read_lines(tmp_path / "run" / "timings.jsonl"):
        counted.update(line.get("used", {}))
    episodes = [*(tmp_path / "run" / "trajectories").glob("train-*.jsonl")]
    episodes += [tmp_path / "run" / "trajectories" / f"{killed[0].replace('/task', '')}.jsonl"]
    answers = [a["tokens"] for path in episodes for line in read_lines(path) for a in line["judge_answers"]]
    others = [line for line in read_lines(tmp_path / "run" / "timings.jsonl") if line["phase"] == "evaluate"]
    assert sum(line.get("used", {}).get("judge/sampled", 0) for line in others) >= answers[-1] > 0
    assert counted["judge/sampled"] >= sum(answers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"as_of": "yesterday"}, r"/as_of"),
        ({"models": {POLICY: {"prefill": -1, "sampled": 1, "source": "x", "as_of": None}}}, r"/prefill"),
        ({"models": {POLICY: {"prefill": 1, "source": "x", "as_of": None}}}, r"/sampled: missing key"),
        ({"models": {POLICY: {"prefill": 1, "sampled": 1, "source": "x"}}}, r"/as_of: missing key"),
        ({"discount": 1}, r"/discount: unknown key"),
    ],
)
def test_a_wrong_price_table_is_bad_input_before_anything_starts(
    change: dict[str, Any], words: str, run_spec: Any, scripted: Any, tmp_path: Path, prices: Path
) -> None:
    scripted(ScriptedService())
    prices.write_text(json.dumps(PRICES | change))
    with pytest.raises(BadInputError, match=words):
        run_spec(brief(), prices=prices)
    assert not (tmp_path / "run").exists()


def test_a_table_that_is_not_there_is_named(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    scripted(ScriptedService())
    spec = brief()
    spec["budget"]["prices"] = "none.json"
    with pytest.raises(BadInputError, match=r"none\.json: .*there is no such file"):
        run_spec(spec)


def test_the_price_before_a_run_is_counted_by_hand(tmp_path: Path) -> None:
    """The full protocol: 789 + 120 episodes of 12 turns, growing evenly from the prompt to the most they may have.

    One arm of two has a teacher, which scores an episode of the probe, twice those of the forced checks, the
    timed step, the pilot's, the fallbacks' and 20 steps.
    """
    from paritygate.experiment.plan.price import tokens_at_most
    from paritygate.experiment.plan.service_obligations import stands_on
    from tests.experiment.tiny_spec import ROOT

    exp: Any = load(ROOT / "spec" / "sdpo.json")
    used = tokens_at_most(exp, 4291, 11234)
    episodes = 1 + 4 + 16 + 64 + 64 + 640
    scored = 1 + 2 * 4 + 16 + 32 + 64 + 320
    assert used["policy/prefill"] == (
        episodes * 12 * (4291 + 8192) // 2 + 120 * 12 * (4291 + 11234) // 2 + scored * (2 * 8192 - 4291)
    )
    assert used["policy/sampled"] == episodes * (8192 - 4291) + 120 * 12 * 512
    assert used["policy/trained"] == ((2 * 22 + 4 + 1) * 16 + 2) * 8192
    assert used["proof/trained"] == 2700 + sum(entry.tokens for entry in stands_on(exp).entries)
    assert used["saved_states"] == 2 * (2 * 22 + 4 + 1) + 2 + 3 + 8
    assert used["user/prefill"] == (episodes + 120) * 13 * (700 + 12 * (512 + 256) // 2)
    assert used["user/sampled"] == (episodes + 120) * 13 * 256
    assert used["judge/prefill"] == episodes * 8192 + 120 * 11234
    assert used["judge/sampled"] == (episodes + 120) * 4096


def test_the_plan_says_the_price_and_what_has_none(tau_bench_dir: Path, prices: Path) -> None:
    from paritygate.experiment.check import plan
    from tests.experiment.tiny_spec import ROOT

    exp: Any = load(ROOT / "spec" / "sdpo.json")
    made = plan(exp, tau_bench=tau_bench_dir, prices=prices)
    [lines] = [section.lines for section in made.sections if section.title == "The price"]
    text = "\n".join(lines)
    for words in ("policy, prefill: ", "policy, sampled: ", "policy, trained: ", "judge, sampled: ", "saved states"):
        assert words in text
    assert f"of {POLICY}, 100 a million (2026-11-01): " in text
    assert f"of {JUDGE}, 20 a million (unknown date): " in text
    assert "by prices of 2026-11-01, unknown date; look up what is asked today" in text
    assert f"The price table of 2026-11-30 has no price for prefill tokens of {USER}" in text
    assert "2 hours and 2 GPU hours" in text
    assert made.to_json()["price"]["money"] > 0
    shipped = plan(exp, tau_bench=tau_bench_dir)
    assert "no price" not in "\n".join(line for section in shipped.sections for line in section.lines)
