"""What a mutant is: a named mistake as small edits of impl, and the obligation that has to go red."""

from typing import NamedTuple

Edit = tuple[
    str, str, str
]  # file under impl/paritygate/losses, the text that stands there once, the text of the mistake


class Mutant(NamedTuple):
    """A mistake (and where it was made), its edits, and the obligation that catches it."""

    name: str
    mistake: str
    obligation: str
    edits: tuple[Edit, ...]


def one(name: str, mistake: str, obligation: str, file: str, old: str, new: str) -> Mutant:
    """A mutant of a single edit."""
    return Mutant(name, mistake, obligation, ((file, old, new),))


GATE, LEVELS, ROWS = "gate.py", "spod/levels.py", "engines/float64.py"
BUCKETS, DIVERGENCE, LOGIT, TEACHERS = "buckets.py", "sdpo/divergence.py", "sdpo/logit_level.py", "sdpo/teachers.py"
