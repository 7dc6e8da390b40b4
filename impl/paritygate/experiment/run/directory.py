"""The directory of a run: a new one, or the one of the very same spec that --resume goes on with."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from paritygate.bootstrap import ROOM
from paritygate.errors import BadInputError
from paritygate.receipts import canonical, write_atomic
from paritygate.receipts.lock import LOCK
from paritygate.spec.experiment import Experiment


def choose_directory(exp: Experiment, root: Path, output: Path | None, *, resume: bool) -> Path:
    """The run directory: a new one, or, with `resume`, the one of this very spec. Raises BadInputError otherwise."""
    if output is None:
        if resume:
            return latest_run(exp, root)
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        directory = root / "runs" / f"{exp.path.stem}-{stamp}"
    else:
        directory = Path(output).absolute()
    if directory.exists() and not resume:
        raise BadInputError(f"{directory} exists: give --resume to go on with it, or another --output.")
    if resume and not (directory / "spec.json").is_file() and not killed_at_birth(directory):
        raise BadInputError(f"{directory} holds no run to resume (no spec.json).")
    above = next(parent for parent in directory.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise BadInputError(f"--output {directory}: {above} is no folder that can be written to.")
    return directory


def killed_at_birth(directory: Path) -> bool:
    """Whether a run was killed after it made its directory and before it wrote anything into it but the lock."""
    return directory.is_dir() and all(path.name.startswith((LOCK, ".spec.json.")) for path in directory.iterdir())


def make_directory(directory: Path) -> None:
    """Make the run directory; BadInputError where that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"--output {directory} cannot be made: {error.strerror}.") from None


@contextmanager
def kept_where_there_is_no_room() -> Generator[None]:
    """BadInputError, with the first file that had no room, instead of an OSError: what was committed before is kept."""
    try:
        yield
    except (OSError, BadInputError) as error:
        first = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(first, OSError) or first.errno not in ROOM or first.filename is None:
            raise
        while isinstance(before := first.__context__, OSError) and before.errno in ROOM and before.filename:
            first = before  # after it, what is written at the end of a phase had no room either
        raise BadInputError(
            f"{first.filename} cannot be written: {first.strerror}. The run is kept as it was before; where there is "
            "room, --resume goes on."
        ) from error


def latest_run(exp: Experiment, root: Path) -> Path:
    """The newest run of this spec under runs/ (names carry the time of their start)."""
    for directory in sorted((root / "runs").glob(f"{exp.path.stem}-*"), reverse=True):
        path = directory / "spec.json"
        if path.is_file() and path.read_bytes() == canonical(dict(exp.frozen)):
            return directory
    raise BadInputError(f"--resume: {root / 'runs'} holds no run of {exp.path}; name it with --output.")


def refuse_another_spec(exp: Experiment, directory: Path) -> None:
    """BadInputError when the directory holds a run of another spec."""
    path = directory / "spec.json"
    if path.is_file() and path.read_bytes() != canonical(dict(exp.frozen)):
        raise BadInputError(f"{directory} is a run of another spec than {exp.path}: its spec.json differs.")


def write_spec(exp: Experiment, directory: Path) -> None:
    """The frozen spec; BadInputError when the directory holds a run of another one."""
    refuse_another_spec(exp, directory)
    path = directory / "spec.json"
    if not path.is_file():
        write_atomic(path, canonical(dict(exp.frozen)))
