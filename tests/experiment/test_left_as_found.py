"""A run leaves an account as it found it: what it saved is limited in time, and deleted but for the adapters."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import BackendError
from paritygate.experiment.run.state import State
from paritygate.receipts import PhaseChain
from paritygate.report import files
from tests.counts import soak
from tests.experiment.scaled_spec import brief
from tests.scripted_service import Script, ScriptedService

SOMEBODY_ELSES = "tinker://another/weights/train-grpo-1-00000000"
DAYS = 24 * 3600
FINAL = ("metrics.jsonl", "items.jsonl", "verdict.json")

pytestmark = pytest.mark.usefixtures("lean")


class Killed(BaseException):
    """Ends the process where it is thrown: nothing of ours catches it."""


def service_with_others() -> ScriptedService:
    service = ScriptedService()
    service.saved[SOMEBODY_ELSES] = 1
    return service


def check_left(service: ScriptedService, run: Path) -> None:
    """Two adapters and what is not the run's; nothing of others was ever asked to be deleted."""
    adapters = PhaseChain(run).record("train")["facts"]["samplers"]
    assert set(service.saved) == {SOMEBODY_ELSES, *adapters.values()}
    assert SOMEBODY_ELSES not in service.deleted
    limits = {path: limit for path, limit in service.limits.items() if "-final-" not in path}
    assert set(limits.values()) == {14 * DAYS}
    assert {service.limits[path] for path in adapters.values()} == {None}


def test_only_the_trained_adapters_are_left(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    service, run = scripted(service_with_others()), tmp_path / "run"
    run_spec(brief())
    check_left(service, run)
    assert len(service.ever_saved) > 15
    facts = PhaseChain(run).record("report")["facts"]
    assert facts["adapters"] == PhaseChain(run).record("train")["facts"]["samplers"]
    assert facts["left_to_their_time_limit"] == []
    page = page_of(run)
    assert all(path in page for path in facts["adapters"].values())


def page_of(run: Path) -> str:
    from paritygate.report import page

    return page.render(files.read_run(run))


def test_killed_between_commit_and_delete(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a process ends before it deletes, the next one does, and finds all that it goes on from."""
    scripted(ScriptedService())
    run_spec(brief(), output=tmp_path / "undisturbed")
    real = State.delete
    calls = soak(quick=4, full=1000)
    for number in range(calls):
        service, run, left = scripted(service_with_others()), tmp_path / f"run-{number}", [2 * number]

        async def delete(state: State, paths: Any, left: list[int] = left) -> None:
            left[0] -= bool(paths)
            if paths and left[0] < 0:
                raise Killed
            await real(state, paths)

        monkeypatch.setattr(State, "delete", delete)
        with contextlib.suppress(Killed):
            run_spec(brief(), output=run)
        monkeypatch.setattr(State, "delete", real)
        if left[0] >= 0:
            return  # past the last deletion of a run
        run_spec(brief(), output=run, resume=True)
        check_left(service, run)
        for name in FINAL:
            assert (run / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), number


def test_a_service_that_lets_nothing_go_is_left_with_limits_and_named(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = scripted(service_with_others())

    async def refuse(path: str) -> None:
        raise BackendError(f"Deleting a saved state failed: {path}")

    monkeypatch.setattr(service, "delete", refuse)
    run_spec(brief())
    left = PhaseChain(tmp_path / "run").record("report")["facts"]["left_to_their_time_limit"]
    assert set(left) == {path for path, limit in service.limits.items() if limit is not None}


def test_a_stopped_run_leaves_nothing(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    from paritygate.errors import GateStopped

    service = scripted(ScriptedService(Script(gap=0.0)))
    with pytest.raises(GateStopped):
        run_spec(brief())
    assert service.ever_saved
    assert service.saved == {}
