"""The embedded server: a Tinker-compatible training and sampling service on this machine's CPU.

`start("tiny")` runs one in this process, `python -m paritygate.server` in a process of its own. It speaks the wire
format of the tinker SDK 0.38.0 on 127.0.0.1 and wants a key. torch is imported when a server starts, not before.
"""

import importlib
from typing import TYPE_CHECKING, Any

from paritygate.extras import require

if TYPE_CHECKING:
    from paritygate.server.running import Running, start

__all__ = ["Running", "start"]


def __getattr__(name: str) -> Any:
    """`Running` and `start` when they are asked for: `python -m` has to get to where it says what is missing."""
    if name in __all__:
        require("server")
        return getattr(importlib.import_module("paritygate.server.running"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
