"""When to retry and when to give up: the SDK alone blocks for minutes, without a word, on a service that is gone."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from paritygate.backend.credentials import Credential
from paritygate.errors import BackendError, BadInputError, one_line

T = TypeVar("T")

RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
PROBE_SECONDS = 4.0
MOST_ANSWERED = 4 * 2**20  # bytes of an answer of these routes
TRY_PAUSE = 0.5  # seconds between two tries of a probe


class ServiceDown(BackendError):  # noqa: N818 - the state of the service, as in "refused"
    """The service itself is gone (no health, its process ended, no answer after retries): no request was refused.

    nobody: whether the address refuses connections, which no busy or restarting gateway does: nothing listens there.
    """

    nobody = False


async def probe(base_url: str, api_key: str, *, tries: int = 2, seconds: float = PROBE_SECONDS) -> None:
    """Ask GET /api/v1/healthz; raises ServiceDown naming the address within tries * (seconds + TRY_PAUSE) seconds.

    A health route that answers with a failure is not believed alone: the service is there if it names its models.
    A service that answers but refuses the key, or the account (402), is named so: asking again does not help.
    """
    reason, nobody = "", False
    async with httpx.AsyncClient(timeout=seconds, headers={"X-API-Key": api_key}) as client:
        for attempt in range(tries):
            try:
                # The client's own time-out restarts with every byte; this one is for both answers.
                async with asyncio.timeout(seconds):
                    await _looked_up(base_url)
                    status, body = await get(client, base_url, "healthz")
                    if status not in (200, 401, 402, 403):
                        other, _ = await get(client, base_url, "get_server_capabilities")
                        status = other if other in (200, 401, 402, 403) else status
            except Exception as error:  # of httpx, of what lies below it, or of an address that is none
                first = next(cause for cause in causes(error) if not isinstance(cause, BaseExceptionGroup))
                reason = one_line(f"{type(first).__name__}: {first}", 200).removesuffix(": ")
                nobody = any(isinstance(cause, ConnectionRefusedError) for cause in causes(error))
            else:
                nobody = False
                if status == 200:
                    return
                refuse_account(base_url, status, body)
                reason = f"HTTP status {status}"
            if attempt + 1 < tries:
                await asyncio.sleep(TRY_PAUSE)
    down = ServiceDown(f"No healthy Tinker service at {base_url} ({reason}); start one, or correct TINKER_BASE_URL.")
    down.nobody = nobody
    raise down


async def get(client: httpx.AsyncClient, base_url: str, route: str) -> tuple[int, bytes]:
    """(status, body) of GET /api/v1/`route`; ValueError for a body of more than MOST_ANSWERED bytes."""
    async with client.stream("GET", f"{base_url.rstrip('/')}/api/v1/{route}") as response:
        body = b""
        async for chunk in response.aiter_bytes(65536):
            body += chunk
            if len(body) > MOST_ANSWERED:
                raise ValueError(f"GET {route} answers with more than {MOST_ANSWERED >> 20} MiB")
    return response.status_code, body


async def _looked_up(base_url: str) -> None:
    """Wait until the name of an address has been looked up, in a thread that cannot keep the process alive.

    A resolver that is silent keeps the default executor's threads, for whose end asyncio waits before a sentence about
    it is shown. A proxy looks names up itself; what is wrong with a name is left to the request.
    """
    if getproxies().keys() - {"no"}:
        return
    with suppress(OSError, ValueError):
        address = urlsplit(base_url)
        await in_daemon_thread(partial(socket.getaddrinfo, address.hostname, address.port))


def refuse_account(base_url: str, status: int, body: bytes) -> None:
    """BackendError where an answer refuses the key (401, 403) or the account (402): asking again does not help."""
    if status in (401, 403):
        raise BackendError(f"The service at {base_url} refuses the API key; correct TINKER_API_KEY.")
    if status == 402:
        raise billing(base_url, body.decode(errors="replace"))


def billing(base_url: str, detail: str) -> ServiceDown:
    """What is said of HTTP 402, which the SDK alone would wait out for minutes without a word."""
    return ServiceDown(
        f"The service at {base_url} stopped the work for a matter of billing (HTTP 402: {one_line(detail, 200)}); "
        "settle it with the service, then --resume."
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and everything that it was raised from, the members of groups too."""
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else (error.__cause__ or error.__context__,)
    for cause in inner:
        if cause is not None:
            yield from causes(cause)


@dataclass
class Guard:
    """Runs the SDK's calls: bounded retries where repeating is safe, and one watch over the service's health for all.

    patience: seconds without health, and without an answer to any request, before every waiting call fails; `refused`
    of them where nobody listens any more.
    limit: seconds that one call may take in all.
    tries, pause: how often a repeatable call is made, and the seconds before the second time, doubled for each after.
    process_ended: says why the embedded server's process is gone, or None while it runs.
    """

    base_url: str
    api_key: str | None  # a fixed key; None where a command prints one
    credential: Credential | None = None
    patience: float = 60.0
    refused: float = 4.0
    limit: float = 1800.0
    tries: int = 4
    pause: float = 0.25
    interval: float = 3.0
    process_ended: Callable[[], str | None] = field(default=lambda: None)
    answered: float = 0.0  # time.monotonic() of the last HTTP answer below 500 to any request of the session
    unpaid: str | None = None  # what the service said with HTTP 402
    scores_the_end: bool = True  # whether it can leave out the logprobs before the last positions, until it shows not
    limits_states: bool = True  # whether it takes a time limit for what it saves, until it shows not
    _waiting: int = 0
    _down: "asyncio.Future[None] | None" = None
    _watcher: "asyncio.Task[None] | None" = None

    async def token(self) -> str:
        """The key that a request carries now."""
        return await self.credential.token() if self.credential is not None else str(self.api_key)

    async def once(self, what: str, submit: Callable[[], Awaitable[T]]) -> T:
        """Await one SDK call that must not be repeated (a training step); raises BackendError naming `what`."""
        try:
            return await self._watched(what, submit)
        except (BackendError, BadInputError):
            raise
        except Exception as error:
            raise self._failed(what, error) from error

    async def repeatable(self, what: str, submit: Callable[[], Awaitable[T]]) -> T:
        """Await an SDK call without effects; 408, 410, 429, 5xx and resets are retried with pauses, then ServiceDown.

        What asking again cannot help (a request that is refused) is a BackendError at once: it is about that request.
        """
        started = time.monotonic()
        for attempt in range(self.tries):
            try:
                return await self._watched(what, submit)
            except (BackendError, BadInputError):
                raise
            except Exception as error:
                # The SDK has retried for up to five minutes by itself; no second round of that. An answer that the
                # service lost (410) is another matter: however long it took, nothing has been tried twice yet.
                spent = time.monotonic() - started > self.patience and not is_lost(error)
                if attempt + 1 == self.tries or spent or self.unpaid is not None or not is_transient(error):
                    failed = self._failed(what, error)
                    raise (ServiceDown(str(failed)) if is_transient(error) else failed) from error
                await asyncio.sleep(min(self.pause * 2**attempt, 8.0) * (1 + random.random() / 4))
        raise AssertionError("unreachable: the last try returns or raises")

    async def close(self) -> None:
        """Stop watching; calls still waiting are the caller's to cancel."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None

    async def _watched(self, what: str, submit: Callable[[], Awaitable[T]]) -> T:
        down = self._start_watching()
        call = asyncio.ensure_future(_awaited(submit))
        try:
            await asyncio.wait({call, down}, timeout=self.limit, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            if down.done():
                down.result()
            raise ServiceDown(f"{what}: {self.base_url} did not answer within {self.limit:g} s.")
        finally:
            self._waiting -= 1
            if not call.done():
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

    def _start_watching(self) -> "asyncio.Future[None]":
        self._waiting += 1
        if self._down is None or self._down.done():
            self._down = asyncio.get_running_loop().create_future()
            # Every waiting call reads it; without one, an unread exception must not be reported at exit.
            self._down.add_done_callback(lambda future: future.exception())
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.ensure_future(self._watch(self._down))
        return self._down

    async def _watch(self, down: "asyncio.Future[None]") -> None:
        healthy = time.monotonic()
        next_probe = healthy + self.interval
        while self._waiting:
            await asyncio.sleep(min(0.2, self.interval))
            ended = self.process_ended()
            if ended is not None:
                down.set_exception(ServiceDown(ended))
                return
            if self.unpaid is not None:
                down.set_exception(billing(self.base_url, self.unpaid))
                return
            if time.monotonic() < next_probe:
                continue
            try:
                await probe(self.base_url, await self.token(), tries=1)
                healthy = time.monotonic()
                next_probe = healthy + self.interval
            except (BackendError, BadInputError) as error:
                nobody = isinstance(error, ServiceDown) and error.nobody
                # The health route is one witness; answers to other requests are the better one.
                if time.monotonic() - max(healthy, self.answered) > (
                    min(self.refused, self.patience) if nobody else self.patience
                ):
                    down.set_exception(error)
                    return
                next_probe = time.monotonic() + min(self.interval, 1.0)

    def heard(self, status: int, detail: str = "") -> None:
        """Note an HTTP answer of the service to any request, from any thread."""
        if status < 500:
            self.answered = time.monotonic()
        if status == 402:
            self.unpaid = detail

    def _failed(self, what: str, error: Exception) -> BackendError:
        if self.unpaid is not None:
            return billing(self.base_url, self.unpaid)
        if getattr(error, "status_code", None) == 401:
            fault = f"the service at {self.base_url} refuses the API key"
            return BackendError(f"{what} failed: {fault}; correct it, then --resume.")
        text = one_line(str(error), 500) or type(error).__name__
        return BackendError(f"{what} failed at {self.base_url}: {text}")


def is_transient(error: Exception) -> bool:
    """Whether asking again can help: time-outs, resets, 408-410, 425, 429, 5xx, failures that are not the user's."""
    import tinker

    if is_lost(error):
        return True
    if isinstance(error, tinker.APIStatusError):
        return error.status_code in RETRYABLE_STATUS or error.status_code >= 500
    if isinstance(error, tinker.RequestFailedError):
        return error.category != "user"
    return isinstance(error, tinker.APIConnectionError | httpx.TransportError | TimeoutError | ConnectionError)


def is_lost(error: Exception) -> bool:
    """Whether the service has lost the answer to a request (410): the request can be submitted again."""
    import tinker
    from tinker.lib.retryable_exception import RetryableException

    gone = isinstance(error, tinker.APIStatusError) and error.status_code == 410
    return gone or isinstance(error, RetryableException)


async def _awaited(submit: Callable[[], Awaitable[T]]) -> T:
    return await submit()


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run a blocking call in a thread that cannot keep the process alive, as the default executor's threads do."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def body() -> None:
        try:
            result, error = function(), None
        except BaseException as caught:
            result, error = None, caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=body, daemon=True).start()
    return await future
