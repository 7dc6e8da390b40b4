"""A disk that is full in the middle of a run: a sentence with the file that was not written, and --resume goes on.

As in test_killed_anywhere, an audit hook sees every write; from the chosen one on, none has room, removals aside.
"""

import contextlib
import errno
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import BadInputError, ParityGateError
from paritygate.experiment.run.directory import kept_where_there_is_no_room
from paritygate.experiment.run.journal import append_line, read_lines
from paritygate.receipts import write_atomic
from paritygate.service import report as reports
from tests.counts import SOAK
from tests.experiment import test_killed_anywhere as killed
from tests.experiment.scaled_spec import brief
from tests.experiment.test_left_as_found import check_left, service_with_others

mortal = killed.mortal
FULL = r"cannot be written: No space left on device. The run is kept as it was before; where there is room, --resume"
QUICK = ("timings.jsonl", "/units/train-sdpo_token/step-001.json")


@contextlib.contextmanager
def room_for(size: int) -> Any:
    """No file can grow beyond so many bytes: a write is cut there, and the next one fails, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_line_without_room_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """Half a line would be in the middle of the file once there is room again, and the run could not be read."""
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"first": "x" * 100})
    before = path.read_bytes()
    with room_for(len(before) + 50), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as error:
        append_line(path, {"second": "y" * 100})
    assert error.value.filename == str(path)
    assert path.read_bytes() == before
    append_line(path, {"third": 3})
    assert read_lines(path) == [{"first": "x" * 100}, {"third": 3}]


def test_a_file_without_room_is_not_there_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "unit.json"
    with room_for(50), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as error:
        write_atomic(path, b"x" * 100)
    assert error.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_a_proof_without_room_is_gone_on_with_as_well(tmp_path: Path) -> None:
    """It is written by a module that is used without a run too."""
    path = tmp_path / "service-proof.json"
    says = pytest.raises(BadInputError, match=rf"^{path} cannot be written: .*--resume goes on\.$")
    with room_for(50), says, kept_where_there_is_no_room():
        reports.write(path, "x" * 100)
    assert not path.exists()
    with pytest.raises(BadInputError, match=r"^another$"), kept_where_there_is_no_room():
        raise BadInputError("another")


def moments(writes: list[str]) -> list[int]:
    """Before which writes the disk is full: in a soak all, else the first after training began of each kind.

    Not before the run's folder is made, which says so, nor before what only removes.
    """
    began = next(n for n, write in enumerate(writes) if "/units/train-grpo" in write)
    firsts = [next(n for n, write in enumerate(writes) if n > began and kind in write) for kind in QUICK]
    every = [n for n, write in enumerate(writes) if n and write.split()[0] not in killed.REMOVALS]
    return every if SOAK else sorted(set(firsts))


@pytest.mark.usefixtures("lean", "mortal")
def test_a_full_disk_anywhere_is_one_sentence_and_gone_on_with(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    scripted(service_with_others())
    undisturbed = tmp_path / "undisturbed"
    with killed.process.watched(undisturbed) as whole:
        run_spec(brief(), output=undisturbed)
    writes, wrong = whole.writes, []
    for number in moments(writes):
        service, run = scripted(service_with_others()), tmp_path / f"run-{number}"
        try:
            with killed.process.watched(run, number, full=True), pytest.raises(BadInputError) as error:
                run_spec(brief(), output=run)
            assert re.fullmatch(rf"{re.escape(str(run))}\S* {FULL} goes on\.", str(error.value)), error.value
            run_spec(brief(), output=run, resume=run.is_dir())
            killed.check_same(run, undisturbed)
            killed.check_account(run, service)
            check_left(service, run)
        except (AssertionError, ParityGateError) as error:
            wrong.append(f"at write {number}, {writes[number]}: {error}")
    assert not wrong, "\n".join(wrong)
