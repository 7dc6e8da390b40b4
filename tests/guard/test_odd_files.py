"""What is no plain file, too large, not to be read or not to be written, and readers that leave: one sentence each."""

import errno
import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paritygate.__main__ import COMMANDS
from paritygate.errors import Refused
from paritygate.receipts import PhaseChain, require_parity
from paritygate.receipts.parity import read_parity_receipt, write_parity_receipt
from paritygate.receipts.provenance import files_of
from paritygate.spec import SpecError, load
from paritygate.spec.strict import open_plain, read_plain
from tests.guard.small_tree import ROOT, Tree

NAME = f"parity-{'0' * 64}.json"


def make(kind: str, path: Path) -> None:
    """Something at `path` that is no plain file of a sensible size."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is at most about 100 bytes
        server.bind(path.name)
        os.chdir(here)
        server.close()
    elif kind == "folder":
        path.mkdir()
    elif kind == "30 GB":
        with path.open("wb") as file:
            file.truncate(30 * 2**30)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)


KINDS = ("fifo", "socket", "folder", "30 GB", "device", "loop")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_or_not_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "x")
    with pytest.raises(OSError, match=r"."):
        read_plain(tmp_path / "x")
    if kind != "30 GB":
        with pytest.raises(OSError, match=r"."):
            open_plain(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"12345678")
    assert read_plain(tmp_path / "y", most=8) == b"12345678"
    with pytest.raises(OSError, match="over 0 MiB"):
        read_plain(tmp_path / "y", most=7)


@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_good_receipt_it_hides_nothing(tree: Tree, kind: str) -> None:
    (receipt,) = tree.receipts()
    make(kind, receipt.with_name(NAME))
    assert require_parity(tree.root, ["toy", "other"], "cpu").path == receipt
    receipt.unlink()
    tree.refused_here(NAME)


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_of_the_spec_of_the_losses(tree: Tree, kind: str) -> None:
    (tree.root / "spec" / "losses.json").unlink()
    make(kind, tree.root / "spec" / "losses.json")
    tree.refused_here("spec/losses.json")
    if kind == "fifo":
        tree.check_refused("spec/losses.json")
        done = tree.python("-m", "pytest", "tests/parity", "-q")
        assert (done.returncode, "spec/losses.json cannot be read (not a plain file)" in done.stderr) == (4, True), done


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_in_a_run_directory(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    (run / "phases").mkdir(parents=True)
    make(kind, run / "x.jsonl")
    with pytest.raises(Refused, match=r"x.jsonl cannot be read \(not a plain file\)"):
        files_of(run)
    make(kind, run / "phases" / "01-design.json")
    with pytest.raises(
        Refused, match=r"01-design.json cannot be read \((not a plain file|No such device or address)\)"
    ):
        PhaseChain(run)


@pytest.mark.parametrize("kind", KINDS)
def test_as_an_experiment(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "spec.json")
    with pytest.raises(SpecError, match=r"cannot be read|larger than"):
        load(tmp_path / "spec.json")


def test_a_receipt_that_may_not_be_read(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    (receipt,) = tree.receipts()
    (receipt.with_name(NAME)).write_text("{}")
    true = os.open

    def forbidden(path: object, flags: int, *rest: int, **more: int) -> int:
        if str(path).endswith(NAME):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return true(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("paritygate.spec.strict.os.open", forbidden)
    assert require_parity(tree.root, ["toy"], "cpu").path == receipt
    receipt.unlink()
    tree.refused_here("cannot be read (Permission denied)")


# What cannot be written --------------------------------------------------------------------------------------------


def replaced(tree: Tree, kind: str) -> None:
    folder = tree.root / "receipts"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    if kind == "file":
        folder.write_text("not a folder")
    else:
        folder.symlink_to(tree.root / "nowhere" / "at all")


@pytest.mark.parametrize("kind", ["file", "broken link"])
def test_receipts_is_no_folder(tree: Tree, kind: str) -> None:
    statement = read_parity_receipt(tree.receipts()[0]).statement
    replaced(tree, kind)
    tree.refused_here("no parity receipt in")
    with pytest.raises(Refused, match=r"receipts/parity-.* cannot be written \("):
        write_parity_receipt(tree.root, statement)


def test_a_session_says_that_its_receipt_could_not_be_written(bare: Tree) -> None:
    replaced(bare, "file")
    output = bare.parity()
    assert "parity: NOT green, no receipt:" in output, output
    assert "cannot be written (" in output
    assert "Traceback" not in output
    assert "INTERNALERROR" not in output


def test_what_pytest_cannot_cache_is_no_failure(bare: Tree) -> None:
    """A checkout that is read only, say, whose receipt is there already: pytest warns, and parity holds."""
    (bare.root / ".pytest_cache").write_text("no folder")
    output = bare.parity()
    assert "parity: green, 4 obligations" in output, output
    assert "PytestCacheWarning" in output


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_nothing(tree: Tree, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    (receipt,) = tree.receipts()
    statement = read_parity_receipt(receipt).statement
    receipt.unlink()

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("paritygate.receipts.files.os.fsync", full)
    with pytest.raises(Refused, match=os.strerror(number)):
        write_parity_receipt(tree.root, statement)
    assert [path.name for path in receipt.parent.iterdir()] == ["README.md"]


# Readers that leave ------------------------------------------------------------------------------------------------


def shell(tree: Tree, text: str) -> "subprocess.CompletedProcess[str]":
    """The command under a shell whose exit code is that of the first process of a pipe."""
    script = f"set -o pipefail; P={sys.executable}; {text}"
    return subprocess.run(["bash", "-c", script], cwd=tree.root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("$P impl/verify.py --parity | true", 0, ""),
        ("$P impl/verify.py --parity >&-", 0, ""),
        ("$P impl/verify.py --parity > /dev/full", 2, "verify.py: the output cannot be written: No space left"),
        ("$P impl/verify.py --parity --device cuda:x", 2, "verify.py: --device cuda:x: cpu or cuda is expected"),
        ("rm receipts/*.json; $P impl/verify.py --parity 2> /dev/full", 3, ""),
        ("$P impl/verify.py $(printf 'a%.0s' $(seq 5000))", 2, f"verify.py: {'a' * 80} is no usable path: File name"),
    ],
)
def test_verify(tree: Tree, command: str, code: int, words: str) -> None:
    done = shell(tree, command)
    assert done.returncode == code, done
    assert done.stderr.startswith(words), done.stderr
    assert len(done.stderr.splitlines()) == bool(words), done.stderr


SYNTHETIC = f"$P {ROOT}/impl/run.py --spec {ROOT}/spec/spod.json"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (f"{SYNTHETIC} --check | head -n 1", 0, ""),
        (f"{SYNTHETIC} --check > /dev/full", 2, "run.py: the output cannot be written: No space left"),
        (f"{SYNTHETIC} --device cuda:x --output x.json", 2, "run.py: --device cuda:x: cpu or cuda is expected"),
        (f"$P {ROOT}/impl/run.py --help > /dev/full", 2, "run.py: the output cannot be written: No space left"),
        (f"$P {ROOT}/impl/run.py --help | true", 0, ""),
    ],
)
def test_run(bare: Tree, command: str, code: int, words: str) -> None:
    done = shell(bare, command)
    assert done.returncode == code, done
    assert done.stderr.startswith(words), done.stderr
    assert len(done.stderr.splitlines()) == bool(words), done.stderr


@pytest.mark.parametrize(
    "module", ["__main__", *(f"{name}.__main__" for name in COMMANDS if name != "verify"), "retail.fetch"]
)
def test_help_of_every_command(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    main = importlib.import_module(f"paritygate.{module}").main
    for path, code, lines in (("/dev/full", 2, 1), ("/dev/null", 0, 0)):
        with open(path, "w") as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            try:
                done = main(["--help"])
            except SystemExit as left:
                done = left.code or 0
        written = capsys.readouterr().err
        assert (done, len(written.splitlines())) == (code, lines), written
        assert not lines or "the output cannot be written: No space left on device." in written


def test_the_server_cannot_say_where_it_is() -> None:
    command = "$P -m paritygate.server --model tiny > /dev/full"
    script = f"P={sys.executable}; {command}"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "impl")}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "paritygate.server: the output cannot be written: No space left on device.\n",
    )
