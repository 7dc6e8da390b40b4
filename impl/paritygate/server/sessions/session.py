"""Clients' sessions: who is alive, who has finished, who has gone silent."""

import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field

from paritygate.server.errors import RequestError


@dataclass
class Session:
    """A client's session; `seen` is the monotonic time of its last request."""

    id: str
    seen: float
    user_metadata: dict[str, str] | None = None


@dataclass
class Sessions:
    """At most `limit` live sessions, and the ids of the last few thousand that finished."""

    limit: int
    live: dict[str, Session] = field(default_factory=dict[str, Session])
    finished: "OrderedDict[str, None]" = field(default_factory=OrderedDict[str, None])

    def create(self, user_metadata: dict[str, str] | None) -> Session:
        if self.full:
            raise RequestError(f"{self.limit} sessions are open, which is this server's limit; finish some")
        session = Session(str(uuid.uuid4()), time.monotonic(), user_metadata)
        self.live[session.id] = session
        return session

    @property
    def full(self) -> bool:
        """Whether no further session can be opened."""
        return len(self.live) >= self.limit

    def get(self, session_id: str) -> Session:
        """The live session of that id, marked as seen; 410 if it has finished, 404 if it was never known."""
        session = self.live.get(session_id)
        if session is None and session_id in self.finished:
            raise RequestError(f"session {session_id} has finished, or was silent for too long", 410)
        if session is None:
            raise RequestError(f"there is no session {session_id!r}", 404)
        session.seen = time.monotonic()
        return session

    def end(self, session_id: str) -> None:
        self.live.pop(session_id, None)
        self.finished[session_id] = None
        while len(self.finished) > 4096:
            self.finished.popitem(last=False)

    def silent(self, seconds: float) -> list[str]:
        """The ids of sessions that have sent nothing for that long."""
        now = time.monotonic()
        return [session.id for session in self.live.values() if now - session.seen > seconds]
