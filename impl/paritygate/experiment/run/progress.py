"""What a person sees while a run goes on: one line a phase, a live status on a terminal, nothing under --quiet."""

import dataclasses
import sys
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console


@dataclasses.dataclass
class Progress:
    """Writes to stderr, so that stdout stays the result's; `quiet` silences all of it."""

    quiet: bool = False

    def __post_init__(self) -> None:
        self._console = Console(file=sys.stderr, quiet=self.quiet, highlight=False, soft_wrap=True)
        self._text = ""

    def line(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, markup=False)

    @contextmanager
    def phase(self, name: str, position: str) -> Generator[None]:
        """The phase that is running; `update` fills in the details on a terminal."""
        self.line(f"[{position}] {name}")
        if self.quiet or not self._console.is_terminal:
            yield
            return
        with self._console.status(name) as self._status:
            self._text = name
            try:
                yield
            finally:
                del self._status

    def update(self, detail: str) -> None:
        """What the running phase is at; shown on a terminal only."""
        status = getattr(self, "_status", None)
        if status is not None:
            status.update(f"{self._text}: {detail}")
