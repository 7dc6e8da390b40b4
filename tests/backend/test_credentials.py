"""Keys that cannot be used: each is one sentence with exit code 2, within seconds, and no process is left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paritygate.backend import credentials
from paritygate.backend.connection import connect
from paritygate.backend.contact import first_contact
from paritygate.backend.credentials import Credential
from paritygate.errors import BackendError, BadInputError
from tests.foreign_service import KEY, serving
from tests.processes import runs
from tests.scripted_service import POLICY

URL = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_other_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key of the environment or of this machine's user takes part."""
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def token() -> str:
    async def ask() -> str:
        return await Credential(URL).token()

    return asyncio.run(ask())


def refusal() -> str:
    with pytest.raises(BadInputError) as refused:
        token()
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"No key for {URL}: ")
    return str(refused.value)


def test_a_command_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shell, what it waits for, and what it left in the background holding its output."""
    assert credentials.COMMAND_SECONDS == 5.0
    monkeypatch.setattr(credentials, "COMMAND_SECONDS", 0.5)
    ids = tmp_path / "ids"
    hangs = f"echo $$ >> {ids}; sleep 600 & echo $! >> {ids}; "
    for command in (f"{hangs} wait", f"{hangs} echo {KEY}"):
        ids.unlink(missing_ok=True)
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", command)
        started = time.monotonic()
        assert "TINKER_CREDENTIAL_CMD had not ended after 0.5 s" in refusal()
        assert time.monotonic() - started < 3
        assert not [pid for pid in map(int, ids.read_text().split()) if runs(pid)]


@pytest.mark.parametrize("number", ["TERM", "HUP", "INT", "KILL"])
def test_a_command_ends_with_the_process_that_asked(number: str, tmp_path: Path) -> None:
    """However that ends: the shell, what it waits for and its children do not go on for nobody."""
    ids, asks = tmp_path / "ids", "import asyncio; from paritygate.backend.credentials import printed_key as asked; "
    command = (
        f"sleep 600 & echo $! >> {ids}; trap '' HUP INT TERM; sleep 600 & echo $! >> {ids}; echo $$ >> {ids}; wait"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(credentials.__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", f"{asks}asyncio.run(asked({command!r}))"], env=environment, stderr=subprocess.DEVNULL
    )
    while not ids.exists() or len(ids.read_text().split()) < 3:
        time.sleep(0.02)
    process.send_signal(getattr(signal, f"SIG{number}"))
    assert process.wait(timeout=10) != 0
    assert not [pid for pid in map(int, ids.read_text().split()) if runs(pid)]


def test_a_command_that_is_no_longer_awaited_while_it_starts_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C in that moment left a run that waits: asyncio kills the shell alone, whose children hold its output."""
    ids, create = tmp_path / "ids", asyncio.create_subprocess_exec
    command = f"sleep 600 & echo $! >> {ids}; echo $$ >> {ids}; wait"

    async def ask() -> None:
        starting = asyncio.Event()

        async def slow_start(*argv: str, **options: Any) -> Any:
            process = await create(*argv, **options)
            while not ids.exists() or len(ids.read_text().split()) < 2:
                await asyncio.sleep(0.01)
            starting.set()
            await asyncio.sleep(0.1)
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", slow_start)
        asking = asyncio.ensure_future(credentials.printed_key(command))
        await starting.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(ask())
    assert not [pid for pid in map(int, ids.read_text().split()) if runs(pid)]


def test_what_a_command_leaves_on_purpose_stays_and_its_watch_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of an agent that keeps a login: it holds no output of the command open."""
    left = tmp_path / "left"
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"sleep 600 >/dev/null 2>&1 & echo $! $$ > {left}; echo {KEY}")
    assert token() == KEY
    agent, group = map(int, left.read_text().split())
    try:
        for _ in range(100):
            members = [path.parent.name for path in Path("/proc").glob("[0-9]*/stat") if group_of(path) == group]
            if members == [str(agent)]:
                break
            time.sleep(0.02)
        assert members == [str(agent)]
    finally:
        with suppress(ProcessLookupError):
            os.kill(agent, signal.SIGKILL)


def group_of(stat: Path) -> int | None:
    """The process group of a process that runs; None where it has ended meanwhile."""
    try:
        state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(group)


ENDLESS = f"{sys.executable} -c \"import sys\nwhile True: sys.stdout.write('tml-' * 4096)\""
BAD_COMMANDS = [
    ("true", "printed an empty credential"),
    ("echo; echo '  '", "printed an empty credential"),
    ("echo tml-a; echo tml-b", "printed 2 lines where a key is one"),
    ("echo please log in first", "printed what is no key"),
    ("printf 'tml-a\\0b'", "printed a character that no key has"),
    ("printf 'tml-\\377'", "printed a character that no key has"),
    ("echo tml-\u00e9", "printed a character that no key has"),
    ("echo eyJhbGciOiJub25lIn0", "printed a JWT that cannot be read"),
    ("echo eyJhbGciOiJub25lIn0.eyJleHAiOjF9.x", "printed a JWT that has expired"),
    (ENDLESS, "printed more than 64 KiB"),
    ("echo tml-x; echo 'no session; log in' >&2; exit 3", "ended with exit code 3 (no session; log in)"),
    ("kill -9 $$", "was ended by signal 9"),
    ("/there/is/no/such/command", "ended with exit code 127"),
]


@pytest.mark.parametrize(("command", "says"), BAD_COMMANDS, ids=[says[:30] for _, says in BAD_COMMANDS])
def test_what_a_command_may_not_print(monkeypatch: pytest.MonkeyPatch, command: str, says: str) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", command)
    sentence = refusal()
    assert f"TINKER_CREDENTIAL_CMD {says}" in sentence
    assert "tml-a" not in sentence  # what may be a secret is not shown


def test_a_command_is_asked_for_nothing_and_may_talk_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads an empty stdin, as much as it likes goes to stderr, and blanks around the key are none of it."""
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"cat; yes | head -c 300000 >&2; echo ' {KEY} '")
    assert token() == KEY


def test_keys_of_the_environment_that_no_request_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("tml-a\r", "tml-a\n", "tml-a b", "tml-\u00e9"):
        monkeypatch.setenv("TINKER_API_KEY", key)
        assert "TINKER_API_KEY holds a character that no key has" in refusal()
    monkeypatch.setenv("TINKER_API_KEY", "eyJgarbage")
    assert "TINKER_API_KEY holds a JWT that cannot be read" in refusal()
    monkeypatch.setenv("TINKER_API_KEY", "sk-another")
    assert "TINKER_API_KEY holds what is no key (a key starts with tml-)" in refusal()
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo {KEY}")  # as the SDK does then
    assert token() == KEY


def stored(home: Path, text: str | bytes | None = None) -> Path:
    path = home / ".tinker" / "credentials.json"
    path.parent.mkdir(exist_ok=True)
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


BROKEN = [
    "",
    "{",
    "[]",
    b"\xff\xfe",
    '{"default": "a", "keys": []}',
    '{"default": "a", "keys": {"a": {"name": "a"}}}',
    '{"default": "a", "keys": {"a": {"key": 7}}}',
    '{"default": ["a"], "keys": {"a": {"key": "tml-x"}}}',
]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_stored_credentials_that_are_broken(tmp_path: Path, text: str | bytes) -> None:
    path = stored(tmp_path, text)
    assert f"{path} is not what `tinker auth login` stores" in refusal()


def test_stored_credentials_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO would be waited for without end, a folder or a file in the place of its folder is no bug of ours."""
    path = stored(tmp_path)
    for make in (os.mkfifo, os.mkdir):
        make(path)
        assert f"{path} cannot be read" in refusal()
        path.unlink() if path.is_fifo() else path.rmdir()
    path.parent.rmdir()
    path.parent.write_text("")
    assert f"{path} cannot be read (Not a directory)" in refusal()
    monkeypatch.setattr(credentials, "read_plain", denied)
    assert f"{path} cannot be read (Permission denied)" in refusal()


def denied(path: Path) -> bytes:
    raise PermissionError(13, "Permission denied", str(path))


def test_stored_keys_are_chosen_as_the_sdk_chooses(tmp_path: Path) -> None:
    record = {"version": 1, "default": "b", "keys": {name: {"key": f"tml-{name}"} for name in "ab"}}
    stored(tmp_path, json.dumps(record))
    assert token() == "tml-b"
    for record["default"] in (None, "c"):
        stored(tmp_path, json.dumps(record))
        assert "there is none" in refusal()
    stored(tmp_path, json.dumps({"default": "a", "keys": {"a": {"key": "sk-a"}}}))
    assert f"{stored(tmp_path)} holds what is no key (a key starts with tml-)" in refusal()


def test_the_command_shares_the_seconds_of_first_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a slow command takes is not there for the probe's tries: ten seconds are ten seconds."""
    from paritygate.backend import contact

    granted: list[float] = []

    async def down(base_url: str, token: str, *, seconds: float) -> None:
        granted.append(seconds)
        raise BackendError("nobody")

    monkeypatch.setattr(contact, "probe", down)
    monkeypatch.setattr(contact, "SECONDS", 3.0)
    for command, most in ((f"echo {KEY}", 1.25), (f"sleep 1; echo {KEY}", 0.8)):
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", command)
        with pytest.raises(BackendError, match="nobody"):
            asyncio.run(first_contact((), URL))
        assert most - 0.3 < granted[-1] <= most


def test_the_sdk_asks_the_command_under_the_same_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A command that answers the first contact and hangs when the session opens: a sentence, not a wait."""
    asked = tmp_path / "asked"
    monkeypatch.setattr(credentials, "COMMAND_SECONDS", 0.5)
    command = f"test -e {asked} && sleep 600; touch {asked}; echo {KEY}"
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", command)
    monkeypatch.setattr("paritygate.backend.connection.load_tokenizer", lambda *_: None)

    async def opened(url: str) -> tuple[str, ...]:
        async with connect(url) as backend:
            return backend.models

    started = time.monotonic()
    with serving() as service, pytest.raises((BadInputError, BackendError), match=r"had not ended after 0\.5 s"):
        assert POLICY in asyncio.run(opened(service.url))
    assert time.monotonic() - started < 15
