"""A service that fails now and then: through the real SDK and server, faults are ridden out and change no result."""

import asyncio
import contextlib
import time
from collections import Counter
from urllib.parse import urlsplit

import pytest

from paritygate.backend import ServiceDown, connect, cross_entropy_datum
from paritygate.server import start

TOKENS = [5, 80, 90, 100, 110, 120]
BUSY = b"HTTP/1.1 %d Busy\r\nContent-Length: 2\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{}"


@pytest.fixture(scope="module")
def tiny():
    server = start("tiny")
    yield server
    server.stop()


class Flaky:
    """A proxy that spoils chosen requests to a server: `faults[(route, n)]` is what happens to the n-th of a route.

    An int is answered instead of the server; "reset before" closes the connection before the server heard of it, "reset
    after" when the server has done its work and its answer is lost.
    """

    def __init__(self, base_url: str, faults: dict[tuple[str, int], int | str]) -> None:
        self._target = urlsplit(base_url)
        self._faults = dict(faults)
        self.met: list[tuple[str, int]] = []
        self.seen: Counter[str] = Counter()
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def serving(self):
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await asyncio.sleep(0.1)
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.sleep(0.1)

    async def _handle(self, reader, writer):
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._one(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")), 0)
        body = await reader.readexactly(length)
        route = lines[0].split(" ")[1].split("?")[0].rsplit("/", 1)[-1]
        number = self.seen[route]
        self.seen[route] += 1
        fault = self._faults.pop((route, number), None)
        if fault is not None:
            self.met.append((route, number))
        if isinstance(fault, int):
            writer.write(BUSY % fault)
            return
        if fault == "reset before":
            return
        kept = [line for line in lines[1:] if line and not line.lower().startswith("connection:")]
        request = "\r\n".join([lines[0], *kept, "Connection: close", "", ""]).encode() + body
        upstream, sending = await asyncio.open_connection(self._target.hostname, self._target.port)
        try:
            sending.write(request)
            answer = await upstream.read(-1)
        finally:
            sending.close()
        if fault != "reset after":
            writer.write(answer)
            await writer.drain()


async def life(address, key, **options):
    """A short training session; returns everything that it computed."""
    async with connect(address, key, **options) as backend:
        trainer = await backend.training(backend.models[0], rank=4, seed=0)
        losses = []
        for _ in range(2):
            passed = await trainer.forward_backward([cross_entropy_datum(TOKENS, [0, 1, 1, 1, 1, 1])], "cross_entropy")
            await trainer.optim_step(1e-2)
            losses.append(passed.loss)
        sampler = await trainer.snapshot("s")
        samples = [await sampler.sample(TOKENS, max_tokens=5, temperature=1.0, seed=seed) for seed in range(3)]
        return losses, samples, await sampler.score(TOKENS)


FAULTS = {
    ("config", 0): 503,
    ("create_model", 0): 503,
    ("forward_backward", 0): "reset after",  # its work is done: the repeated request must not count twice
    ("forward_backward", 2): 503,
    ("optim_step", 0): "reset after",
    ("optim_step", 2): 429,
    ("asample", 0): 500,
    ("asample", 2): "reset before",
    ("asample", 4): "reset after",
    ("retrieve_future", 2): 502,
    ("retrieve_future", 5): "reset before",
    ("retrieve_future", 9): 408,
}


def test_faults_are_ridden_out_and_change_no_result(tiny):
    async def main():
        flaky = Flaky(tiny.base_url, FAULTS)
        async with flaky.serving() as address:
            return await life(address, tiny.api_key), flaky

    spoilt, flaky = asyncio.run(main())
    clean = asyncio.run(life(tiny.base_url, tiny.api_key))
    assert spoilt == clean
    assert set(flaky.met) == set(FAULTS)


def test_a_service_that_always_fails_one_route_is_given_up(tiny):
    async def main():
        flaky = Flaky(tiny.base_url, {("asample", n): 503 for n in range(1000)})
        async with flaky.serving() as address:
            return await life(address, tiny.api_key, limit=4.0)

    with pytest.raises(ServiceDown, match="Sampling"):
        asyncio.run(main())


def test_a_service_that_goes_away_in_a_session_is_left_within_ten_seconds(tiny):
    """The failure of the call, and the end of both sessions, which the SDK alone would announce for many seconds."""

    async def main():
        flaky = Flaky(tiny.base_url, {})
        async with contextlib.AsyncExitStack() as sessions:
            async with flaky.serving() as address:
                outer = await sessions.enter_async_context(connect(address, tiny.api_key))
                inner = await sessions.enter_async_context(outer.session())
                trainer = await inner.training(inner.models[0], rank=4, seed=0)
            gone = time.monotonic()
            with pytest.raises(ServiceDown, match=f"No healthy Tinker service at {address}"):
                await trainer.forward_backward([cross_entropy_datum(TOKENS, [0, 1, 1, 1, 1, 1])], "cross_entropy")
        return time.monotonic() - gone

    assert asyncio.run(main()) < 10
