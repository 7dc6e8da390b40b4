"""Mutants of losses: named mistakes that a parity session has to notice by the obligation that they name."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paritygate.errors import BadInputError
from paritygate.harness.pieces import mutants_folder
from paritygate.spec.losses import load_losses
from paritygate.spec.project import Project

Edit = tuple[str, str, str]  # file, the text that stands there once, the text of the mistake


class Mutant(NamedTuple):
    """A mistake (`why` says where it was made), and what it dies by.

    `dies_by` is an obligation of the spec ("gspo/value"). `file` is relative to the repository's root. `also` holds
    further edits that belong to the same mistake.
    """

    name: str
    why: str
    dies_by: str
    file: str
    old: str
    new: str
    also: tuple[Edit, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits, the first one first."""
        return ((self.file, self.old, self.new), *self.also)


def mutants_of(project: Project) -> Iterator[Mutant]:
    """Those of every file in the folder of mutants; raises BadInputError for a file without MUTANTS."""
    for path in sorted((project.root / mutants_folder(project)).glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"paritygate_mutants_{path.stem}", path)
        if spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "MUTANTS"):
            raise BadInputError(f"{path} has no MUTANTS: a tuple of Mutant.")
        yield from module.MUTANTS


def run_mutants(project: Project, names: Sequence[str], say: Callable[[str], None]) -> int:
    """Make each mutant, or those named, in a copy of the repository; how many are not noticed by what they name.

    Parity of the loss, as it is, has to be green first: a broken baseline would notice everything. A mutant is held to
    its obligation alone; of one that lives the line says how that ended. Raises BadInputError for a name that no mutant
    has, an obligation that the spec has not, and a text that does not stand in its file once.
    """
    mutants = [mutant for mutant in mutants_of(project) if not names or mutant.name in names]
    if not mutants:
        raise BadInputError(f"{mutants_folder(project)} has no mutant{' called ' + ', '.join(names) if names else ''}.")
    losses = load_losses(project.root)["losses"].values()
    declared = {name for loss in losses for name in loss["obligations"]}
    for mutant in mutants:
        if mutant.dies_by not in declared:
            raise BadInputError(f"{mutant.name} dies by {mutant.dies_by!r}, which {project.spec} does not declare.")
        for file, old, _ in mutant.edits:
            count = (project.root / file).read_text("utf-8").count(old)
            if count != 1:
                raise BadInputError(f"{mutant.name}: {file} holds the text to edit {count} times: {old!r}.")
    with tempfile.TemporaryDirectory(prefix="paritygate-") as folder:
        tree = Path(folder) / "tree"
        copy(project, tree)
        for loss in sorted({mutant.dies_by.partition("/")[0] for mutant in mutants}):
            if "parity: green" not in (output := session(project, tree, loss)):
                raise BadInputError(
                    f"parity of {loss} is not green by itself, so no mutant shows anything: {last(output)}"
                )
        alive = 0
        for mutant in mutants:
            originals = {file: (tree / file).read_text("utf-8") for file, _, _ in mutant.edits}
            for file, old, new in mutant.edits:
                (tree / file).write_text((tree / file).read_text("utf-8").replace(old, new))
            output = session(project, tree, mutant.dies_by.partition("/")[0], "--obligations", mutant.dies_by)
            for file, text in originals.items():
                (tree / file).write_text(text)
            noticed = any(
                line.strip().removeprefix("parity: NOT green, no receipt: ").startswith(f"{mutant.dies_by} (")
                for line in output.splitlines()
            )
            alive += not noticed
            line = f"{'killed' if noticed else 'LIVES':<7} {mutant.name:<30} {mutant.dies_by}"
            say(line if noticed else f"{line}: {last(output)}")
    return alive


def copy(project: Project, tree: Path) -> None:
    """The files that parity stands on, at `tree`."""
    for folder in project.folders:
        shutil.copytree(project.root / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in project.files:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(project.root / file, tree / file)
    (tree / project.receipts).mkdir(parents=True, exist_ok=True)


def session(project: Project, tree: Path, loss: str, *options: str) -> str:
    """The output of a parity session of one loss in `tree`."""
    command = [sys.executable, "-B", "-m", "pytest", project.tests, "-q", "-p", "no:cacheprovider"]
    command += ["--losses", loss, *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTEST_"))}
    done = subprocess.run(
        command, cwd=tree, env=inherited, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def last(output: str) -> str:
    """The line of a session's output that says how it ended, with the first error, or its last one."""
    lines = [line for line in output.splitlines() if line.strip()]
    ended = next((line for line in lines if line.startswith("parity: ")), lines[-1] if lines else "no output")
    error = next((line[2:].strip() for line in lines if line.startswith("E ")), "")
    return f"{ended} ({error})" if error else ended
