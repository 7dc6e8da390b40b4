"""Addresses where nobody speaks Tinker: each is one sentence with exit code 5 within the seconds of a first contact."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from paritygate.backend import contact
from paritygate.backend.contact import first_contact
from paritygate.errors import BackendError
from tests.foreign_service import KEY

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
TLS_ALERT = bytes.fromhex("15030300020246")


async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(-1)


def says(*pieces: bytes, every: float = 0.0, forever: bool = False) -> Callable[..., Awaitable[None]]:
    """A service that says the pieces after a request's head, one `every` seconds, the last without end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(every)
        while forever:
            writer.write(pieces[-1])
            await writer.drain()
            await asyncio.sleep(every)

    return answer


async def no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


MEBIBYTE = b"%x\r\n%s\r\n" % (2**20, b" " * 2**20)
SILENT = {
    "answers nothing": nothing,
    "closes at once": says(),
    "one byte of the head at a time": says(*(bytes([byte]) for byte in HEAD * 9), every=0.1),
    "one byte of the body at a time": says(HEAD + b"content-length: 999\r\n\r\n", b" ", every=0.1, forever=True),
    "a body without end": says(HEAD + b"transfer-encoding: chunked\r\n\r\n", MEBIBYTE, forever=True),
    "a head without end": says(HEAD, b"x-filler: " + b"a" * 1000 + b"\r\n", forever=True),
    "another protocol": says(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "TLS where plain HTTP is asked": says(TLS_ALERT),
    "a page for everything": says(HEAD + b"content-length: 13\r\n\r\n<html></html>"),
    "plain HTTP where TLS is asked": no_tls,
}


@contextlib.asynccontextmanager
async def served(answer: Callable[..., Awaitable[None]], scheme: str) -> AsyncGenerator[str]:
    tasks: set[asyncio.Task[None]] = set()

    async def connected(*streams: asyncio.StreamReader | asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await answer(*streams)
        streams[1].close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()


async def contacted(name: str, seconds: dict[str, float]) -> str:
    scheme = "https" if name.startswith("plain HTTP") else "http"
    async with served(SILENT[name], scheme) as url:
        started = time.monotonic()
        with pytest.raises(BackendError) as failed:
            await first_contact((), url, KEY)
        seconds[name] = time.monotonic() - started
        assert url in str(failed.value)
        assert failed.value.exit_code == 5
        assert "\n" not in str(failed.value)
        return str(failed.value)


def test_a_silent_address_is_named_within_the_seconds_of_a_first_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them at once, at a fifth of the seconds; nothing that is sent is kept without a bound."""
    monkeypatch.setattr(contact, "SECONDS", 1.7)
    monkeypatch.setattr(contact, "TRY_SECONDS", 0.6)
    seconds: dict[str, float] = {}

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(contacted(name, seconds) for name in SILENT))

    sentences = dict(zip(SILENT, asyncio.run(all_at_once()), strict=True))
    assert max(seconds.values()) < 4.0, seconds
    assert "does not say which models it serves" in sentences["a page for everything"]
    assert "TimeoutError" in sentences["answers nothing"]
    assert "more than 4 MiB" in sentences["a body without end"]


def test_an_address_that_is_none_says_why() -> None:
    for url, why in (("http://127.0.0.1:99999", "OverflowError"), ("127.0.0.1:9", "missing an 'http://'")):
        with pytest.raises(BackendError, match=f"{url} .*{why}"):
            asyncio.run(first_contact((), url, KEY))


def test_a_full_queue_is_a_silent_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes the connection, as behind a firewall that drops what comes."""
    monkeypatch.setattr(contact, "SECONDS", 1.7)
    monkeypatch.setattr(contact, "TRY_SECONDS", 0.6)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        started = time.monotonic()
        with pytest.raises(BackendError, match="No healthy Tinker service"):
            asyncio.run(first_contact((), f"http://127.0.0.1:{listener.getsockname()[1]}", KEY))
        assert time.monotonic() - started < 4.0


def test_a_name_that_is_looked_up_without_end_is_named_too() -> None:
    """A resolver that does not answer: the process ends with its sentence, whatever the look-up's thread does."""
    lines = (
        "import asyncio, socket, sys, time",
        "real = socket.getaddrinfo",
        "def slow(host, *rest, **named):",
        "    time.sleep(60.0 if host in ('a.b', b'a.b') else 0.0)",
        "    return real(host, *rest, **named)",
        "socket.getaddrinfo = slow",
        "from paritygate.backend import contact",
        "contact.SECONDS, contact.TRY_SECONDS = 1.7, 0.6",
        "try:",
        f"    asyncio.run(contact.first_contact([], 'http://a.b:9', {KEY!r}))",
        "except Exception as error:",
        "    print(type(error).__name__, error)",
    )
    impl = str(Path(contact.__file__).parents[2])
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    command = [sys.executable, "-c", "\n".join(lines)]
    started = time.monotonic()
    done = subprocess.run(
        command, env=kept | {"PYTHONPATH": impl}, capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.startswith("ServiceDown No healthy Tinker service at http://a.b:9 (")
    assert time.monotonic() - started < 10
