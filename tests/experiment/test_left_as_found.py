"""A run leaves an account as it found it: what it saved is limited in time, and deleted but for the adapters."""

import contextlib
import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import BackendError
from paritygate.experiment.run.account.saved_states import SavedStates
from paritygate.experiment.run.state import State
from paritygate.experiment.step.arm_run import PROCESS
from paritygate.receipts import PhaseChain
from paritygate.report import files
from tests.counts import SOAK, soak
from tests.experiment.scaled_spec import brief
from tests.scripted_service import Script, ScriptedService, ScriptedTrainer

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


def check_left(service: ScriptedService, run: Path, orphan: str | None = None) -> None:
    """Two adapters and what is not the run's; nothing of others was ever asked to be deleted.

    orphan: what a process was killed in saving, maybe an adapter without a limit.
    """
    adapters = PhaseChain(run).record("train")["facts"]["samplers"]
    assert set(service.saved) == {SOMEBODY_ELSES, *adapters.values()}
    assert SOMEBODY_ELSES not in service.deleted
    limits = {path: limit for path, limit in service.limits.items() if "-final-" not in path}
    assert orphan not in service.saved
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
    calls = soak(quick=3, full=1000)
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


WINDOWS = ("train-grpo-0-", "train-sdpo_token-1-", "train-grpo-final-", "train-sdpo_token-final-")


def saves_of(service: ScriptedService) -> list[str]:
    """What was saved, without the tag of the process, in its order."""
    return [path.rsplit("/", 1)[-1] for path in service.ever_saved if path != SOMEBODY_ELSES]


def test_killed_between_a_save_and_its_record(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has it and the process is gone, or never heard: the next one finds it, and deletes what is no result.

    One save of each kind in training, the two trained adapters among them; every save of a run, both ways, in a soak.
    """
    service = scripted(service_with_others())
    run_spec(brief(), output=tmp_path / "half", until="activation_pilot")
    whole = copy.deepcopy(service)
    scripted(whole)
    shutil.copytree(tmp_path / "half", tmp_path / "undisturbed")
    run_spec(brief(), output=tmp_path / "undisturbed", resume=True)
    names = [name for name in saves_of(whole) if SOAK or name.startswith(WINDOWS)]
    starts = list(dict.fromkeys(name.removesuffix(PROCESS) for name in names))
    assert {start for start in WINDOWS if not any(name.startswith(start) for name in starts)} == set()
    real = ScriptedTrainer.save
    for number, start in enumerate([*starts, *reversed(starts)] if SOAK else starts):
        killed = number % 2 == 0
        run, met = tmp_path / f"run-{number}", []
        from_the_start = start not in [name.removesuffix(PROCESS) for name in saves_of(whole)[len(saves_of(service)) :]]
        at = scripted(service_with_others() if from_the_start else copy.deepcopy(service))
        if not from_the_start:
            shutil.copytree(tmp_path / "half", run)

        async def save(
            trainer: ScriptedTrainer,
            name: str,
            ttl: int | None = None,
            start: str = start,
            met: list[str] = met,
            killed: bool = killed,
        ) -> str:
            path = await real(trainer, name, ttl)
            if name.rsplit("/", 1)[-1].startswith(start) and not met:
                met.append(path)
                raise Killed if killed else BackendError("the answer was lost")
            return path

        monkeypatch.setattr(ScriptedTrainer, "save", save)
        with contextlib.suppress(Killed, BackendError):
            run_spec(brief(), output=run, resume=not from_the_start)
        monkeypatch.setattr(ScriptedTrainer, "save", real)
        [orphan] = met
        assert orphan in at.saved
        run_spec(brief(), output=run, resume=True)
        check_left(at, run, orphan)
        for name in FINAL:
            assert (run / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), start


def test_a_sampler_with_the_name_of_a_state_is_a_save_of_its_own(tmp_path: Path) -> None:
    """A step's state and the next one's sampler have one name: the answer to the first is none to the second."""
    states, both = (
        SavedStates(tmp_path),
        [f"tinker://7/{kind}/train-grpo-1-0badc0de" for kind in ("weights", "sampler_weights")],
    )
    name = "train-grpo-1-0badc0de"
    for path in both:
        states.intend("7", name)
        assert states.unanswered() == [("7", name)]
        states.add("7", name, path)
        assert states.unanswered() == []
    states.intend("7", name)
    states.add("7", name, both[0])  # found again in a list, as one that is known already
    assert states.unanswered() == [("7", name)]


def test_killed_between_a_deletion_and_its_record(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for once more, and that it is gone is no error."""
    service = scripted(service_with_others())
    real = service.delete

    async def delete(path: str) -> None:
        await real(path)
        raise Killed

    monkeypatch.setattr(service, "delete", delete)
    with pytest.raises(Killed):
        run_spec(brief())
    monkeypatch.setattr(service, "delete", real)
    run_spec(brief(), resume=True)
    check_left(service, tmp_path / "run")
    assert service.deleted[0] == service.deleted[1]


def test_what_arrives_late_is_found_too_and_no_list_is_no_failure(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed process's request may be served after the next one has asked; a service may not list what it has."""
    service, run = scripted(service_with_others()), tmp_path / "run"
    run_spec(brief(), until="train")
    states = SavedStates(run)
    states.intend("77", "train-grpo-final-0badc0de")
    states.intend("78", "another-0badc0de")

    async def refuse(client: str) -> list[str]:
        service.saved["tinker://77/sampler_weights/train-grpo-final-0badc0de"] = 1  # arrives after the list
        raise BackendError(f"no list of {client}")

    lists = service.checkpoints
    monkeypatch.setattr(service, "checkpoints", refuse)
    run_spec(brief(), until="evaluate", resume=True, quiet=False)
    assert "whether train-grpo-final-0badc0de was saved is not known" in capsys.readouterr().err
    monkeypatch.setattr(service, "checkpoints", lists)
    run_spec(brief(), resume=True)
    check_left(service, run)


def test_a_stop_that_is_killed_before_it_deletes_leaves_nothing_after_a_resume(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paritygate.errors import GateStopped

    service = scripted(ScriptedService(Script(gap=20.0)))
    real = State.delete_superfluous

    async def killed(state: State) -> None:
        if any(state.record(phase).get("outcome") == "stopped" for phase in state.chain.completed):
            raise Killed
        await real(state)

    monkeypatch.setattr(State, "delete_superfluous", killed)
    with pytest.raises(Killed):
        run_spec(brief())
    assert service.saved
    monkeypatch.setattr(State, "delete_superfluous", real)
    with pytest.raises(GateStopped):
        run_spec(brief(), resume=True)
    assert service.saved == {}


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
