"""What holds an implementation to its definition: obligations, ledger, comparator, strategies, the pytest plugin.

>>> from paritygate.harness import compare, strategies  # in a parity test
"""

import importlib
from typing import Any

from paritygate.harness.ledger import compare

__all__ = ["Unsupported", "compare", "strategies"]  # pyright: ignore[reportUnsupportedDunderAll] - by __getattr__


class Unsupported(NotImplementedError):  # noqa: N818 - what an adapter says, no mistake of its own
    """Raised by an adapter for an option that its project does not have; the sentence says which."""


def __getattr__(name: str) -> Any:
    """`strategies` when it is asked for: it imports Hypothesis and torch."""
    if name == "strategies":
        return importlib.import_module("paritygate.harness.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
