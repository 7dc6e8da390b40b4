"""What a mutant is: a named mistake as edits of impl, and the one thing that has to notice it."""

from typing import NamedTuple

Edit = tuple[str, str, str]  # file under impl/paritygate, the text that stands there once, the text of the mistake


class Mutant(NamedTuple):
    """A mistake that somebody made (`why` says where), and what it dies by.

    `dies_by` is an obligation of spec/losses.json ("spod/gate") for an edit of a loss, or a test
    ("tests/agent/test_tokens.py::test_...") for an edit of anything else. Of a harmless edit it is the loss ("spod")
    whose obligations have to stay green. `also` holds further edits that belong to the same mistake.
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
