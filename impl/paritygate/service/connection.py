"""One call of the SDK: its time limit, what its failure means, and whether the service is there at all.

The SDK repeats requests that fail with 5xx for ever and blocks while a service is down. Here each call runs in a daemon
thread of its own, and a call that is not done in time is `NoAnswer`: an outcome, not a hanging program.
"""

import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPMessage
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from paritygate.errors import BackendError, one_line, remember_key
from paritygate.service.journal import Journal

T = TypeVar("T")
RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
ANSWERS = 4  # times that something is begun where a service loses an answer


class Refusal(Exception):  # noqa: N818 - what the service did
    """The service (or, where `by_sdk`, the SDK before it) said no, at once and for good."""

    def __init__(self, text: str, *, by_sdk: bool = False) -> None:
        super().__init__(text)
        self.by_sdk = by_sdk


class Broken(Exception):  # noqa: N818
    """An answer that the SDK cannot read, or an internal error of the service; `final` where it says so for good."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class Lost(Broken):
    """The service has lost the answer to a request (HTTP 410); what it was can be asked once more."""


class NoAnswer(Exception):  # noqa: N818
    """No answer within our limit."""

    def __init__(self, what: str, seconds: float, status: int = 0) -> None:
        seen = f", HTTP {status} was the last failure meanwhile" if status else ""
        super().__init__(f"{what}: no answer within {seconds:g} s{seen}")


class Usage:
    """What a proof has used: `tokens` by kind (prefill, sampled, trained), counted when their answer is there.

    A subclass may write down, while the proof goes on, what it counts and which states it saves: `saving` is called
    before the service is asked, `saved` when it has answered, `deleted` when a state is gone.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self._lock = threading.Lock()  # calls that are submitted together are answered in threads of their own

    def count(self, kind: str, tokens: int) -> None:
        """So many tokens more of a kind."""
        with self._lock:
            self.tokens[kind] += tokens

    def saving(self, run: str, name: str) -> None:
        """The training client `run` is about to be asked to save a state under `name`."""

    def saved(self, run: str, name: str, path: str) -> None:
        """It was saved, at `path`."""

    def deleted(self, path: str) -> None:
        """It was deleted."""


@dataclass
class Connection:
    """Where the service is, how long a call may take, and what has been called so far."""

    base_url: str
    api_key: str | None  # None: the SDK's own credentials
    model: str
    limit: float = 120.0
    journal: Journal = field(default_factory=Journal)
    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    slowest: float = 0.0
    silent: int = 0  # calls in a row without an answer
    saved: list[str] = field(default_factory=list[str])
    limits_states: bool = True  # whether the service takes a time limit for what it saves, until it shows not
    not_before: dict[str, float] = field(default_factory=dict[str, float])  # by path: when it may be asked again
    failed: tuple[float, int] = (0.0, 0)  # when, and with which HTTP status, a request failed last

    def __post_init__(self) -> None:
        remember_key(self.api_key)

    @property
    def tokens(self) -> int:
        """Tokens of every kind so far."""
        return self.usage.tokens.total()

    @property
    def patience(self) -> float:
        """The limit of a call that the whole limit was given before: 20 times what the slowest good one took."""
        return min(self.limit, max(20.0, 20 * self.slowest))

    def heard(self, status: int, _: str = "") -> None:
        """Note the status of any answer, from any thread: the SDK repeats what failed, and does not say why."""
        if status >= 400 and status != 408:  # which says that an answer is not there yet
            self.failed = (time.monotonic(), status)

    def probe(self, seconds: float | None = None) -> None:
        """GET healthz without the SDK, which would block; BackendError in one sentence when nobody answers there.

        A service that trains in the process that serves answers health late: by default it has twice a call's limit.
        """
        probe(self.base_url, self.api_key, max(10.0, 2 * self.limit) if seconds is None else seconds)

    def call(self, what: str, submit: Callable[[], Any], limit: float | None = None) -> Any:
        """The result of one SDK call, future or not.

        Raises Refusal, Broken or NoAnswer; BackendError when the service is gone.
        """
        seconds = self.limit if limit is None else limit
        self.calls += 1
        started = time.monotonic()
        try:
            value = with_limit(what, submit, seconds, self._gone)
        except NoAnswer:
            self.silent += 1
            self.probe()
            if max(self.not_before.values(), default=0.0) > started:
                raise BackendError(
                    f"{self.base_url} asks to be left alone (HTTP 429 or 503 with Retry-After), and {what} had no "
                    f"answer within {seconds:g} s; a larger --limit waits for longer, and the same command goes on "
                    "from here."
                ) from None
            if self.silent >= 4 and limit is None:
                raise BackendError(
                    f"{self.base_url} answers its health check and nothing else: {self.silent} calls in a row were "
                    f"without an answer for {seconds:g} s, the last was {what}."
                ) from None
            if self.failed[0] > started:
                raise NoAnswer(what, seconds, self.failed[1]) from None
            raise
        except BackendError:
            raise
        except Exception as error:
            self.silent = 0
            failure = _classified(what, error)
            if isinstance(failure, Broken):
                self.probe()  # a service that is gone is no departure
            raise failure from error
        self.silent = 0
        self.slowest = max(self.slowest, time.monotonic() - started)
        return value

    def again(self, what: str, submit: Callable[[], Any], limit: float | None = None) -> Any:
        """As `call`, for a request without effects: submitted again where its answer was lost, ANSWERS times in all."""
        for left in range(ANSWERS - 1, -1, -1):
            try:
                return self.call(what, submit, limit)
            except Lost:
                if not left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _gone(self) -> None:
        """BackendError when nothing listens at the address any more: the SDK would wait for minutes."""
        parts = urlsplit(self.base_url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
        except ConnectionRefusedError:
            raise BackendError(f"{self.base_url} is gone: it refuses connections.") from None
        except OSError:
            return


def probe(base_url: str, api_key: str | None, seconds: float = 10.0) -> None:
    """Ask GET /api/v1/healthz twice, `seconds` at the most; BackendError says in one sentence what is wrong.

    A health route that answers with a failure is not believed alone: the service is there if it names its models.
    """
    url, other = (f"{base_url.rstrip('/')}/api/v1/{path}" for path in ("healthz", "get_server_capabilities"))
    headers = {} if api_key is None else {"X-API-Key": api_key}
    reason = ""
    for attempt in range(2):
        if attempt:
            time.sleep(0.5)
        try:
            request = urllib.request.Request(url, headers=headers)
            body = with_limit("healthz", lambda request=request: _get(request, seconds / 2), seconds / 2)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403):
                if api_key is None:
                    return
                raise BackendError(f"{base_url} refuses the API key; correct TINKER_API_KEY.") from None
            redirected = 300 <= error.code < 400
            to = f"redirects to {error.headers['Location']}" if redirected else f"has HTTP status {error.code}"
            reason = one_line(f"GET {url} {to}", 200)
            if redirected or error.code == 404:
                break
            with suppress(Exception):
                request = urllib.request.Request(other, headers=headers)
                if b"supported_models" in with_limit(
                    "capabilities", lambda r=request: _get(r, seconds / 2), seconds / 2
                ):
                    return
        except NoAnswer:
            reason = f"GET {url} had no answer within {seconds / 2:g} s"
        except (OSError, ValueError, urllib.error.URLError) as error:
            cause = getattr(error, "reason", error)
            reason = one_line(str(cause), 200) or type(error).__name__
        except Exception as error:  # of http.client: an answer that is no HTTP
            reason = one_line(f"{type(error).__name__}: {error}", 200).removesuffix(":")
        else:
            if b"<html" in body[:500].lower() or b"<!doctype" in body[:500].lower():
                reason = f"GET {url} answers with an HTML page"
                break
            return
    raise BackendError(f"No Tinker service answers at {base_url} ({reason}); start it, or correct --base-url.")


def _get(request: urllib.request.Request, seconds: float) -> bytes:
    proxies = [urllib.request.ProxyHandler({})] if _local(request) else []
    with urllib.request.build_opener(_Here, *proxies).open(request, timeout=seconds) as response:
        return response.read(4096)


class _Here(urllib.request.HTTPRedirectHandler):
    """No redirect is followed: the key would go along, to any host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def _local(request: urllib.request.Request) -> bool:
    return (request.host or "").rsplit(":", 1)[0] in ("127.0.0.1", "localhost", "[::1]")


def with_limit(
    what: str, submit: Callable[[], T], seconds: float, watch: Callable[[], None] | None = None, every: float = 3.0
) -> T:
    """Run in a daemon thread; NoAnswer after `seconds`. `watch` is called meanwhile; what it raises twice ends it.

    What `submit` returns is waited for where it is a future, and cancelled where there is no answer: else the SDK goes
    on asking, without a pause where the answer is 5xx, and all later calls are slow.
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    sent: list[Any] = []

    def body() -> None:
        try:
            value: Any = submit()
            sent.append(value)
            answers.put((value.result() if is_future(value) else value, None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=body, daemon=True, name=f"service proof: {what}").start()
    end, failures = time.monotonic() + seconds, 0
    while True:
        rest = end - time.monotonic()
        try:
            value, error = answers.get(timeout=max(0.0, min(rest, every) if watch else rest))
            break
        except queue.Empty:
            if rest <= every or watch is None:
                _cancel(sent)
                raise NoAnswer(what, seconds) from None
        try:
            watch()
        except BackendError:
            failures += 1
            if failures > 1:
                raise
    if error is not None:
        raise error
    return value


@dataclass(frozen=True)
class Sent:
    """A POST of the SDK, as it can be sent again; `answered` is when its answer had come, by time.monotonic."""

    url: str
    headers: dict[str, str]
    body: bytes
    answered: float


@contextmanager
def recorded(*ends: str) -> Generator[list[Sent]]:
    """The POSTs of the SDK whose paths end so, in the order of their answers."""
    import httpx

    sent: list[Sent] = []
    original = httpx.AsyncClient.send

    async def send(client: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        body = await request.aread()
        response = await original(client, request, **options)  # only now the request has the key
        if request.method == "POST" and request.url.path.rstrip("/").endswith(ends):
            sent.append(Sent(str(request.url), dict(request.headers), body, time.monotonic()))
        return response

    httpx.AsyncClient.send = send  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        httpx.AsyncClient.send = original  # type: ignore[method-assign]


def _cancel(sent: list[Any]) -> None:
    for value in sent:
        with suppress(Exception):
            (value.future() if hasattr(value, "future") else value).cancel()  # the SDK's own wrap one of the library's


def is_future(value: Any) -> bool:
    """Whether `value` is a future of the SDK: it has a `result` to call."""
    return hasattr(value, "result") and callable(value.result)


def _classified(what: str, error: Exception) -> Exception:
    """Refusal where asking again cannot help, Broken for all else."""
    import tinker

    text = f"{what}: {_one_line(error)}"
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for one in chain:
        if type(one).__name__ == "RetryableException":  # of the SDK, where an answer that is waited for has gone
            return Lost(text)
        if isinstance(one, tinker.APIStatusError):
            return _of_status(one.status_code, text, _one_line(one))
        if isinstance(one, getattr(tinker, "RequestFailedError", ())):
            category = str(getattr(one, "category", getattr(one, "error_category", "")))
            return Refusal(text) if "user" in category.lower() else Broken(text, final=True)
    if type(error).__module__.split(".")[0] == "tinker" or isinstance(error, OSError | TimeoutError):
        return Broken(text)
    if isinstance(error, ValueError | TypeError | AssertionError | NotImplementedError | KeyError):
        return Refusal(text, by_sdk=True)
    return Broken(f"{what}: an answer that the SDK cannot read ({type(error).__name__}: {_one_line(error)})")


def _of_status(code: int, text: str, detail: str) -> Exception:
    """What an HTTP status means."""
    if code in (401, 403):
        return BackendError(f"The service refuses the API key ({detail}); correct TINKER_API_KEY.")
    if code == 402:
        return BackendError(
            f"The service stopped the work for a matter of billing (HTTP 402: {detail}); settle it with the service; "
            "then the same command goes on where it stopped."
        )
    if code == 410:
        return Lost(text)
    final = (code < 500 and code not in RETRYABLE_STATUS) or code == 429  # no room, though the SDK asked again
    return Refusal(text) if final else Broken(text)


def _one_line(error: BaseException) -> str:
    return one_line(str(error), 400) or type(error).__name__
