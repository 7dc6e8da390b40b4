"""A key that a service repeats is in nothing that is printed, raised or written: no part of it either."""

import asyncio
import base64
import json
import logging

import pytest

from paritygate.backend import connect
from paritygate.errors import BackendError, one_line, redacted, remember_key
from tests.foreign_service import KEY, serving
from tests.scripted_service import POLICY

SECRET = "tml-Zq8vN2xW7pL4sD9fG1hJ6kM3"


def parts_of(key: str, text: str) -> list[str]:
    """What of the key, after its kind, is in a text."""
    body = key.removeprefix("tml-")
    return [body[i : i + 5] for i in range(len(body) - 4) if body[i : i + 5] in text]


def test_a_key_is_redacted_in_every_form_that_a_text_has_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    awkward = "tml-a\"b\\c/d'e&f+g"
    remember_key(awkward)
    for text in (awkward, repr(awkward), json.dumps(awkward), "http://x/?k=tml-a%22b%5Cc%2Fd%27e%26f%2Bg"):
        assert "[key]" in redacted(text)
        assert "b" not in redacted(text).replace("[key]", "")
    monkeypatch.setenv("TINKER_API_KEY", SECRET)
    assert redacted(f"you sent {SECRET}{SECRET}.") == "you sent [key][key]."
    jwt = ".".join(base64.urlsafe_b64encode(b'{"alg": "none", "exp": 4e9}').decode().rstrip("=") for _ in range(3))
    assert redacted(f"expired: {jwt}") == "expired: [key]"
    assert redacted("a key starts with tml- or eyJ") == "a key starts with tml- or eyJ"
    assert str(BackendError(f"no {SECRET}")) == "no [key]"


def test_a_key_is_redacted_before_a_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", SECRET)
    for length in range(60, 100):
        assert not parts_of(SECRET, one_line(f"{'x ' * 40}\n {SECRET} is wrong", length))


@pytest.mark.parametrize("code", [402, 422])
def test_a_session_repeats_no_key(code: int) -> None:
    async def samples() -> None:
        async with connect(service.url, KEY) as backend:
            await backend.training(POLICY, rank=32, seed=1)

    kind, length = {402: ("healthz", 160), 422: ("create_model", 440)}[code]
    detail = f"{'x' * length} {KEY} is the key"
    faults = {"status": lambda asked, n: code if asked == kind else None, "detail": detail}
    with serving(**faults) as service, pytest.raises(BackendError) as error:
        asyncio.run(samples())
    assert "xxx" in str(error.value)
    assert not parts_of(KEY, str(error.value))


def test_what_the_sdk_logs_has_no_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs a service's messages, on stderr where nobody has configured another place."""

    async def opens() -> None:
        async with connect(service.url, KEY):
            last = logging.lastResort
            assert last is not None
            record = logging.LogRecord("tinker", logging.WARNING, "", 0, "refused: %s", (KEY,), None)
            last.handle(record)

    with serving() as service:
        asyncio.run(opens())
    assert capsys.readouterr().err == "refused: [key]\n"
