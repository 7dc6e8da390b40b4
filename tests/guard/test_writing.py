"""Writing and locking: a receipt is whole or not there, whenever the writer dies; one run in a directory at a time."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import Refused
from paritygate.receipts import (
    PhaseChain,
    canonical,
    lock_run,
    read_parity_receipt,
    sha256_file,
    write_atomic,
)
from paritygate.receipts.parity import write_parity_receipt
from tests.counts import soak
from tests.guard.small_tree import ROOT, Tree


class Killed(BaseException):
    """Stands for the death of the process: nothing of ours catches it, and no clean-up that we wrote counts."""


class FaultyFiles:
    """The file layer of `write_atomic`, dying at its n-th operation: after it, nothing touches the disk any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deadline: int, torn: int) -> None:
        self.left, self.torn, self.dead = deadline, torn, False
        for name in ("fsync", "link", "replace", "unlink", "open", "close"):
            monkeypatch.setattr(f"paritygate.receipts.files.os.{name}", self.step(getattr(os, name)))
        monkeypatch.setattr("paritygate.receipts.files.open", self.open, raising=False)

    def tick(self) -> None:
        """One more operation; raises Killed at the deadline and ever after."""
        self.left -= 1
        self.dead |= self.left < 0
        if self.dead:
            raise Killed

    def step(self, function):
        def stepped(*arguments):
            self.tick()
            return function(*arguments)

        return stepped

    def open(self, path: Path, mode: str) -> "TornFile":
        self.tick()
        return TornFile(open(path, mode, buffering=0), self)


class TornFile:
    """A file whose write, when the process dies in it, leaves the first `torn` bytes."""

    def __init__(self, file: Any, layer: FaultyFiles) -> None:
        self.file, self.layer = file, layer
        self.flush, self.fileno = file.flush, file.fileno

    def __enter__(self) -> "TornFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> None:
        if self.layer.left == 0:
            self.file.write(data[: self.layer.torn])
        self.layer.tick()
        self.file.write(data)


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_death_at_every_operation_leaves_nothing_or_the_whole(tmp_path: Path, exclusive: bool) -> None:
    old, new = b"" if exclusive else b"old" * 100, b"new" * 1000
    finished, seen = False, set()
    for deadline in range(40):
        path = tmp_path / str(deadline) / "file.json"
        path.parent.mkdir()
        if old:
            path.write_bytes(old)
        with pytest.MonkeyPatch.context() as patch:
            files = FaultyFiles(patch, deadline, torn=7 * deadline)
            with contextlib.suppress(Killed):
                write_atomic(path, new, exclusive=exclusive)
            finished = not files.dead
        content = path.read_bytes() if path.exists() else b""
        assert content in (old, new), deadline
        seen.add(content == new)
        if finished:
            break
    assert finished
    assert seen == {False, True}


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from paritygate.receipts.parity import write_parity_receipt
from pathlib import Path
import json
statement = json.loads(Path(sys.argv[3]).read_bytes())
print("ready", flush=True)
for number in range(10**9):
    statement["predicate"]["configuration"][3]["annotations"]["tests"] = number + 1
    write_parity_receipt(Path(sys.argv[2]), statement)
"""


def test_a_kill_at_any_moment_leaves_no_receipt_or_whole_ones(tree: Tree, tmp_path: Path) -> None:
    """A process that writes one receipt after another is killed: every receipt there is named by its own digest."""
    rng = random.Random(0)
    (receipt,) = tree.receipts()
    for round_ in range(soak(quick=8, full=100)):
        root = tmp_path / f"round{round_}"
        command = [sys.executable, "-c", WRITER, str(ROOT / "impl"), str(root), str(receipt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.05))
            writer.send_signal(signal.SIGKILL)
        for path in root.glob("receipts/*"):
            assert path.name.startswith("parity-") or path.name.endswith(".tmp")
            if path.name.endswith(".json"):
                assert path.name == f"parity-{sha256_file(path)}.json"


def test_a_half_written_file_is_no_receipt(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    receipt.with_name(f".{receipt.name}.0123.tmp").write_bytes(receipt.read_bytes()[:100])
    tree.accepted()


def test_writing_the_same_receipt_twice_is_one_receipt(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    assert write_parity_receipt(tree.root, read_parity_receipt(receipt).statement) == receipt
    assert tree.receipts() == [receipt]


def test_exclusive_creation(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"1", exclusive=True)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "a", b"2", exclusive=True)
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_phase_is_appended_once(tmp_path: Path) -> None:
    one, other = PhaseChain(tmp_path), PhaseChain(tmp_path)
    one.append("train", {"by": "one"})
    with pytest.raises(FileExistsError):
        other.append("train", {"by": "other"})
    assert PhaseChain(tmp_path).record("train") == {"by": "one"}


def test_canonical_json() -> None:
    assert canonical({"b": 1.0, "a": [1e21, 0.1, "é"]}) == '{"a":[1e+21,0.1,"é"],"b":1}'.encode()
    for value in (float("nan"), float("inf"), 2**53):
        with pytest.raises(ValueError):
            canonical(value)


# 13: two runs in one directory --------------------------------------------------------------------------------------

RUNNER = """
import sys
sys.path.insert(0, sys.argv[1])
from paritygate.errors import ParityGateError
from paritygate.receipts import lock_run
try:
    with lock_run(sys.argv[2]):
        print("runs", flush=True)
        sys.stdin.readline()
except ParityGateError as error:
    print(error, flush=True)
    raise SystemExit(error.exit_code)
"""


def start(run_dir: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", RUNNER, str(ROOT / "impl"), str(run_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_runs_started_at_once(tmp_path: Path) -> None:
    for round_ in range(soak(quick=2, full=20)):
        processes = [start(tmp_path / f"run{round_}") for _ in range(2)]
        lines = [process.stdout.readline() for process in processes if process.stdout]
        outputs = [process.communicate("\n")[0] for process in processes]
        assert sorted(process.returncode for process in processes) == [0, 3], (lines, outputs)
        assert sorted(line == "runs\n" for line in lines) == [False, True]
        assert any("another run is at work" in line for line in lines)


def test_a_killed_run_lets_go_and_its_half_written_files_are_removed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(run_dir) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        with pytest.raises(Refused, match="another run is at work"), lock_run(run_dir):
            pass
        process.kill()
    (run_dir / "phases").mkdir()
    (run_dir / "phases" / ".01-train.json.0123.tmp").write_bytes(b"{")
    with lock_run(run_dir):
        assert PhaseChain(run_dir).completed == []
        assert list((run_dir / "phases").iterdir()) == []
