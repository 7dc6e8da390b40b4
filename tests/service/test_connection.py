"""A call without an answer ends, and so does what the SDK has running for it."""

import threading
from concurrent.futures import Future

import pytest

from paritygate.service.checks import CHECKS
from paritygate.service.connection import Connection, NoAnswer, with_limit
from paritygate.service.lab import Lab
from paritygate.service.obligations import load
from paritygate.service.outcome import Measured
from paritygate.service.runner import run_one


class Wrapped:
    """As the SDK's futures: `result` waits, `future()` is the one of the library."""

    def __init__(self) -> None:
        self.inner: Future[int] = Future()

    def result(self) -> int:
        return self.inner.result()

    def future(self) -> Future[int]:
        return self.inner


def test_a_call_without_an_answer_is_cancelled() -> None:
    """Else the SDK repeats it for ever: with HTTP 5xx without a pause, on the processor that the next calls need."""
    wrapped, plain = Wrapped(), Future[int]()
    for future in (wrapped, plain):
        with pytest.raises(NoAnswer, match="forward: no answer within"):
            with_limit("forward", lambda future=future: future, 0.05)
    assert wrapped.inner.cancelled()
    assert plain.cancelled()


def test_a_submission_that_blocks_ends_as_well() -> None:
    """Nothing is there to be cancelled yet."""
    blocked = threading.Event()
    with pytest.raises(NoAnswer, match="sample: no answer"):
        with_limit("sample", blocked.wait, 0.05)
    blocked.set()


def test_an_answer_is_not_cancelled() -> None:
    wrapped = Wrapped()
    threading.Timer(0.05, wrapped.inner.set_result, [7]).start()
    assert with_limit("forward", lambda: wrapped, 5.0) == 7
    assert not wrapped.inner.cancelled()


def test_the_second_showing_waits_for_twenty_times_the_slowest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs costs its limit, twice: the first time all of it, so that no slow answer is called none."""
    connection = Connection("http://127.0.0.1:1", "tml-test", "tiny", limit=60.0, slowest=1.5)
    limits: list[float] = []

    def off(lab: Lab) -> Measured:
        limits.append(lab.connection.limit)
        return Measured(1.0, "it is off")

    monkeypatch.setitem(CHECKS, "wire/models", off)
    [entry] = load().only(["wire/models"]).entries
    assert run_one(Lab(connection), entry, {}).outcome == "departs"
    assert limits == [60.0, 30.0]
    assert connection.limit == 60.0
