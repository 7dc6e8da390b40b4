"""The phase service_proof: a real proof at the tiny server, what it refuses, and its receipt checked again."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from paritygate.backend.contact import Contact
from paritygate.errors import BadInputError, Refused
from paritygate.experiment.phases.preflight import service_proof
from paritygate.experiment.plan.service_obligations import stands_on
from paritygate.experiment.run.journal import read_lines
from paritygate.experiment.run.replay import service_proof as checked_again
from paritygate.receipts import PhaseChain
from paritygate.server import Running
from paritygate.service.proof import prove_at
from paritygate.service.runner import Result
from paritygate.spec import load
from tests.experiment.stub_proof import proving
from tests.experiment.tiny_spec import small_at_a_service, small_spec, write_spec

WIDE = Result("gradient/importance_sampling", "departs", 0.97, 0.005, 0.4, "the step is 0.97 off", "print()")
UNCLEAR = Result("state/saved_exactly", "undecided", because="the noise is too large")


@pytest.fixture(autouse=True)
def met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first contact, before any phase, has tests of its own."""

    async def first_contact(needs: Any, url: str) -> Contact:
        return Contact(url, (), {}, {need.model: None for need in needs})

    monkeypatch.setattr("paritygate.backend.contact.first_contact", first_contact)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the SDK's connections
def test_a_real_proof_is_part_of_the_run(
    run_spec: Any, at_tiny: Any, tiny_server: Running, tmp_path: Path, lean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_proof, "prove_at", prove_at)
    at_tiny(tiny_server.base_url)
    run_spec(small_at_a_service(), until="service_proof")
    run = tmp_path / "run"
    record = PhaseChain(run).record("service_proof")
    assert set(record["facts"]["outcomes"].items()) >= {("holds", 11), ("departs", 0), ("undecided", 0)}
    figures = {name: entry["figure"] for name, entry in record["facts"]["obligations"].items()}
    assert figures["gradient/importance_sampling"] < 1e-4
    [line] = checked_again(run)
    assert "11 holds" in line
    gc.collect()
    path = run / "service-proof.receipt.json"
    receipt = json.loads(path.read_text())
    receipt["obligations"][0]["figure"] = 0.0
    path.write_text(json.dumps(receipt))
    with pytest.raises(Refused, match="digest does not fit"):
        checked_again(run)


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


def test_what_an_experiment_stands_on(tmp_path: Path) -> None:
    names = {entry.name for entry in stands_on(load(write_spec(tmp_path, small_spec()))).entries}
    assert {"gradient/importance_sampling", "gradient/zero", "state/optimizer_restored"} <= names
    assert "gradient/several_targets" not in names
