"""What can go wrong with the data and with an episode, each in one sentence."""

from paritygate.errors import BadInputError, ParityGateError


class DataError(BadInputError):
    """The tau-bench data is missing, unreadable or not what the pins say (exit 2)."""


class EpisodeOver(ParityGateError):  # noqa: N818 - the state it names
    """A step or another grade was asked for after the end of an episode (a bug of the caller, exit 1)."""


class ToolRefusal(Exception):  # noqa: N818 - what a tool answers, no fault
    """A tool's own refusal: its text, after "Error: ", is the observation."""
