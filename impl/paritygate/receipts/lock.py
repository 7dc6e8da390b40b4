"""One run in a run directory at a time."""

import contextlib
from collections.abc import Generator
from pathlib import Path

from paritygate.errors import Refused

LOCK = "lock"


@contextlib.contextmanager
def lock_run(run_dir: Path | str) -> Generator[Path]:
    """Hold `run_dir`, which is made where it is not there, for one run.

    Raises Refused when another process holds it. What a killed writer left half done is removed.
    """
    import filelock

    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
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
