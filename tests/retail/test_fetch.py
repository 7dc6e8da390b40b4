"""`make data` from a folder and from a git repository of upstream's layout, whose Python is read and never run."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paritygate import retail
from paritygate.retail import fetch, layout, source
from tests.retail.upstream_layout import RETAIL, git, write_repository

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "orders": {"#W1": {"order_id": "#W1", "status": "pending"}},
    "products": {"1": {"name": "Lamp", "variants": {}}},
    "users": {"a_b_1": {"email": "a@example.com"}},
    "tasks/train": [
        {
            "user_id": "a_b_1",
            "instruction": 'Say "it\'s" – done.',
            "actions": [{"name": "think", "kwargs": {"thought": ["x", 1, None, True, -2.5]}}],
            "outputs": ["10"],
        }
    ],
    "tasks/dev": [],
    "tasks/test": [{"user_id": "a_b_1", "instruction": "", "actions": [], "outputs": []}],
    "wiki": "# Policy\n\nBe – kind.\n",
    "rules": ["One.", "Two."],
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("think_hard", "calculate")
    ],
}
POISON = "import os, pathlib; pathlib.Path(os.environ['POISON']).write_text('ran'); raise SystemExit('executed')"


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pins of the real data set aside: the small repositories here are not tau-bench."""
    monkeypatch.setattr(source, "TAU_BENCH_PARTS_SHA256", {})
    small = retail.Source(SMALL, folder=Path(), place="")
    monkeypatch.setattr(source, "TAU_BENCH_DATABASE_SHA256", small.initial_hash)


@pytest.mark.usefixtures("trusting")
def test_a_repository_is_read_and_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISON", str(tmp_path / "ran"))
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    revision = write_repository(upstream, SMALL, poison=POISON)
    (upstream / RETAIL / "wiki.md").write_text("later", encoding="utf-8")
    git(upstream, "-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "--quiet", "-am", "later")
    to = tmp_path / "data" / "tau"
    summary = fetch.fetch(str(upstream), to, revision=revision)
    assert str(upstream) in summary
    assert layout.read(to) == SMALL
    assert list(layout.read(to)["tools"][0]["function"]) == ["name", "parameters"]
    assert (to / "LICENSE").read_text(encoding="utf-8") == "MIT License\n"
    assert not (tmp_path / "ran").exists()
    assert [path.name for path in to.parent.iterdir()] == ["tau"]
    assert "already holds" in fetch.fetch("nowhere", to)
    (to / "wiki.md").write_text("broken", encoding="utf-8")
    url = upstream.as_uri()
    (to / "rules.json").unlink()
    fetch.fetch(url, to, revision=revision)
    assert layout.read(to) == SMALL


@pytest.mark.usefixtures("trusting")
def test_a_checkout_and_its_retail_folder_are_read_without_git(tmp_path: Path) -> None:
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    write_repository(upstream, SMALL)
    shutil.rmtree(upstream / ".git")
    for place, folder in enumerate((upstream, upstream / RETAIL)):
        fetch.fetch(str(folder), tmp_path / str(place))
        assert layout.read(tmp_path / str(place)) == SMALL


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize(
    ("path", "text", "sentence"),
    [
        ("tasks_dev.py", "TASKS_DEV = load()", r"tasks_dev.py:1: .* is no literal"),
        ("tasks_dev.py", "TASKS_DEV = 3", r"tasks_dev.py: int, not a list of tasks"),
        ("tasks_dev.py", "TASKS_DEV = [Task(user_id=os.getenv('HOME'))]", r"tasks_dev.py:1: .*getenv.* is no literal"),
        ("tasks_dev.py", "TASKS_DEV = [x for x in ()]", r"tasks_dev.py:1: .* is no literal"),
        ("tasks_dev.py", "TASKS_DEV = [Task(user_id='a')]", r"tasks_dev.py: a task without the field 'instruction'"),
        ("tasks_dev.py", "TASKS = []", r"tasks_dev.py: nothing is assigned to TASKS_DEV"),
        ("tasks_dev.py", "def", r"tasks_dev.py: not Python source"),
        ("rules.py", "RULES = ['a'] + OTHER", r"rules.py:1: .* is no literal"),
        ("tools/__init__.py", "", r"no list of tools"),
        ("tools/__init__.py", "ALL_TOOLS = [Gone]", r"Gone.* is imported from no module"),
        ("tools/think_hard.py", "x = 1", r"think_hard.py: no get_info"),
    ],
)
def test_source_that_is_no_literal_is_named(tmp_path: Path, path: str, text: str, sentence: str) -> None:
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    write_repository(upstream, SMALL)
    (upstream / RETAIL / path).write_text(text, encoding="utf-8")
    with pytest.raises(retail.DataError, match=sentence):
        fetch.fetch(str(upstream / RETAIL), tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_other_data_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    revision = write_repository(upstream, SMALL)
    with pytest.raises(retail.DataError, match="orders is not tau-bench's at 59a200c6"):
        fetch.fetch(str(upstream), tmp_path / "to", revision=revision)
    with pytest.raises(retail.DataError, match=r"git fetch failed \(.*\): name a folder"):
        fetch.fetch(str(upstream), tmp_path / "to")  # the pinned commit is not in it
    with pytest.raises(retail.DataError, match=r"git fetch failed \(.*\): name a folder"):
        fetch.fetch(str(tmp_path / "nowhere"), tmp_path / "new" / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["upstream"]  # not even the parent of `to`


@pytest.mark.usefixtures("trusting")
def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    write_repository(upstream, SMALL)

    def full(_origin: Path, to: Path) -> None:
        to.mkdir()
        (to / "orders.json").write_text("{", encoding="utf-8")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(retail.DataError, match=r"cannot be written .*No space left"):
        fetch.fetch(str(upstream / RETAIL), tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["upstream"]


def test_a_folder_with_other_things_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(retail.DataError, match=r"'thesis.tex', which is no tau-bench data"):
        fetch.fetch("nowhere", tmp_path / "to")
    assert (tmp_path / "to" / "thesis.tex").exists()


def test_the_real_data_from_its_folder_and_from_a_repository(tau_bench_dir: Path, tmp_path: Path) -> None:
    parts = layout.read(tau_bench_dir)
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    revision = write_repository(upstream, parts)
    for place, origin in enumerate((str(upstream), str(tau_bench_dir))):
        to = tmp_path / str(place)
        fetch.fetch(origin, to, revision=revision)
        assert retail.load(to).digests == retail.load(tau_bench_dir).digests
        assert (to / "LICENSE").exists()
        assert all(path.stat().st_mode & 0o200 for path in to.rglob("*"))  # whatever the modes of the origin


def test_the_command_line(tau_bench_dir: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paritygate.retail.fetch", *arguments]
        environment = {"PYTHONPATH": str(ROOT / "impl"), "PATH": ""}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = run("--from", str(tau_bench_dir), "--to", "here")
    assert (done.returncode, done.stdout[:4]) == (0, "here")
    assert json.loads((tmp_path / "here" / "rules.json").read_text(encoding="utf-8"))
    failed = run("--from", "https://127.0.0.1:9/x.git", "--to", "there")
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 2
    assert "git is not installed" in failed.stderr
    assert not (tmp_path / "there").exists()
