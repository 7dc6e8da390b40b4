"""An HTTP proxy before a Tinker server that does what networks do: refusals, resets, half answers, repeats, stalls."""

import asyncio
import random
import threading
from collections import Counter
from urllib.parse import urlsplit

import httpx

FAULTS = ("408", "429", "500", "502", "reset", "truncated", "duplicate", "stall")
HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


class FaultyProxy:
    """Serves on 127.0.0.1 in its own thread; each kind of fault befalls `rate` of the requests, by a fixed seed."""

    def __init__(self, target: str, *, rate: float, stall: float, seed: int) -> None:
        self.target = target.rstrip("/")
        self.rate = rate
        self.stall = stall
        self.done: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._open: set[asyncio.Task[None]] = set()
        self.url = ""

    def __enter__(self) -> "FaultyProxy":
        self._thread.start()
        self._ready.wait(timeout=30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=30)
        self._loop.close()

    async def _serve(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=120, limits=limits) as self._client:
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._stop.wait()
            server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, httpx.HTTPError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; False when the connection is over."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = [tuple(line.split(": ", 1)) for line in head[1:] if ": " in line]
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        body = await reader.readexactly(length)
        kept = [(name, value) for name, value in headers if name.lower() not in HOP]
        fault = self._fault(path)
        self.done[fault or "clean"] += 1
        if fault is not None and fault.isdigit():
            writer.write(f"HTTP/1.1 {fault} Injected\r\ncontent-length: 2\r\n\r\n{{}}".encode())
            await writer.drain()
            return True
        if fault == "reset":
            writer.transport.abort()
            return False
        if fault == "stall":
            await asyncio.sleep(self.stall)
        request = {"method": method, "url": self.target + path, "headers": kept, "content": body}
        if fault == "duplicate":
            await self._client.request(**request)
        answer = await self._client.request(**request)
        return await self._answer(writer, answer, truncated=fault == "truncated")

    async def _answer(self, writer: asyncio.StreamWriter, answer: httpx.Response, *, truncated: bool) -> bool:
        kept = [(n, v) for n, v in answer.headers.items() if n.lower() not in HOP | {"content-encoding"}]
        lines = [f"HTTP/1.1 {answer.status_code} X", *(f"{n}: {v}" for n, v in kept)]
        lines += [f"content-length: {len(answer.content)}", "", ""]
        writer.write("\r\n".join(lines).encode("latin-1"))
        writer.write(answer.content[: len(answer.content) // 2] if truncated else answer.content)
        await writer.drain()
        return not truncated

    def _fault(self, path: str) -> str | None:
        if urlsplit(path).path.endswith("/healthz"):
            return None  # health has a test of its own
        place = self._rng.random() / self.rate
        return FAULTS[int(place)] if place < len(FAULTS) else None
