"""The key of a request: given, TINKER_API_KEY, what TINKER_CREDENTIAL_CMD prints, or stored by `tinker auth login`.

The kinds of tinker 0.38.0 in its order, without importing it, which takes seconds, and with the limits that it lacks: a
command that hangs, or a FIFO where the stored keys should be, is a sentence.
"""

import asyncio
import base64
import json
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

from paritygate.bootstrap import watch, watched
from paritygate.errors import BadInputError, remember_key
from paritygate.spec.strict import parse_json, read_plain

NEEDED = "set TINKER_API_KEY, name a command that prints a key in TINKER_CREDENTIAL_CMD, or run `tinker auth login`"
COMMAND = "TINKER_CREDENTIAL_CMD"
STORED = "~/.tinker/credentials.json"
COMMAND_SECONDS = 5.0  # from a command's start to its end
MOST_PRINTED = 64 * 1024  # bytes
FRESH_SECONDS = 60.0  # a command is not run again within these


class Credential:
    """One credential of the SDK's kinds, in the SDK's order; raises BadInputError when there is none that can be used.

    given: the key itself where it is a fixed one, None where a command prints it: then the SDK runs the command.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._base_url = base_url
        self._printed: tuple[float, str] | None = None
        self._command = os.environ.get(COMMAND, "")
        self.given: str | None = None
        try:
            where, key = "TINKER_API_KEY", api_key or os.environ.get("TINKER_API_KEY", "")
            if not key and not self._command:
                where, key = stored_key()
            if key and not (self._command and not key.startswith(("tml-", "eyJ"))):
                self.given = usable(key, f"{where} holds")
        except ValueError as error:
            raise self._none(str(error)) from None
        if self.given is None and not self._command:
            raise self._none("there is none")

    async def token(self) -> str:
        """What a request carries now; BadInputError where the command prints nothing of use, or the key has expired."""
        if self._printed is not None and time.monotonic() - self._printed[0] < FRESH_SECONDS:
            return self._printed[1]
        try:
            if self.given is not None:
                return usable(self.given, "the key is")
            token = await printed_key(self._command)
        except ValueError as error:
            raise self._none(str(error)) from None
        self._printed = (time.monotonic(), token)
        return token

    def _none(self, why: str) -> BadInputError:
        return BadInputError(f"No key for {self._base_url}: {why}; {NEEDED}.")


def usable(key: str, holds: str) -> str:
    """The key, where a request can carry it; ValueError, with `holds` before what it is, and never the key itself."""
    if not key.startswith(("tml-", "eyJ")):
        raise ValueError(f"{holds} what is no key (a key starts with tml-)")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"{holds} a character that no key has (a blank, a line end?)")
    if key.startswith("eyJ"):
        try:
            expired = time.time() >= expiry(key)
        except (ValueError, KeyError, TypeError, IndexError):
            raise ValueError(f"{holds} a JWT that cannot be read") from None
        if expired:
            raise ValueError(f"{holds} a JWT that has expired")
    remember_key(key)
    return key


def expiry(jwt: str) -> float:
    """When a JWT expires, as a Unix time: the claim `exp` of its payload, whose signature is the service's matter."""
    payload = jwt.split(".")[1]
    return float(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])


def stored_key() -> tuple[str, str]:
    """(file, default key) of `tinker auth login`, the key "" where there is none; ValueError for another file."""
    path = os.path.expanduser(STORED)
    try:
        record: dict[str, Any] = parse_json(read_plain(path))
        default = record.get("default")
        chosen = record.get("keys", {}).get(default) if default is not None else None
        return path, "" if chosen is None else chosen["key"] + ""
    except FileNotFoundError:
        return path, ""
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what `tinker auth login` stores ({_line(str(error))})") from None


async def printed_key(command: str) -> str:
    """What a credential command prints, in COMMAND_SECONDS; ValueError with what is wrong with it, in one clause.

    The command is the leader of a session of its own, has no stdin, and is killed with all its children where it has
    not ended in time, or this process ends before it. One that leaves a child behind with its output open has not
    ended.
    """
    with watch() as stdin:
        argv = watched("/bin/sh", "-c", command, session=True)
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(*argv, stdin=stdin, stdout=PIPE, stderr=PIPE, start_new_session=True)
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:  # asyncio would kill the leader alone, and wait for who holds its pipes
            await _kill(await starting)
            raise
        errors, status = asyncio.ensure_future(_tail(process.stderr)), None
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                printed = await _head(process.stdout)
                if len(printed) > MOST_PRINTED:
                    raise ValueError(f"{COMMAND} printed more than {MOST_PRINTED >> 10} KiB")
                stderr = await errors
                status = await process.wait()
        except TimeoutError:
            raise ValueError(f"{COMMAND} had not ended after {COMMAND_SECONDS:g} s") from None
        finally:
            errors.cancel()
            if status is None:
                await _kill(process)
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
        raise ValueError(f"{COMMAND} {how} ({_line(stderr.decode(errors='replace')) or 'nothing on stderr'})")
    lines = printed.decode(errors="replace").strip().splitlines()
    if len(lines) != 1:
        what = f"{len(lines)} lines where a key is one" if lines else "an empty credential"
        raise ValueError(f"{COMMAND} printed {what}")
    return usable(lines[0], f"{COMMAND} printed")


async def _head(stream: asyncio.StreamReader | None) -> bytes:
    """All of a stream; of more than MOST_PRINTED bytes, somewhat more than those."""
    data = b""
    while stream is not None and len(data) <= MOST_PRINTED and (chunk := await stream.read(8192)):
        data += chunk
    return data


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    """The last bytes of a stream."""
    data = b""
    while stream is not None and (chunk := await stream.read(8192)):
        data = (data + chunk)[-1000:]
    return data


async def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process._transport.close()  # pyright: ignore - its pipes, which a child in a session of its own may keep open
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await process.wait()


def _line(text: str) -> str:
    """The last line of a text, as far as it can be shown in a sentence."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return "".join(c for c in lines[-1] if c.isprintable())[:160].rstrip(".") if lines else ""
