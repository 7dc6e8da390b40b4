"""One run in a run directory at a time."""

import contextlib
from collections.abc import Generator
from pathlib import Path

from paritygate.errors import Refused

LOCK = "lock"


@contextlib.contextmanager
def lock_run(run_dir: Path | str, *, create: bool = False) -> Generator[Path]:
    """Hold `run_dir` for one run; with `create`, make it, which only one of two processes can do.

    Raises Refused when another process holds it, or made it first. What a killed writer left half done is removed.
    """
    import filelock

    run_dir = Path(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=not create)
    except FileExistsError as error:
        raise Refused(
            f"{run_dir} exists already: another run made it; name another --output, or --resume it."
        ) from error
    lock = filelock.FileLock(run_dir / LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise Refused(f"another run is at work in {run_dir}: wait for it, or name another --output.") from error
    try:
        for half in run_dir.rglob(".*.tmp"):
            half.unlink()
        yield run_dir
    finally:
        lock.release()


def is_locked(run_dir: Path | str) -> bool:
    """True while another process holds `run_dir`; touches nothing where there is no lock."""
    import filelock

    path = Path(run_dir) / LOCK
    if not path.is_file():
        return False
    try:
        with filelock.FileLock(path, timeout=0):
            return False
    except filelock.Timeout:
        return True
