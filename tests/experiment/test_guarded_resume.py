"""Going on with a run: parity shown where a service is first met, nothing mixed, nothing decided between two writes."""

from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import BadInputError, GateStopped, Refused
from paritygate.experiment.correctness import parity
from paritygate.experiment.run.journal import Journal, read_lines
from paritygate.receipts import PhaseChain
from tests.experiment.scaled_spec import brief
from tests.scripted_service import Script, ScriptedService

pytestmark = pytest.mark.usefixtures("lean")
SERVICE = ScriptedService.endpoint


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, guard_passes: None) -> list[bool]:
    """Whether each call of the guard asked for parity to be shown again."""
    calls: list[bool] = []
    answers = parity.guard

    def guard(*arguments: Any, **options: Any) -> Any:
        calls.append(options["full_run"])
        return answers(*arguments, **options)

    monkeypatch.setattr(parity, "guard", guard)
    return calls


def test_a_run_begun_without_a_service_shows_parity_again_at_one(
    guarded: list[bool], run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(ScriptedService())
    monkeypatch.delenv("TINKER_BASE_URL")
    run_spec(brief(), until="correctness_preflight")
    assert PhaseChain(tmp_path / "run").record("correctness_preflight")["facts"]["full_run"] is False
    monkeypatch.setenv("TINKER_BASE_URL", SERVICE)
    run_spec(brief(), until="service_preflight", resume=True)
    assert guarded == [False, True]
    facts = PhaseChain(tmp_path / "run").record("service_preflight")["facts"]
    assert (
        facts["parity_shown_again"] == PhaseChain(tmp_path / "run").record("correctness_preflight")["facts"]["parity"]
    )
    run_spec(brief(), until="restoration_preflight", resume=True)
    assert guarded == [False, True]


def test_a_run_at_a_service_shows_parity_once(
    guarded: list[bool], run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    scripted(ScriptedService())
    run_spec(brief(), until="service_preflight")
    assert guarded == [True]
    assert PhaseChain(tmp_path / "run").record("correctness_preflight")["facts"]["full_run"] is True


def test_without_an_address_or_a_model_of_its_own_nothing_is_started(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(ScriptedService())
    monkeypatch.delenv("TINKER_BASE_URL")
    with pytest.raises(BadInputError, match=r"names no embedded model .* set TINKER_BASE_URL") as refused:
        run_spec(brief())
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_what_could_not_end_well_is_refused_before_anything_is_made(
    run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    """A budget of no hours, or a receipt to be trusted that nobody signed, would end the run after a while."""
    scripted(ScriptedService())
    without_hours = brief()
    without_hours["budget"]["gpu_hours"] = 0
    with pytest.raises(BadInputError, match=rf"/budget/gpu_hours is 0, .* no step could be taken at {SERVICE}\.$"):
        run_spec(without_hours)
    with pytest.raises(Refused, match="has no signature beside it"):
        run_spec(brief(), trust_receipt=True)
    assert not (tmp_path / "run").exists()
    run_spec(without_hours, until="correctness_preflight")  # asks no service


def test_a_run_does_not_go_on_elsewhere_than_where_its_weights_are(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(ScriptedService())
    run_spec(brief(), until="service_preflight")
    monkeypatch.delenv("TINKER_BASE_URL")
    spec = brief(service={"embedded_model": "tiny"})
    with pytest.raises(BadInputError):
        run_spec(spec, resume=True)  # another spec already
    spec = brief()
    monkeypatch.setattr("paritygate.experiment.runner.check_inputs", lambda *_, **__: pytest.fail("it was asked for"))
    with pytest.raises(BadInputError, match=r"was begun with http://scripted, .* cannot go on at the embedded server"):
        run_spec(spec, resume=True)


def test_a_run_does_not_go_on_with_another_environment(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before upstream's package is asked for, which would be installed for nothing."""
    scripted(ScriptedService())
    run_spec(brief(), until="design_check")
    assert PhaseChain(tmp_path / "run").record("spec_preflight")["facts"]["environment"] == "own"
    monkeypatch.setattr("paritygate.experiment.runner.check_inputs", lambda *_, **__: pytest.fail("it was asked for"))
    with pytest.raises(BadInputError, match="begun with --environment own: it cannot go on with upstream"):
        run_spec(brief(), resume=True, environment="upstream")
    with pytest.raises(BadInputError, match=r"is a run of another spec than .*spec\.json differs"):
        run_spec(brief(2, 3), resume=True)


def test_a_cuda_device_is_refused_and_says_what_it_is_for(run_spec: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="--device cuda"):
        run_spec(brief(), device="cuda")
    assert not (tmp_path / "run").exists()


def test_a_divergence_killed_before_its_receipt_is_not_forgotten(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is committed and the process dies before it looks at it: --resume must stop, not decide."""
    service = scripted(ScriptedService())
    spec = brief()
    run_spec(spec, until="activation_pilot")
    commit = Journal.commit

    def killed(journal: Journal, unit: str, record: Any) -> Any:
        committed = commit(journal, unit, record)
        if unit == "train-sdpo_token/step-001":
            raise KeyboardInterrupt
        if unit == "train-sdpo_token/step-000":
            service.script.gap = 20.0
        return committed

    monkeypatch.setattr(Journal, "commit", killed)
    with pytest.raises(KeyboardInterrupt):
        run_spec(spec, resume=True)
    monkeypatch.setattr(Journal, "commit", commit)
    service.script.gap = 1.0
    with pytest.raises(GateStopped, match="arm sdpo_token at step 1, sdpo_mean_abs_token_adv fails") as stopped:
        run_spec(spec, resume=True)
    assert stopped.value.exit_code == 4
    assert not (tmp_path / "run" / "verdict.json").exists()


def test_a_loss_that_was_nan_killed_before_its_receipt_is_not_tried_again(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = scripted(ScriptedService())
    run_spec(brief(), until="activation_pilot")
    service.script.nan_at = (service.passes + 1, 0)
    with monkeypatch.context() as dying:
        dying.setattr("paritygate.experiment.runner._record_stop", kill)
        with pytest.raises(KeyboardInterrupt):
            run_spec(brief(), resume=True)
    service.script.nan_at = None
    with pytest.raises(GateStopped, match="stopped before the optimiser step"):
        run_spec(brief(), resume=True)
    assert not (tmp_path / "run" / "verdict.json").exists()


def test_a_stop_killed_before_its_report_is_reported_by_the_resume(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(ScriptedService(Script(gap=20.0)))
    monkeypatch.setattr("paritygate.experiment.runner.write_report", kill)
    with pytest.raises(KeyboardInterrupt):
        run_spec(brief())
    assert not (tmp_path / "run" / "receipt.json").exists()
    page = tmp_path / "run" / "report.html"
    monkeypatch.setattr("paritygate.experiment.runner.write_report", lambda _: page.write_text("page"))
    with pytest.raises(GateStopped, match="never tried again"):
        run_spec(brief(), resume=True)
    assert (tmp_path / "run" / "receipt.json").is_file()


def kill(*_: Any) -> None:
    raise KeyboardInterrupt


def test_units_are_in_the_order_of_their_numbers_past_999(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (0, 2, 999, 1000, 1001, 10_000):
        journal.commit(f"train-grpo/step-{step:03d}", {"state": f"after {step}"})
    assert [journal.committed(unit)["state"] for unit in journal.units("train-grpo/step-")] == [
        f"after {step}" for step in (0, 2, 999, 1000, 1001, 10_000)
    ]
    assert journal.files("train")[-1] == "units/train-grpo/step-10000.json"


def test_no_ema_and_nan_are_deviations(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    service = scripted(ScriptedService())
    run_spec(brief(), until="activation_pilot")
    service.script.nan_at = (service.passes + 1, 0)
    with pytest.raises(GateStopped, match="stopped before the optimiser step"):
        run_spec(brief(), resume=True)
    kinds = [(line["phase"], line["kind"]) for line in read_lines(tmp_path / "run" / "deviations.jsonl")]
    assert kinds[0] == ("spec_preflight", "no_ema")
    assert ("train", "not_finite") in kinds
