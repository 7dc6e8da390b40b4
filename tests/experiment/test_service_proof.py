"""The phase service_proof: what it refuses, what it asks again, its receipt; a whole one is in test_foreign.py."""

import asyncio
import dataclasses
import gc
import json
import pkgutil
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import httpx
import pytest

from paritygate.backend.contact import Contact
from paritygate.errors import BackendError, BadInputError, Refused
from paritygate.experiment.audit import check_service_proof
from paritygate.experiment.phases.preflight import service_proof
from paritygate.experiment.plan import service_obligations
from paritygate.experiment.plan.service_obligations import JSON, RECEIPT, stands_on
from paritygate.experiment.run.journal import read_lines
from paritygate.receipts import PhaseChain
from paritygate.server import Running
from paritygate.service import report as reports
from paritygate.service.proof import prove_at
from paritygate.service.receipt import digest
from paritygate.service.runner import Result
from paritygate.spec import load
from paritygate.spec.schema import spec_folder
from tests.experiment.stub_proof import proving, report_of
from tests.experiment.tiny_spec import small_at_a_service, small_spec, write_spec

WIDE = Result("gradient/importance_sampling", "departs", 0.97, 0.005, 0.4, "the step is 0.97 off", "print()")
UNCLEAR = Result("state/saved_exactly", "undecided", because="the noise is too large")


pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the SDK's connections


@pytest.fixture(scope="module", autouse=True)
def sdk_garbage() -> Iterator[None]:
    """Collect what the SDK leaves while its warning is silenced, not in somebody else's test."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first contact, before any phase, has tests of its own."""

    async def first_contact(needs: Any, url: str) -> Contact:
        return Contact(url, (), {}, {need.model: None for need in needs})

    monkeypatch.setattr("paritygate.backend.contact.first_contact", first_contact)


def _forged(run: Path, change: Callable[[dict[str, Any]], object], *, chain: bool = True) -> None:
    """Forge the service receipt of a run carefully: its digest, that in the chain of phases, and the report too."""
    path, report = run / RECEIPT, run / JSON
    value, report_json = json.loads(path.read_text()), json.loads(report.read_text())
    change(value)
    value["sha256"] = digest(value)
    path.write_text(json.dumps(value))
    report_json["obligations"] = [
        {k: v for k, v in entry.items() if k != "tolerance"} for entry in value["obligations"]
    ]
    report_json |= {key: value[key] for key in ("endpoint", "model", "settings")}
    report.write_text(json.dumps(report_json))
    if chain:
        phases = sorted((run / "phases").iterdir())
        entries = [json.loads(phase.read_bytes()) for phase in phases]
        for phase in phases:
            phase.unlink()
        for entry in entries:
            if entry["phase"] == "service_proof":
                entry["record"]["facts"]["sha256"] = value["sha256"]
            PhaseChain(run).append(entry["phase"], entry["record"], entry["files"])


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a figure": (lambda r: r["obligations"][3].update(figure=0.3), "does not follow"),
    "another service": (lambda r: r.update(endpoint="http://example.org"), "of another service"),
    "another model": (lambda r: r.update(model="some/model"), "of another model"),
    "another rank": (lambda r: r["settings"].update(rank=1), "another rank"),
    "a missing obligation": (lambda r: r["obligations"].pop(), "lacks the obligation isolation/two_tenants"),
    "asked for less": (
        lambda r: (r["obligations"].pop(), r["only"].remove("isolation/two_tenants")),
        "other obligations than",
    ),
    "a departure": (
        lambda r: r["obligations"][0].update(outcome="departs", figure=0.9),
        "departs, and the run went on",
    ),
    "not shown": (
        lambda r: r["obligations"][0].update(outcome="undecided", figure=None, bound=None) or _without_figures(r),
        "gives no reason",
    ),
}


def _without_figures(receipt: dict[str, Any]) -> None:
    receipt["obligations"][0] = {k: v for k, v in receipt["obligations"][0].items() if v is not None}


def test_a_service_that_moves_before_its_proof_is_a_deviation_and_verifies(
    run_spec: Any, at_tiny: Any, tiny_server: Running, tmp_path: Path, lean: None
) -> None:
    """As behind a tunnel, which has another port each time."""
    here, there = tiny_server.base_url, tiny_server.base_url.replace("127.0.0.1", "localhost")
    at_tiny(here)
    run_spec(small_at_a_service(), until="service_preflight")
    at_tiny(there)
    for _ in range(2):
        run_spec(small_at_a_service(), until="service_proof", resume=True)
    run = tmp_path / "run"
    [moved] = [line for line in read_lines(run / "deviations.jsonl") if line["kind"] == "another_address"]
    assert moved["what"] == f"begun with the service at {here}, the run went on at {there}"
    [line] = check_service_proof(run, load(run / "spec.json"))
    assert line.startswith(f"the service at {there} was proved")
    (run / "deviations.jsonl").unlink()
    with pytest.raises(Refused, match=f"of another service than {here}"):
        check_service_proof(run, load(run / "spec.json"))


def test_a_forged_service_receipt_in_a_run(
    run_spec: Any, at_tiny: Any, tiny_server: Running, tmp_path: Path, lean: None
) -> None:
    at_tiny(tiny_server.base_url)
    run_spec(small_at_a_service(), until="service_proof")
    exp = load(tmp_path / "run" / "spec.json")
    for name, (change, words) in FORGERIES.items():
        run = tmp_path / name
        shutil.copytree(tmp_path / "run", run)
        assert check_service_proof(run, exp)
        _forged(run, change)
        with pytest.raises(Refused, match=words):
            check_service_proof(run, exp)
    run = tmp_path / "run"
    report = json.loads((run / JSON).read_text())
    report["obligations"][0]["because"] = "another story"
    (run / JSON).write_text(json.dumps(report))
    with pytest.raises(Refused, match=r"is not that of service-proof\.json"):
        check_service_proof(run, exp)
    _forged(run, lambda r: r.update(calls=1), chain=False)
    with pytest.raises(Refused, match="that the phase service_proof wrote"):
        check_service_proof(run, exp)


@pytest.mark.parametrize(("embedded", "kept"), [(True, 2), (False, 0)])
def test_an_unfinished_proof_goes_on_at_the_run_s_own_server_whatever_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: bool, kept: int
) -> None:
    """A service at another address is another one."""
    exp = load(write_spec(tmp_path, small_spec()))
    begun = report_of("http://127.0.0.1:1111", exp.base_model, exp)
    begun.results = [Result(e.name, "holds", 0.0, e.bound) for e in stands_on(exp).entries[:2]]
    reports.write_json(tmp_path / JSON, begun)
    monkeypatch.setattr(service_proof, "prove_at", prove := Mock(side_effect=InterruptedError))
    backend = SimpleNamespace(endpoint="http://127.0.0.1:2222", api_key="tml-x", embedded=embedded)
    state = MagicMock(exp=exp, directory=tmp_path, backend=AsyncMock(return_value=backend))
    with pytest.raises(InterruptedError):
        asyncio.run(service_proof.service_proof(state))
    now = report_of(backend.endpoint, exp.base_model, exp)
    earlier = prove.call_args.kwargs["earlier"]
    assert len([] if earlier.difference(now) else earlier.results) == kept


def test_a_departure_refuses_the_run_with_both_numbers(
    run_spec: Any, at_tiny: Any, tiny_server: Running, lean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_proof, "prove_at", proving({WIDE.name: WIDE}))
    at_tiny(tiny_server.base_url)
    with pytest.raises(Refused, match=r"gradient/importance_sampling.*0\.97.*0\.005"):
        run_spec(small_at_a_service())


def test_what_is_not_shown_needs_a_reason_in_the_spec(
    run_spec: Any, at_tiny: Any, tiny_server: Running, tmp_path: Path, lean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_proof, "prove_at", proving({UNCLEAR.name: UNCLEAR}))
    at_tiny(tiny_server.base_url)
    spec = small_at_a_service()
    with pytest.raises(Refused, match="does not show state/saved_exactly"):
        run_spec(spec, output=tmp_path / "refused")
    reason = "checkpoints are rounded to bfloat16 there, and no arm is restored"
    spec["protocol"]["service"]["undecided"] = {UNCLEAR.name: reason}
    run_spec(spec, output=tmp_path / "allowed", until="service_proof")
    [deviation] = [
        line for line in read_lines(tmp_path / "allowed" / "deviations.jsonl") if line["kind"] == "undecided"
    ]
    assert reason in deviation["what"]
    assert UNCLEAR.name in deviation["what"]


def test_a_reason_for_an_obligation_that_is_none(tmp_path: Path) -> None:
    spec = small_spec()
    spec["protocol"]["service"]["undecided"] = {"state/nothing": "there is no such obligation"}
    with pytest.raises(BadInputError, match="state/nothing"):
        stands_on(load(write_spec(tmp_path, spec)))


def _halved(right: Any) -> Any:
    """`find_loss` of a service whose policy losses are half as large."""

    def find(name: str, config: Any) -> Any:
        loss, needed = right(name, config)
        half = loss if name == "cross_entropy" else lambda *arguments: loss(*arguments) / 2
        return half, needed

    return find


def _centred(right: Any) -> Any:
    """`find_loss` of a service that centres the advantages of a datum: then masked positions train, too."""

    def find(name: str, config: Any) -> Any:
        loss, needed = right(name, config)

        def centred(logprobs: Any, datum: Any, config: Any) -> Any:
            tensors = dict(datum.tensors)
            tensors["advantages"] = tensors["advantages"] - tensors["advantages"].mean()
            return loss(logprobs, dataclasses.replace(datum, tensors=tensors), config)

        return (loss if name == "cross_entropy" else centred), needed

    return find


def _without_moments(right: Any) -> Any:
    """A restore that forgets the optimizer."""
    return lambda *arguments, optimizer: right(*arguments, optimizer=False)


def _hotter(right: Any) -> Any:
    """Draws at twice the temperature that was asked for."""
    return lambda logits, params, *place: right(
        logits, dataclasses.replace(params, temperature=2 * params.temperature), *place
    )


def _other_beta(right: Any) -> Any:
    """An optimiser whose beta2 is fixed."""
    return lambda adapter, params: right(adapter, dataclasses.replace(params, beta2=0.999))


ENGINE = "paritygate.server.engine"
FAULTS: dict[str, tuple[str, Any]] = {
    "value/importance_sampling": (f"{ENGINE}.training.find_loss", _halved),
    "gradient/importance_sampling": (f"{ENGINE}.training.find_loss", _halved),
    "gradient/masked": (f"{ENGINE}.training.find_loss", _centred),
    "optimiser/betas": ("paritygate.server.sessions.trainers.adam_step", _other_beta),
    "sampling/distribution": (f"{ENGINE}.loop.draw", _hotter),
    "state/optimizer_restored": ("paritygate.server.sessions.checkpoints.Store.load_into", _without_moments),
}


@pytest.mark.parametrize("obligation", FAULTS)
def test_a_wrong_service_refuses_the_run_by_name(
    obligation: str, run_spec: Any, at_tiny: Any, tiny_server: Running, lean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults in the server itself, each with the obligation that arms stand on; the others are left out for time."""
    assert obligation in service_obligations.ALL_ARMS
    monkeypatch.setattr(service_proof, "prove_at", prove_at)
    monkeypatch.setattr(service_obligations, "ALL_ARMS", (obligation,))
    monkeypatch.setattr(service_obligations, "GREEDY", ())
    place, fault = FAULTS[obligation]
    monkeypatch.setattr(place, fault(pkgutil.resolve_name(place)))
    at_tiny(tiny_server.base_url)
    with pytest.raises(Refused, match=rf"departs from {obligation}: .*figure .*, bound ") as refused:
        run_spec(small_at_a_service(), until="service_proof")
    assert refused.value.exit_code == 3
    gc.collect()


def test_what_an_experiment_stands_on(tmp_path: Path) -> None:
    names = {entry.name for entry in stands_on(load(write_spec(tmp_path, small_spec()))).entries}
    assert {"gradient/importance_sampling", "gradient/zero", "state/optimizer_restored"} <= names
    assert "gradient/several_targets" not in names
    assert "sampling/greedy" in names
    assert "sampling/temperature" not in names
    spec = small_spec()
    spec["eval"]["rollouts_per_task"] = 2
    spec["protocol"].setdefault("rollout", {})["temperature"] = 0.7
    names = {entry.name for entry in stands_on(load(write_spec(tmp_path, spec))).entries}
    assert "sampling/greedy" not in names
    assert "sampling/temperature" in names


def _answer(status: int) -> Exception:
    import tinker

    request = httpx.Request("POST", "http://127.0.0.1/api/v1/retrieve_future")
    return tinker.APIStatusError(f"HTTP {status}", response=httpx.Response(status, request=request), body=None)


@pytest.mark.parametrize(("lost", "answered"), [(0, True), (3, True), (4, False)])
def test_a_proof_asks_again_for_answers_that_are_lost(lost: int, answered: bool) -> None:
    """410: a sample or score is submitted again, a check with a training pass is begun again; three times at most."""
    from paritygate.service.connection import Connection, Lost
    from paritygate.service.lab import Lab
    from paritygate.service.outcome import Undecided
    from paritygate.service.runner import answered as begun_again

    class Silent(Connection):
        def probe(self, seconds: float | None = None) -> None:
            """A lost answer makes it ask whether the service is there."""

    calls: list[int] = []

    def submit() -> str:
        calls.append(1)
        if len(calls) <= lost:
            raise _answer(410)
        return "sampled"

    connection = Silent("http://127.0.0.1", "tml-x", "model")
    for ask, failed in (
        (lambda: connection.again("sample", submit), Lost),
        (lambda: begun_again(Lab(connection), lambda: connection.call("forward_backward", submit)), Undecided),
    ):
        calls.clear()
        if answered:
            assert ask() == "sampled"
            assert len(calls) == lost + 1
            continue
        with pytest.raises(failed):
            ask()
        assert len(calls) == 4


def test_billing_stops_a_proof_at_once_and_what_it_saved_is_deleted() -> None:
    """402 at the first training pass: one sentence within seconds, not the SDK's silent minutes."""
    from tests.foreign_service import KEY, serving
    from tests.scripted_service import POLICY

    def failure(url: str) -> str:
        try:
            prove_at(url, KEY, POLICY, stands_on(load(spec_folder() / "sdpo.json")))
        except BackendError as error:
            return str(error)
        return ""

    started = time.monotonic()
    with serving(status=lambda kind, n: 402 if kind == "forward_backward" else None) as service:
        assert "matter of billing (HTTP 402" in failure(service.url)
        gc.collect()
        assert service.refused == {"forward_backward 402": 1}
        assert service.requests["finish"] > 0
    assert time.monotonic() - started < 30
    gc.collect()


def test_a_health_route_that_fails_ends_no_proof() -> None:
    """503 at the health route is not believed where the service names its models; without them it is."""
    from paritygate.service.connection import probe
    from tests.foreign_service import KEY, serving

    with serving(unhealthy=(0.0, 1e9)) as service:
        probe(service.url, KEY)
        service.faults.status = lambda kind, n: 503 if kind == "capabilities" else None
        with pytest.raises(BackendError, match="healthz has HTTP status 503"):
            probe(service.url, KEY)
