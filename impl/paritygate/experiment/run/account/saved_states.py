"""The states that a run has saved at a service: on the disk before and after each save, so that none is forgotten.

What is not in this list is not the run's, and never deleted.
"""

from collections import Counter
from pathlib import Path

from paritygate.experiment.run.journal import append_line, drop_torn_tail, read_lines

FILE = "saved_states.jsonl"


class SavedStates:
    """saved_states.jsonl of the run in `directory`: a line before each save, one after it, and one for each deletion.

    The line before a save names the training client (the service's id of it) and the state: a process that is killed
    while the service saves leaves it without an answer, and the next one asks the service what came of it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        drop_torn_tail(self._path)

    def intend(self, client: str, name: str) -> None:
        """A state is about to be saved."""
        append_line(self._path, {"saving": name, "client": client})

    def add(self, client: str, name: str, path: str) -> None:
        """It was saved, at `path`."""
        append_line(self._path, {"saved": path, "name": name, "client": client})

    def drop(self, path: str) -> None:
        """A state was deleted."""
        append_line(self._path, {"deleted": path})

    def left(self) -> list[str]:
        """The paths that were saved and not deleted, in their order."""
        lines = read_lines(self._path)
        deleted = {line["deleted"] for line in lines if "deleted" in line}
        return list(dict.fromkeys(line["saved"] for line in lines if "saved" in line and line["saved"] not in deleted))

    def unanswered(self) -> list[tuple[str, str]]:
        """(client, name) of the saves that a process was killed in, or whose answer was lost, in their order.

        A client may save its state and a sampler under one name: it has as many paths as saves begun.
        """
        lines = read_lines(self._path)
        paths = {(line.get("client"), line.get("name"), line["saved"]) for line in lines if "saved" in line}
        answered = Counter((client, name) for client, name, _ in paths)
        begun = Counter((line["client"], line["saving"]) for line in lines if "saving" in line)
        return [save for save, times in begun.items() if answered[save] < times]

    def ever(self) -> set[str]:
        """The paths that were saved, those deleted since among them."""
        return {line["saved"] for line in read_lines(self._path) if "saved" in line}
