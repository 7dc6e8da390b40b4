"""Killed before any write of a run, and so after any other: the resumed run ends as an undisturbed one, and counts all.

Every write is seen by an audit hook: files opened for writing, links, renames, removals, folders made. From the chosen
one on, nothing is written and the service answers nothing, as if the process were gone; a line that was about to be
appended is left half on the disk.
"""

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import ParityGateError
from paritygate.experiment.run.environment import load_source
from paritygate.experiment.run.journal import read_lines
from paritygate.receipts import PhaseChain
from tests.counts import SOAK
from tests.experiment.scaled_spec import brief
from tests.experiment.test_left_as_found import Killed, check_left, service_with_others
from tests.scripted_service import ScriptedService

pytestmark = pytest.mark.usefixtures("lean")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
REMOVALS = {"os.remove", "os.rmdir"}
CHANGES = {"os.link", "os.rename", "os.mkdir", *REMOVALS}


class Process:
    """The process that writes below `folder`: it dies at its write number `end`; `writes` are those that it got to.

    full: it goes on, and the disk has no room from there on.
    """

    folder: str | None = None
    end: int | None = None
    dead = full = False
    writes: list[str]

    @contextlib.contextmanager
    def watched(self, folder: Path, end: int | None = None, *, full: bool = False) -> Any:
        """Inside, its writes are counted, and it dies at the given one, or from there on the disk is full."""
        self.folder, self.end, self.dead, self.full, self.writes = str(folder), end, False, full, []
        try:
            yield self
        finally:
            self.folder, self.dead = None, False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook."""
        if self.folder is None:
            return
        if event == "open":
            path, _, flags = arguments
            if not flags & WRITES:
                return
        elif event in CHANGES:
            path = arguments[1] if event in ("os.link", "os.rename") else arguments[0]
        else:
            return
        path = os.fspath(path) if not isinstance(path, int) else ""
        if not path.startswith(self.folder) or path.endswith("/lock"):
            return
        if self.full and self.end is not None and len(self.writes) >= self.end and event not in REMOVALS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if not self.full and not self.dead and len(self.writes) == self.end:
            self.dead = True
            if event == "open" and path.endswith(".jsonl"):
                folder, self.folder = self.folder, None
                with open(path, "ab") as file:
                    file.write(b'{"half of a line')
                self.folder = folder
        if self.dead:
            raise Killed
        self.writes.append(f"{event} {path.removeprefix(self.folder)}")


process = Process()
sys.addaudithook(process.hook)


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead process asks the service for nothing. What takes time and plays no part is done once, or not at all."""
    call, loaded = ScriptedService.call, cache(load_source)

    @contextlib.asynccontextmanager
    async def answered(service: ScriptedService) -> AsyncGenerator[None]:
        if process.dead:
            raise Killed
        async with call(service):
            yield
        if process.dead:
            raise Killed

    monkeypatch.setattr(ScriptedService, "call", answered)
    for module in ("runner", "run.state"):
        monkeypatch.setattr(f"paritygate.experiment.{module}.load_source", loaded)
    monkeypatch.setattr("paritygate.receipts.provenance.refuse_shadowed", lambda *_: None)
    monkeypatch.setattr("os.fsync", lambda _: None)


STEPS = ("os.link", "os.rename", "os.remove")  # a file is there, or its temporary one no more
QUICK = ("os.link /units/train-sdpo_token/step-001.json", "os.rename /receipt.json")


def windows(writes: list[str]) -> list[int]:
    """Which writes to die before: in a soak all that find another folder than the one before did."""
    every = [n for n, write in enumerate(writes) if write.startswith(STEPS) or write.endswith("s.jsonl") or n < 8]
    quick = [number for number, write in enumerate(writes) if write in QUICK]
    assert len(quick) == len(QUICK)
    return every if SOAK else quick


def files(run: Path) -> set[str]:
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return names - {"deviations.jsonl"}


def check_same(run: Path, undisturbed: Path) -> None:
    """The same files; the same results to the byte; only the resumption is a deviation more."""
    assert files(run) == files(undisturbed)
    for name in ("metrics.jsonl", "items.jsonl", "verdict.json", "spec.json"):
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes(), name
    deviations, others = (read_lines(path / "deviations.jsonl") for path in (run, undisturbed))
    more = [line for line in deviations if line not in others]
    assert {line["kind"] for line in more} <= {"resumed_from_saved_state"}, more
    assert [line for line in deviations if line in others] == others


def check_account(run: Path, service: ScriptedService) -> None:
    """All that was committed is counted, and nothing twice: no more than the service has answered."""
    rows = json.loads((run / "cost.json").read_bytes())["rows"]
    counted = {(row["role"], row["kind"]): row["tokens"] for row in rows}
    lines = [line for path in (run / "trajectories").glob("*.jsonl") for line in read_lines(path)]
    played = sum(sum(line["mask"]) for line in lines)
    judged = sum(answer["tokens"] for line in lines for answer in line["judge_answers"])
    for role, committed in (("policy", played), ("judge", judged)):
        model = service.models[("policy", "user", "judge").index(role)]
        seen = sum(call["sampled"] for call in service.samples if call["model"] == model)
        assert committed <= counted[role, "sampled"] <= seen, role
    passed = sum(len(datum.tokens) - 1 for update in service.updates for datum in update["data"])
    assert counted["policy", "trained"] <= passed


def test_killed_before_any_write(run_spec: Any, scripted: Any, mortal: None, tmp_path: Path) -> None:
    service, undisturbed = scripted(service_with_others()), tmp_path / "undisturbed"
    with process.watched(undisturbed) as whole:
        run_spec(brief(), output=undisturbed)
    check_account(undisturbed, service)
    writes = whole.writes
    wrong: list[str] = []
    for number in windows(writes):
        service, run = scripted(service_with_others()), tmp_path / f"run-{number}"
        try:
            with process.watched(run, number), contextlib.suppress(Killed):
                run_spec(brief(), output=run)
            assert len(process.writes) == number
            run_spec(brief(), output=run, resume=run.is_dir())
            check_same(run, undisturbed)
            check_account(run, service)
            check_left(service, run)
            PhaseChain(run).verify()
        except (AssertionError, ParityGateError) as error:
            wrong.append(f"before write {number}, {writes[number]}: {error}")
        else:
            shutil.rmtree(run, ignore_errors=True)
    assert not wrong, "\n".join(wrong)
