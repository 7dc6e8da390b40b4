"""A call without an answer ends, and so does what the SDK has running for it; a busy service is left alone."""

import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from paritygate.errors import BackendError
from paritygate.service.checks import CHECKS
from paritygate.service.checks.wire import same_model
from paritygate.service.client import Datum, Session
from paritygate.service.connection import Connection, NoAnswer, probe, with_limit
from paritygate.service.lab import Lab
from paritygate.service.obligations import load
from paritygate.service.outcome import Measured
from paritygate.service.runner import run_one
from tests.foreign_service import KEY, Faults, ForeignService
from tests.scripted_service import POLICY


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


DATUM = Datum((5, 6, 7), np.array([6, 7, 8])).with_inputs(logprobs=[-1.0] * 3, advantages=[1.0] * 3)


@pytest.mark.parametrize(("kind", "code"), [("asample", 429), ("result:forward_backward", 503)])
def test_a_service_that_says_when_to_come_back_is_left_alone_until_then(kind: str, code: int) -> None:
    """The SDK asks for results again at once after 503, and for a sample after a second: here each comes twice."""
    asked: list[float] = []

    def status(request: str, number: int) -> int | None:
        if request == kind:
            asked.append(time.monotonic())
        return code if request == kind and number < 1 else None

    with ForeignService(faults=Faults(status=status, headers={"Retry-After": "1.5"})) as service:
        connection = Connection(service.url, KEY, POLICY, limit=30.0)
        with Session(connection) as session:
            if "asample" in kind:
                session.sampler().sample((5, 6, 7), 1, max_tokens=50, temperature=1.0, seed=1, stop=[248046])
            else:
                session.create(32, seed=1).forward_backward([DATUM], "importance_sampling")
    assert len(asked) == 2
    assert 1.49 <= asked[1] - asked[0] < 20


def test_a_service_that_stays_busy_ends_the_proof_and_departs_from_nothing() -> None:
    """It asks for an hour, of which a minute would be kept; the call's own limit comes first."""
    faults = Faults(status=lambda kind, n: 429 if kind == "asample" else None, headers={"Retry-After": "3600"})
    with ForeignService(faults=faults) as service:
        connection = Connection(service.url, KEY, POLICY, limit=2.0)
        with Session(connection) as session:
            sampler = session.sampler()
            with pytest.raises(BackendError, match=r"asks to be left alone .* sample had no answer within 2 s"):
                sampler.sample((5, 6, 7), 1, max_tokens=50, temperature=1.0, seed=1, stop=[248046])
        assert service.requests["asample"] == 1


@pytest.mark.parametrize(
    ("asked", "reported", "same"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", True),
        ("tiny", "tiny", True),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3.5-2B", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", False),
        ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", False),
        ("default", "listed-too", False),
        ("default", "", False),  # the SDK's get_tokenizer fails
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B/instruct", None),  # the SDK's docs: a variant
        ("Qwen/Qwen3-8B:fast", "Qwen/Qwen3-8B", None),
        ("Qwen/Qwen3-8B", "qwen3-8b", None),
        ("Qwen/Qwen3-8B", "mirror/Qwen3-8B", None),
        ("Qwen/Qwen3-8B", "/models/Qwen3-8B/", None),
        ("Qwen/Qwen3-8B", "/cache/models--Qwen--Qwen3-8B/snapshots/0123abc", None),
        ("Qwen/Qwen3-8B", "/models/policy", None),
        ("default", "Qwen/Qwen3-8B", None),  # a service's own name for it
        ("/models/Qwen3-8B", "Qwen/Qwen3-8B", None),
    ],
)
def test_whether_a_reported_name_is_that_of_another_model(asked: str, reported: str, same: bool | None) -> None:
    assert same_model(asked, reported, [asked, "listed-too"]) is same


def test_a_key_does_not_follow_a_redirect() -> None:
    """Neither that of the probe, whose library would take it along to any host, nor the SDK's, which is not begun."""
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.server is not first:
                self.send_response(200)
            else:
                self.send_response(307)
                self.send_header("Location", f"http://127.0.0.1:{second.server_port}{self.path}")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    address = ("127.0.0.1", 0)
    with ThreadingHTTPServer(address, Elsewhere) as first, ThreadingHTTPServer(address, Elsewhere) as second:
        for server in (first, second):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(BackendError, match=f"redirects to http://127.0.0.1:{second.server_port}/api/v1/healthz"):
            probe(f"http://127.0.0.1:{first.server_port}", "tml-test")
        for server in (first, second):
            server.shutdown()
    assert asked == ["/api/v1/healthz"]
