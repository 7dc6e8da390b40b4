"""When the client retries and when it gives up: probes, bounded retries, a watch over the service's health."""

import asyncio
import contextlib
import itertools
import os
import time

import httpx
import pytest
import tinker

from paritygate.backend import BackendError, ServiceDown, connect
from paritygate.backend.connection import PROXIES, reach_without_proxy
from paritygate.backend.guard import Guard, is_transient, probe
from paritygate.errors import BadInputError

KEY = "tml-test"


def status_error(status: int) -> tinker.APIStatusError:
    request = httpx.Request("POST", "http://127.0.0.1:1/api/v1/asample")
    return tinker.APIStatusError(f"status {status}", response=httpx.Response(status, request=request), body=None)


def connection_error() -> tinker.APIConnectionError:
    return tinker.APIConnectionError(request=httpx.Request("POST", "http://127.0.0.1:1"))


TRANSIENT = [
    *(status_error(code) for code in (408, 409, 410, 425, 429, 500, 502, 503, 504, 599)),
    connection_error(),
    tinker.RequestFailedError("worker lost", request_id="r", category="server"),
    httpx.ReadTimeout("slow"),
    httpx.ConnectError("reset"),
    ConnectionResetError(),
    TimeoutError(),
]
FINAL = [
    *(status_error(code) for code in (400, 401, 402, 403, 404, 422)),
    tinker.RequestFailedError("prompt too long", request_id="r", category="user"),
    ValueError("bad"),
]


@contextlib.asynccontextmanager
async def service(answer: bytes | None, *, delay: float = 0.0):
    """A service at a free port that answers every request with `answer`, or never (None); yields its address."""
    held = []

    async def handle(reader, writer):
        held.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while answer is not None:
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(delay)
                writer.write(answer)
                await writer.drain()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await asyncio.sleep(0.1)  # a connection that was accepted may have no handler yet
        server.close()
        for writer in held:
            writer.transport.abort()
        await asyncio.gather(*(w.wait_closed() for w in held), return_exceptions=True)


def reply(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}".encode()


def test_an_address_where_nothing_listens_is_named_within_ten_seconds():
    async def main():
        async with connect("http://127.0.0.1:9", KEY):
            raise AssertionError

    started = time.monotonic()
    with pytest.raises(BackendError, match=r"http://127\.0\.0\.1:9 .*TINKER_BASE_URL"):
        asyncio.run(main())
    assert time.monotonic() - started < 10


BROKEN = [reply("500 Oops"), reply("404 Not Found"), b"HTTP/1.1 200 OK\r\nX: ", b"\x00\xff"]


@pytest.mark.parametrize("answer", BROKEN, ids=range(len(BROKEN)))
def test_a_service_that_is_not_healthy_is_named(answer):
    async def main():
        async with service(answer) as address:
            await probe(address, KEY, seconds=0.3)

    with pytest.raises(ServiceDown, match="No healthy Tinker service at http://127"):
        asyncio.run(main())


def test_a_service_that_never_answers_is_named_within_ten_seconds():
    async def main():
        async with service(None) as address, connect(address, KEY):
            raise AssertionError

    started = time.monotonic()
    with pytest.raises(ServiceDown, match="No healthy Tinker service at http://127"):
        asyncio.run(main())
    assert time.monotonic() - started < 10


def test_a_service_that_sends_a_byte_now_and_then_does_not_hold_the_probe():
    async def main():
        async def drip(reader, writer):
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"H")
                    await writer.drain()
                    await asyncio.sleep(0.1)

        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        try:
            await probe(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", KEY, tries=1, seconds=0.5)
        finally:
            await asyncio.sleep(0.3)  # the dripping ends with its connection
            server.close()

    started = time.monotonic()
    with pytest.raises(ServiceDown):
        asyncio.run(main())
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_refused_key_is_said_to_be_refused(status):
    async def main():
        async with service(reply(status)) as address, connect(address, KEY):
            raise AssertionError

    with pytest.raises(BackendError, match="refuses the API key") as caught:
        asyncio.run(main())
    assert not isinstance(caught.value, ServiceDown)


@pytest.mark.parametrize("key", [None, "", "sk-123"])
def test_a_missing_or_malformed_key_is_bad_input(monkeypatch, key):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)

    async def main():
        async with connect("http://127.0.0.1:9", key):
            raise AssertionError

    with pytest.raises(BadInputError, match="TINKER_API_KEY"):
        asyncio.run(main())


def test_the_address_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TINKER_API_KEY", KEY)

    async def main():
        async with connect():
            raise AssertionError

    with pytest.raises(ServiceDown, match=r"127\.0\.0\.1:9"):
        asyncio.run(main())


def fails(errors, result="done"):
    """A call that raises the given errors in turn, then returns; and the list of its calls."""
    calls = []

    async def call():
        calls.append(time.monotonic())
        if len(calls) <= len(errors):
            raise errors[len(calls) - 1]
        return result

    return call, calls


def guarded(method, call, **options):
    async def main():
        guard = Guard("http://127.0.0.1:9", KEY, **options)
        try:
            return await getattr(guard, method)("Sampling", call)
        finally:
            await guard.close()

    return asyncio.run(main())


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda e: f"{type(e).__name__}-{getattr(e, 'status_code', '')}")
def test_transient_failures_are_retried_with_growing_pauses_and_a_bound(error):
    assert is_transient(error)
    call, calls = fails([error, error])
    assert guarded("repeatable", call, pause=0.05) == "done"
    pauses = [b - a for a, b in itertools.pairwise(calls)]
    assert pauses[0] >= 0.05
    assert pauses[1] >= 0.1
    call, calls = fails([error] * 100)
    with pytest.raises(BackendError, match="Sampling failed at http://127"):
        guarded("repeatable", call, tries=2, pause=0.05)
    assert len(calls) == 2


@pytest.mark.parametrize("error", FINAL, ids=lambda e: f"{type(e).__name__}-{getattr(e, 'status_code', '')}")
def test_other_failures_are_final_at_once(error):
    assert not is_transient(error)
    call, calls = fails([error])
    with pytest.raises(BackendError, match="Sampling failed"):
        guarded("repeatable", call)
    assert len(calls) == 1


@pytest.mark.parametrize("error", [*TRANSIENT[:4], *FINAL[:2]])
def test_a_training_call_is_never_repeated(error):
    call, calls = fails([error])
    with pytest.raises(BackendError):
        guarded("once", call)
    assert len(calls) == 1


def test_a_call_that_never_ends_is_ended_by_its_limit():
    with pytest.raises(BackendError, match=r"did not answer within 0\.5 s"):
        guarded("once", lambda: asyncio.sleep(60), limit=0.5)


def test_waiting_calls_fail_when_the_health_is_gone_and_only_then():
    async def main():
        async with service(reply("200 OK")) as address:
            guard = Guard(address, KEY, patience=0.3, interval=0.1)
            healthy = await guard.once("Sampling", lambda: asyncio.sleep(1.5, "alive"))
        # The service has now gone away.
        started = time.monotonic()
        waiting = [guard.once("Sampling", lambda: asyncio.sleep(60)) for _ in range(5)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        await guard.close()
        return healthy, outcomes, time.monotonic() - started, len(asyncio.all_tasks())

    healthy, outcomes, took, tasks = asyncio.run(main())
    assert healthy == "alive"
    assert all(isinstance(outcome, ServiceDown) for outcome in outcomes)
    assert took < 8
    assert tasks == 1


def test_a_service_that_goes_away_in_the_middle_is_named_within_ten_seconds():
    """Where connections are refused nothing listens any more; waiting out a minute of patience would help nobody."""

    async def main():
        async with service(reply("200 OK")) as address:
            guard = Guard(address, KEY)
            await guard.once("Sampling", lambda: asyncio.sleep(0.1))
        started = time.monotonic()
        with pytest.raises(ServiceDown, match=f"No healthy Tinker service at {address}"):
            await guard.once("Sampling", lambda: asyncio.sleep(60))
        await guard.close()
        return time.monotonic() - started

    assert asyncio.run(main()) < 10


def test_a_service_that_answers_503_is_waited_for():
    async def main():
        async with service(reply("503 Service Unavailable")) as address:
            guard = Guard(address, KEY, refused=0.0, interval=0.1)
            alive = await guard.once("Sampling", lambda: asyncio.sleep(1.5, "alive"))
            await guard.close()
            return alive

    assert asyncio.run(main()) == "alive"


def test_the_end_of_the_servers_process_is_seen_at_once():
    started = time.monotonic()
    with pytest.raises(ServiceDown, match="killed"):
        guarded("once", lambda: asyncio.sleep(60), process_ended=lambda: "the server was killed")
    assert time.monotonic() - started < 2


def test_a_cancelled_caller_leaves_nothing_running():
    async def main():
        guard = Guard("http://127.0.0.1:9", KEY)
        task = asyncio.ensure_future(guard.once("Sampling", lambda: asyncio.sleep(60)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await guard.close()
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1


def test_a_proxy_for_the_outside_is_not_asked_for_this_machine(monkeypatch):
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")

    async def main():
        async with service(reply("200 OK")) as address:
            with pytest.raises(ServiceDown):
                await probe(address, KEY, tries=1)
            reach_without_proxy(address)
            await probe(address, KEY, tries=1)

    asyncio.run(main())
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1"
    reach_without_proxy("https://tinker.example.org")
    assert os.environ["no_proxy"] == "127.0.0.1"
