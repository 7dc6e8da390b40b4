"""The states that a run has saved at a service, on the disk as soon as they are there, so that none is forgotten.

What is not in this list is not the run's, and never deleted.
"""

from pathlib import Path

from paritygate.experiment.run.journal import append_line, drop_torn_tail, read_lines

FILE = "saved_states.jsonl"


class SavedStates:
    """saved_states.jsonl of the run in `directory`: a line for each state saved, and one for each deleted."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        drop_torn_tail(self._path)

    def add(self, path: str) -> None:
        """A state was saved."""
        append_line(self._path, {"saved": path})

    def drop(self, path: str) -> None:
        """A state was deleted."""
        append_line(self._path, {"deleted": path})

    def left(self) -> list[str]:
        """The paths that were saved and not deleted, in their order."""
        lines = read_lines(self._path)
        deleted = {line["deleted"] for line in lines if "deleted" in line}
        return list(dict.fromkeys(line["saved"] for line in lines if "saved" in line and line["saved"] not in deleted))
