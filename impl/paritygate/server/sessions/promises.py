"""Promises: what a client polls for. Results stay until they are fetched and a while after, within a memory bound."""

import asyncio
import hashlib
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from paritygate.errors import ParityGateError
from paritygate.server.limits import Limits

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Payload:
    """A finished answer: JSON text or protobuf bytes."""

    body: bytes
    media_type: str


def digest(body: bytes) -> bytes:
    """What is remembered of a request to know it again."""
    return hashlib.blake2b(body, digest_size=16).digest()


def json_payload(value: object) -> Payload:
    """A value as the JSON body of an answer."""
    return Payload(json.dumps(value).encode(), "application/json")


@dataclass
class Promise:
    """One piece of work that a client may ask for by `id`."""

    id: str
    session: str
    answer: dict[str, Any]
    event: asyncio.Event = field(default_factory=asyncio.Event)
    payload: Payload | None = None
    error: tuple[str, str] | None = None
    cancel: Callable[[], object] | None = None
    finished: float = 0.0

    @property
    def samples(self) -> bool:
        """Whether it is of a sample request, which may be sent again; training goes on in order, to its end."""
        return "sample_sequence_ids" in self.answer

    @property
    def pending(self) -> bool:
        return self.payload is None and self.error is None


class Promises:
    """All promises of a server; used on its event loop only."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.bytes = 0
        self._promises: OrderedDict[str, Promise] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._promises)

    def create(self, session: str) -> Promise:
        promise = Promise(uuid.uuid4().hex, session, {})
        promise.answer = {"request_id": promise.id}
        self._promises[promise.id] = promise
        return promise

    def get(self, promise_id: str) -> Promise | None:
        return self._promises.get(promise_id)

    def gone(self, promise_id: str) -> bool:
        """Whether a promise of that id was known once."""
        return promise_id in self._gone

    def follow(self, promise: Promise, future: "Future[Any]", encode: Callable[[Any], Payload]) -> None:
        """Resolve the promise on the event loop when the engine resolves the future."""
        loop = asyncio.get_running_loop()
        if promise.cancel is None:
            promise.cancel = future.cancel

        def resolve() -> None:
            error = None if future.cancelled() else future.exception()
            if future.cancelled():
                self.fail(promise, "the request was cancelled", "user")
            elif error is not None:
                self.fail_with(promise, error)
            else:
                try:
                    self.fulfil(promise, encode(future.result()))
                except Exception as problem:
                    self.fail_with(promise, problem)

        def on_done(_: "Future[Any]") -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(resolve)

        future.add_done_callback(on_done)

    def fulfil(self, promise: Promise, payload: Payload) -> None:
        if promise.id in self._promises:  # else nobody can ask for it any more
            promise.payload = payload
            self.bytes += len(payload.body)
        self._finished(promise)

    def fail_with(self, promise: Promise, error: BaseException) -> None:
        """Fail with an exception: a RequestError is the client's, anything else the server's."""
        if isinstance(error, ParityGateError):
            self.fail(promise, str(error), "user" if getattr(error, "status", 500) < 500 else "server")
        else:
            self.fail(promise, f"a bug of the server: {type(error).__name__}: {error}", "server")

    def fail(self, promise: Promise, message: str, category: str) -> None:
        promise.error = (message, category)
        self._finished(promise)

    def drop(self, promise: Promise) -> None:
        """Forget a promise, and cancel its work if it is under way."""
        if self._promises.pop(promise.id, None) is None:
            return
        if promise.payload is not None:
            self.bytes -= len(promise.payload.body)
        if promise.pending:
            if promise.cancel is not None:
                promise.cancel()
            promise.event.set()
        promise.payload, promise.error = None, ("the request was dropped", "user")
        self._gone[promise.id] = None
        while len(self._gone) > 65536:
            self._gone.popitem(last=False)

    def drop_samples(self, session: str) -> None:
        """Stop the samples of a session that are not finished; a client that lives after all sends them again (410)."""
        for promise in [p for p in self._promises.values() if p.session == session and p.pending and p.samples]:
            self.drop(promise)

    def drop_session(self, session: str) -> None:
        for promise in [p for p in self._promises.values() if p.session == session]:
            self.drop(promise)

    def _finished(self, promise: Promise) -> None:
        promise.finished = time.monotonic()
        promise.cancel = None
        promise.event.set()
        if promise.id not in self._promises:
            return
        self._promises.move_to_end(promise.id)
        for old in [p for p in self._promises.values() if not p.pending]:
            if self.bytes <= self.limits.result_bytes:
                break
            if old is not promise:
                self.drop(old)

    def expire(self, seconds: float) -> None:
        """Forget answers that are older than `seconds`."""
        now = time.monotonic()
        for promise in [p for p in self._promises.values() if not p.pending and now - p.finished > seconds]:
            self.drop(promise)
