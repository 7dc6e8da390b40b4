"""Kind 17: what the caller's environment carries (GIT_DIR in a hook, a key) reaches no test and no tool of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paritygate.receipts.parity import read_parity_receipt
from tests.guard.small_tree import ROOT, Tree

GIT = ["git", "-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]


class Victim:
    """Somebody's repository with one commit: `environment` is what a hook in it would be run with."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        (root / "thesis.tex").write_text("years of work")
        for arguments in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "years of work"]):
            subprocess.run([*GIT, *arguments], cwd=root, check=True, capture_output=True)
        self.environment = {
            "GIT_DIR": str(root / ".git"),
            "GIT_WORK_TREE": str(root),
            "GIT_INDEX_FILE": str(root / ".git" / "index"),
            "GIT_PREFIX": "",
        }
        self.commit = self.head()
        self.before = self.bytes()

    def head(self) -> str:
        command = ["git", "-C", str(self.root), "rev-parse", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def bytes(self) -> dict[str, bytes]:
        """Every file of the repository, those under .git included."""
        files = sorted(path for path in self.root.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in files}

    def untouched(self) -> None:
        now = self.bytes()
        changed = sorted(name for name in now.keys() | self.before.keys() if now.get(name) != self.before.get(name))
        assert changed == []


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path / "victim")


def session(*arguments: str, **environment: str) -> str:
    """Output of a pytest session of the real tree, in which the tests named pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    return done.stdout


COMMITTING = (
    "tests/guard/test_changed_files.py::test_no_receipt",
    "tests/retail/test_fetch.py::test_other_data_is_refused_and_nothing_is_left",
)


@pytest.mark.parametrize("test", COMMITTING)
def test_a_suite_run_by_a_hook_leaves_its_repository_untouched(victim: Victim, test: str) -> None:
    session(test, **victim.environment)
    victim.untouched()


def test_a_proof_and_a_full_run_in_a_hook_are_of_their_own_repository(bare: Tree, victim: Victim) -> None:
    output = bare.parity(**victim.environment)
    assert "parity: green, 4 obligations" in output, output
    (receipt,) = bare.receipts()
    commit = bare.git("rev-parse", "HEAD").strip()
    assert commit != victim.commit
    assert read_parity_receipt(receipt).part("session")["commit"] == commit
    done = bare.run("--service", **victim.environment)
    assert (done.returncode, "ran 4.0" in done.stdout) == (0, True), done
    assert [read_parity_receipt(path).part("session")["commit"] for path in bare.receipts()] == [commit] * 2
    victim.untouched()


def test_a_tree_inside_somebody_s_repository_is_not_at_that_commit(bare: Tree, victim: Victim) -> None:
    (bare.root / ".git").rename(victim.root.parent / "git")
    inner = bare.copy(victim.root / "vendored")
    assert "parity: green" in inner.parity()
    assert read_parity_receipt(inner.receipts()[0]).part("session")["commit"] is None
    assert read_parity_receipt(inner.receipts()[0]).part("session")["dirty"] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to somebody else")
def test_the_commit_of_a_checkout_that_somebody_else_owns_is_recorded(bare: Tree) -> None:
    commit = bare.git("rev-parse", "HEAD").strip()
    for path in [bare.root, *bare.root.rglob("*")]:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    assert "parity: green" in bare.parity()
    assert read_parity_receipt(bare.receipts()[0]).part("session")["commit"] == commit


INHERITING = """
import os

def test_it():
    named = [name for name in os.environ if name.startswith(("GIT_", "TINKER_", "PYTEST_ADDOPTS"))]
    assert named == ["TINKER_TELEMETRY"]
"""


def test_no_key_and_no_option_of_the_caller_reaches_a_test(bare: Tree) -> None:
    (bare.root / "tests" / "test_it.py").write_text(INHERITING)
    service = {"TINKER_BASE_URL": "http://127.0.0.1:9", "TINKER_API_KEY": "tml-x", "TINKER_CREDENTIAL_CMD": "false"}
    done = bare.python("-m", "pytest", "-q", "tests/test_it.py", PYTEST_ADDOPTS="-q", GIT_EDITOR="false", **service)
    assert done.returncode == 0, done.stdout


def test_every_git_of_ours_is_started_in_one_place() -> None:
    """A list that starts with "git" is a command: receipts/git.py and this file alone have one."""
    files = [path for folder in ("impl", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    starting = {path.relative_to(ROOT).as_posix() for path in files if '["git"' in path.read_text("utf-8")}
    assert starting == {"impl/paritygate/receipts/git.py", "tests/guard/test_inherited.py"}
