"""How many threads an engine may use where the servers of a user share a machine's cores."""

import fcntl
import os
import stat
import tempfile
from pathlib import Path

MOST = 4  # threads of one server: what more would bring was not measured
PLACES = 64


def default_file() -> Path:
    """Where the servers of this user lock their places."""
    return Path(tempfile.gettempdir(), f"paritygate-cores-{os.getuid()}")


def cores_of_this_process() -> int:
    """How many cores the system lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SharedCores:
    """`cores` of this machine, MOST at most, divided evenly among the servers that are busy.

    A busy server holds the lock of one byte of `file`; the system drops it when the process ends, however it ends.
    Where the file cannot be opened, or is no plain file of this user, a server has one core. Locks belong to a process:
    one engine a process.
    """

    def __init__(self, file: Path | None = None, cores: int | None = None) -> None:
        self._cores = min(MOST, cores or cores_of_this_process())
        self._place: int | None = None
        self._file = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._file = os.open(file or default_file(), flags, 0o600)
            status = os.fstat(self._file)
            if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                raise PermissionError
            self._is_free(0)
        except OSError:
            self._cores = 1

    def share(self) -> int:
        """Count as busy; how many threads to use until this is asked again, 1 at least."""
        if self._cores == 1:
            return 1
        if self._place is None:
            self._place = next(filter(self._take, range(PLACES)), None)
        others = sum(not self._is_free(place) for place in range(self._cores + 1) if place != self._place)
        return max(1, self._cores // (1 + others))

    def rest(self) -> None:
        """Count as idle."""
        if self._place is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place)
            self._place = None

    def _is_free(self, place: int) -> bool:
        free = self._take(place)
        if free:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)
        return free

    def _take(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            return False
        return True
