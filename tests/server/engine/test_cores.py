"""Servers share a machine's cores: a busy one alone has all, two have half each, whichever way one of them ends."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paritygate.server.engine.cores import MOST, SharedCores, cores_of_this_process

OTHER = """
import sys, pathlib
from paritygate.server.engine.cores import SharedCores
cores = SharedCores(pathlib.Path(sys.argv[1]), 4)
for line in sys.stdin:
    print(cores.share() if line == "share\\n" else cores.rest(), flush=True)
"""


class Other:
    """Another server's process, which does as it is told."""

    def __init__(self, file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip

    def tell(self, word: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    other = Other(tmp_path / "cores")
    yield other
    other.process.kill()
    other.process.communicate()


def test_busy_servers_divide_the_cores(tmp_path: Path, other: Other) -> None:
    cores = SharedCores(tmp_path / "cores", 4)
    assert cores.share() == 4
    assert other.tell("share") == "2"
    assert cores.share() == 2
    other.tell("rest")
    assert cores.share() == 4
    cores.rest()
    assert other.tell("share") == "4"  # one that is idle counts for nothing
    assert cores.share() == 2


def test_a_killed_server_keeps_no_core(tmp_path: Path, other: Other) -> None:
    cores = SharedCores(tmp_path / "cores", 2)
    other.tell("share")
    assert cores.share() == 1
    other.process.kill()
    other.process.wait()
    assert cores.share() == 2


def test_more_busy_servers_than_cores_have_one_each(tmp_path: Path, other: Other) -> None:
    third = Other(tmp_path / "cores")
    cores = SharedCores(tmp_path / "cores", 2)
    assert [other.tell("share"), third.tell("share"), str(cores.share())] == ["4", "2", "1"]
    third.process.kill()
    third.process.communicate()


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "no folder"])
def test_no_file_to_share_is_one_core(tmp_path: Path, kind: str) -> None:
    """Nothing is written through another's link, and nothing waits."""
    file = tmp_path / "cores"
    if kind == "link":
        (tmp_path / "victim").write_bytes(b"x")
        file.symlink_to(tmp_path / "victim")
    elif kind == "folder":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file = tmp_path / "missing" / "cores"
    assert SharedCores(file, 4).share() == 1


def test_a_server_takes_no_more_than_there_are(tmp_path: Path) -> None:
    assert SharedCores(tmp_path / "cores").share() == min(MOST, cores_of_this_process())
    assert SharedCores(tmp_path / "cores", 64).share() == MOST
