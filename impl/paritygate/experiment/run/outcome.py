"""How a phase ends: decided, or stopped by a gate of the protocol."""

import dataclasses
from collections.abc import Sequence

from paritygate.errors import GateStopped
from paritygate.experiment.run.journal import Record


@dataclasses.dataclass(frozen=True)
class Decided:
    """What a phase leaves: one sentence of what was decided, one of why, the facts, and the files they rest on."""

    what: str
    why: str
    facts: Record
    files: Sequence[str] = ()


class PhaseStopped(GateStopped):
    """A gate stopped the run; `decided` is what its receipt says."""

    def __init__(self, decided: Decided) -> None:
        super().__init__(decided.what)
        self.decided = decided
