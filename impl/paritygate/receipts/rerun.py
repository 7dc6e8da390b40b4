"""Parity shown again: in a clean worktree of the commit, with a scrubbed environment."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

from paritygate.bootstrap import watch, watched
from paritygate.errors import Refused
from paritygate.receipts.environment import SETTINGS
from paritygate.receipts.files import write_atomic
from paritygate.receipts.git import git
from paritygate.receipts.parity import NAME, ParityReceipt, read_parity_receipt
from paritygate.receipts.subjects import difference, subjects
from paritygate.spec.losses import load_losses
from paritygate.spec.project import project_at

KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "CUDA_VISIBLE_DEVICES")
"""What a process needs to find anything."""
DECIDES = (
    *("CXX", "PARITYGATE_KERNELS", "PARITYGATE_BFLOAT16", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", *SETTINGS),
)
"""What decides the numbers of the run that asks, and so has to be the same; nothing else of its environment is seen."""


def rerun_parity(root: Path | str, receipt: ParityReceipt, device: str) -> ParityReceipt:
    """Run `pytest tests/parity` for the commit at `root` and return the receipt that it wrote, now in receipts/.

    The worktree is clean and somewhere else, plugins are not loaded, of the environment only KEPT and DECIDES are seen.
    Raises Refused when the tree differs from the commit, the re-run is not green, or `receipt` tells otherwise.
    """
    root = Path(root).resolve()
    with tempfile.TemporaryDirectory(prefix="paritygate-") as scratch:
        home = Path(scratch) / "home"
        home.mkdir()
        scrubbed = {name: os.environ[name] for name in (*KEPT, *DECIDES) if name in os.environ}
        scrubbed |= {"HOME": str(home), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        with clean_worktree(root, Path(scratch) / "tree", scrubbed) as tree:
            if change := difference(subjects(tree), subjects(root)):
                raise Refused(f"{change} since the last commit: a full run shows parity of a commit; commit it first.")
            fresh = run_parity(tree, device, receipt, scrubbed)
            compare_receipts(receipt, fresh)
            path = root / project_at(root).receipts / fresh.path.name
            if not path.exists():
                write_atomic(path, fresh.path.read_bytes())
            return read_parity_receipt(path)


@contextlib.contextmanager
def clean_worktree(root: Path, tree: Path, environment: dict[str, str]) -> Generator[Path]:
    """A worktree of HEAD at `tree`, without hooks, removed at the end; raises Refused where git cannot make one."""
    try:
        git(root, "worktree", "add", "--detach", str(tree), "HEAD", inherited=environment, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise Refused(f"{root} gives no clean git worktree ({reason}): a full run shows parity of a commit.") from error
    try:
        yield tree
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            git(root, "worktree", "remove", "--force", str(tree), inherited=environment)


def run_parity(tree: Path, device: str, claimed: ParityReceipt, environment: dict[str, str]) -> ParityReceipt:
    """The receipt of a session in `tree` for the losses of `claimed`; raises Refused, with its words, if not green."""
    project, seed = project_at(tree), claimed.part("hypothesis")["seed"]
    shown = {name.partition("/")[0] for name in claimed.part("obligations")}
    command = [sys.executable, "-I", "-m", "pytest", project.tests, "-q", "-x", "--device", device]
    command += ["-c", str(tree / "pyproject.toml"), "--rootdir", str(tree), "-p", "no:cacheprovider"]
    if "paritygate" not in project.homes:
        command += ["-p", "paritygate_pytest"]  # here tests/conftest.py registers it
    if shown != set(load_losses(tree)["losses"]):
        command += ["--losses", ",".join(sorted(shown))]
    if seed is not None:
        command += ["-p", "_hypothesis_pytestplugin", f"--hypothesis-seed={seed}"]
    committed = set(tree.glob(f"{project.receipts}/parity-*.json"))
    with watch() as stdin:
        done = subprocess.run(
            watched(*command), cwd=tree, env=environment, stdin=stdin, capture_output=True, text=True, check=False
        )
    written = [path for path in tree.glob(f"{project.receipts}/parity-*.json") if NAME.fullmatch(path.name)]
    named = [path for path in written if path.name in done.stdout]
    if done.returncode != 0 or len(named) != 1 or named[0] in committed:
        lines = [line for line in done.stdout.splitlines() if "NOT green" in line] or (
            done.stdout + done.stderr
        ).splitlines()
        raise Refused(
            f"parity, run again in a clean worktree, is not green ({lines[-1].strip() if lines else 'no output'})."
        )
    return read_parity_receipt(named[0])


def compare_receipts(claimed: ParityReceipt, fresh: ParityReceipt) -> None:
    """Raise Refused when `claimed` tells of other files, another machine or other comparisons than the re-run found."""
    forged = f"{claimed.path.name} does not tell what a parity run finds"
    if change := difference(claimed.subjects, fresh.subjects):
        raise Refused(f"{forged}: {change}.")
    for part in ("environment", "installed", "hypothesis"):
        for key, value in fresh.part(part).items():
            stated = claimed.part(part).get(key)
            if stated != value and key != "threads":
                raise Refused(f"{forged}: {key} is {stated} in it and {value} when run again.")
    stated, shown = claimed.part("obligations"), fresh.part("obligations")
    for name in sorted(stated.keys() | shown.keys()):
        counts = [part[name]["comparisons"] if name in part else 0 for part in (stated, shown)]
        if counts[0] != counts[1]:
            raise Refused(f"{forged}: {name} has {counts[0]} comparisons in it and {counts[1]} when run again.")
