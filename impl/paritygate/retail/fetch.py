"""`make data`: fill a folder with tau-bench retail, from a folder or from upstream's repository at the pinned commit.

Upstream's tasks, rules and tools are Python files: they are read as literals and never imported or executed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paritygate.bootstrap import Parser, exit_code
from paritygate.receipts.git import git
from paritygate.retail import layout
from paritygate.retail.errors import DataError
from paritygate.retail.source import BESIDE, ROOT, checked, write
from paritygate.spec.pins import TAU_BENCH

REPOSITORY = f"https://github.com/{TAU_BENCH.source}.git"
CLONE_TIMEOUT_SECONDS = 600
_OURS = frozenset(
    [*(f"{table}.json{packed}" for table in layout.TABLES for packed in ("", ".gz")), "LICENSE", "transcripts"]
    + [f"retail_tasks_{split}.json" for split in layout.SPLITS]
    + ["wiki.md", "rules.json", "tools_info.json"]
)


def fetch(origin: str, to: Path, *, revision: str = TAU_BENCH.revision) -> str:
    """Fill the folder `to` from `origin`, a folder of either layout or a git repository, and say so in a line.

    The data is checked against the pinned digests before `to` appears; data that is already there and right is left
    alone. Raises DataError.
    """
    if to.is_dir() and any(to.iterdir()):
        try:
            checked(layout.read(to), folder=to, place=str(to))
            return f"{to} already holds tau-bench retail at {TAU_BENCH.revision[:8]}."
        except DataError:
            _refuse_others(to)
    try:
        with tempfile.TemporaryDirectory(prefix="tau-bench-") as name:
            fetched = Path(name)
            _fill(origin, fetched, revision)
            checked(layout.read(fetched), folder=Path(origin), place=origin)
            _put(fetched, to)
    except OSError as error:
        raise DataError(f"{to}: cannot be written ({error})") from error
    return f"{to} holds tau-bench retail at {TAU_BENCH.revision[:8]}, from {origin}."


def _put(fetched: Path, to: Path) -> None:
    """Make `to` a copy of `fetched` that appears whole or not at all."""
    to.parent.mkdir(parents=True, exist_ok=True)
    beside = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        shutil.copytree(fetched, beside)
        if to.exists():
            shutil.rmtree(to)
        beside.rename(to)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _refuse_others(to: Path) -> None:
    others = sorted(path.name for path in to.iterdir() if path.name not in _OURS)
    if others:
        raise DataError(f"{to}: holds {others[0]!r}, which is no tau-bench data: name another folder with --to")


def _fill(origin: str, filled: Path, revision: str) -> None:
    folder = Path(origin)
    if not folder.is_dir() or (folder / ".git").exists() or (folder / "HEAD").is_file():
        with tempfile.TemporaryDirectory(prefix="tau-bench-clone-") as name:
            _clone(origin, Path(name), revision)
            _from_folder(Path(name), filled)
    else:
        _from_folder(folder, filled)


def _from_folder(folder: Path, filled: Path) -> None:
    """Copy the JSON layout as it is; write upstream's layout (a checkout or its retail folder) as JSON."""
    if (folder / "tools_info.json").exists():
        for name in sorted(_OURS):
            for source in sorted((folder / name).iterdir()) if (folder / name).is_dir() else [folder / name]:
                if source.is_file():
                    target = filled / source.relative_to(folder)
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(source, target)  # the bytes only: the origin may be read-only
        return
    retail = folder / layout.UPSTREAM_FOLDER
    write(layout.read(retail if retail.is_dir() else folder), filled)
    if (folder / "LICENSE").exists():
        shutil.copyfile(folder / "LICENSE", filled / "LICENSE")


def _clone(url: str, to: Path, revision: str) -> None:
    """Check out the retail folder of one commit; its other files, some large, are not asked for."""
    _git(to, "init", "--quiet")
    _git(to, "remote", "add", "origin", url)
    _git(to, "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", revision)
    _git(to, "checkout", "--quiet", revision, "--", str(layout.UPSTREAM_FOLDER), "LICENSE")


def _git(folder: Path, *arguments: str) -> None:
    """Run git in a fresh repository of ours, asking nobody for a password; DataError with git's own last line."""
    advice = "name a folder that has the data, or another repository, with --from"
    try:
        git(folder, *arguments, timeout=CLONE_TIMEOUT_SECONDS)
    except FileNotFoundError as error:
        raise DataError(f"git is not installed, so tau-bench cannot be cloned: {advice}") from error
    except subprocess.TimeoutExpired as error:
        raise DataError(f"git {arguments[0]} took over {CLONE_TIMEOUT_SECONDS} s: {advice}") from error
    except subprocess.CalledProcessError as error:
        stderr_lines = str(error.stderr).strip().splitlines() or ["no message"]
        raise DataError(f"git {arguments[0]} failed ({stderr_lines[-1]}): {advice}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, fetch, and give the exit code: 0, or 2 with one sentence."""
    parser = Parser(prog="python -m paritygate.retail.fetch", description=__doc__)
    parser.add_argument(
        "--from", dest="origin", metavar="DIR|GIT_URL", help="default: beside the checkout, else GitHub"
    )
    parser.add_argument("--to", type=Path, default=ROOT / "data" / "tau_bench_retail", metavar="DIR")
    parser.add_argument("--revision", default=TAU_BENCH.revision, help="commit of a repository that mirrors the pinned")
    options = parser.parse_args(arguments)
    origin = options.origin or (str(BESIDE) if BESIDE.is_dir() else REPOSITORY)
    print(f"tau-bench retail from {origin} ...", file=sys.stderr)
    return exit_code("error", lambda: str(fetch(origin, options.to, revision=options.revision)))


if __name__ == "__main__":
    sys.exit(main())
