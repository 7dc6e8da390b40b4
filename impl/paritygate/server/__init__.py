"""The embedded server: a Tinker-compatible training and sampling service on this machine's CPU.

`start("tiny")` runs one in this process, `python -m paritygate.server` in a process of its own. It speaks the wire
format of the tinker SDK 0.38.0 on 127.0.0.1 and wants a key. torch is imported when a server starts, not before.
"""

from paritygate.extras import require

require("server")

from paritygate.server.running import Running, start  # noqa: E402

__all__ = ["Running", "start"]
