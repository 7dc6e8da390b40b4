"""When to retry and when to give up: the SDK alone blocks for minutes, without a word, on a service that is gone."""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

from paritygate.errors import BackendError, BadInputError

T = TypeVar("T")

RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
PROBE_SECONDS = 4.0


class ServiceDown(BackendError):  # noqa: N818 - the state of the service, as in "refused"
    """The service itself is gone (no health, its process ended, no answer after retries): no request was refused.

    nobody: whether the address refuses connections, which no busy or restarting gateway does: nothing listens there.
    """

    nobody = False


async def probe(base_url: str, api_key: str, *, tries: int = 2, seconds: float = PROBE_SECONDS) -> None:
    """Ask GET /api/v1/healthz; raises ServiceDown naming the address within tries * (seconds + 0.5) seconds.

    A service that answers but refuses the key is a BackendError: it is there, and asking again does not help.
    """
    url = f"{base_url.rstrip('/')}/api/v1/healthz"
    reason, nobody = "", False
    async with httpx.AsyncClient(timeout=seconds) as client:
        for attempt in range(tries):
            try:
                # The client's own time-out restarts with every byte; this one is for the whole answer.
                async with asyncio.timeout(seconds):
                    response = await client.get(url, headers={"X-API-Key": api_key})
            except Exception as error:  # of httpx, of what lies below it, or of an address that is none
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                nobody = any(isinstance(cause, ConnectionRefusedError) for cause in causes(error))
            else:
                nobody = False
                if response.status_code == 200:
                    return
                if response.status_code in (401, 403):
                    raise BackendError(f"The service at {base_url} refuses the API key; correct TINKER_API_KEY.")
                reason = f"HTTP status {response.status_code}"
            if attempt + 1 < tries:
                await asyncio.sleep(0.5)
    down = ServiceDown(f"No healthy Tinker service at {base_url} ({reason}); start one, or correct TINKER_BASE_URL.")
    down.nobody = nobody
    raise down


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

    patience: seconds without health before every waiting call fails; `refused` of them where nobody listens any more.
    limit: seconds that one call may take in all.
    tries, pause: how often a repeatable call is made, and the seconds before the second time, doubled for each after.
    process_ended: says why the embedded server's process is gone, or None while it runs.
    """

    base_url: str
    api_key: str
    patience: float = 60.0
    refused: float = 4.0
    limit: float = 1800.0
    tries: int = 4
    pause: float = 0.25
    interval: float = 3.0
    process_ended: Callable[[], str | None] = field(default=lambda: None)
    _waiting: int = 0
    _down: "asyncio.Future[None] | None" = None
    _watcher: "asyncio.Task[None] | None" = None

    async def once(self, what: str, submit: Callable[[], Awaitable[T]]) -> T:
        """Await one SDK call that must not be repeated (a training step); raises BackendError naming `what`."""
        try:
            return await self._watched(what, submit)
        except (BackendError, BadInputError):
            raise
        except Exception as error:
            raise self._failed(what, error) from error

    async def repeatable(self, what: str, submit: Callable[[], Awaitable[T]]) -> T:
        """Await an SDK call without effects; 408, 429, 5xx and resets are retried with pauses, then ServiceDown.

        What asking again cannot help (a request that is refused) is a BackendError at once: it is about that request.
        """
        started = time.monotonic()
        for attempt in range(self.tries):
            try:
                return await self._watched(what, submit)
            except (BackendError, BadInputError):
                raise
            except Exception as error:
                # The SDK has retried for up to five minutes by itself; no second round of that.
                spent = time.monotonic() - started > self.patience
                if attempt + 1 == self.tries or spent or not is_transient(error):
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
            await asyncio.sleep(0.2)
            ended = self.process_ended()
            if ended is not None:
                down.set_exception(ServiceDown(ended))
                return
            if time.monotonic() < next_probe:
                continue
            try:
                await probe(self.base_url, self.api_key, tries=1)
                healthy = time.monotonic()
                next_probe = healthy + self.interval
            except BackendError as error:
                nobody = isinstance(error, ServiceDown) and error.nobody
                if time.monotonic() - healthy > (min(self.refused, self.patience) if nobody else self.patience):
                    down.set_exception(error)
                    return
                next_probe = time.monotonic() + min(self.interval, 1.0)

    def _failed(self, what: str, error: Exception) -> BackendError:
        text = " ".join(str(error).split()) or type(error).__name__
        return BackendError(f"{what} failed at {self.base_url}: {text[:500]}")


def is_transient(error: Exception) -> bool:
    """Whether asking again can help: time-outs, resets, 408, 409, 425, 429, 5xx, failures that are not the user's."""
    import tinker

    if isinstance(error, tinker.APIStatusError):
        return error.status_code in RETRYABLE_STATUS or error.status_code >= 500
    if isinstance(error, tinker.RequestFailedError):
        return error.category != "user"
    return isinstance(error, tinker.APIConnectionError | httpx.TransportError | TimeoutError | ConnectionError)


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
