"""What a run asks before anything else, and what its receipt says at the end: both as the service reports it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import BackendError
from paritygate.experiment.correctness import parity
from paritygate.experiment.run.tokenizers import tokenizer_digest
from tests.experiment.scaled_spec import brief
from tests.foreign_service import KEY, serving
from tests.scripted_service import JUDGE, POLICY, USER, ScriptedService, ScriptedTrainer

ARMS = ("grpo", "sdpo_token")


@pytest.mark.usefixtures("lean")
def test_the_receipt_tells_what_was_reported(
    run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers by digest, model and rank as clients report them, the optimiser as passed, who graded and judged."""
    service = scripted(ScriptedService())
    monkeypatch.setattr(ScriptedTrainer, "rank", 32)
    run_spec(brief())
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_bytes())
    named = {entry["name"]: entry for entry in receipt["predicate"]["buildDefinition"]["resolvedDependencies"]}
    for model in (POLICY, USER, JUDGE):
        assert (
            named[f"tokenizer of {model}"]["digest"]["sha256"] == tokenizer_digest(service.tokenizer(model))["sha256"]
        )
    base = named["base model"]["annotations"]
    assert base["reported"] == {"base_model": dict.fromkeys(ARMS, POLICY), "lora_rank": dict.fromkeys(ARMS, 32)}
    assert base["adam"]["passed"] == {"beta1": 0.9, "beta2": 0.95, "eps": 1e-08}
    assert named["tau-bench retail"]["annotations"]["environment"] == "own"
    assert named["judge"]["annotations"]["judged"] == {"items": 4, "parsed": 4, "parsed_at_first": 4}
    assert len(named["tree:reference"]["digest"]["sha256"]) == 64
    assert set(named["service"]["annotations"]["adapters"]) == set(ARMS)


def test_another_rank_than_asked_for_fails_the_probe(
    run_spec: Any, scripted: Any, lean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(ScriptedService())
    monkeypatch.setattr(ScriptedTrainer, "rank", 16)
    with pytest.raises(BackendError, match="a LoRA of rank 16, asked was 32"):
        run_spec(brief())


def test_first_contact_comes_before_parity_is_shown_and_anything_is_made(
    run_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge that the service does not serve is found in seconds, not after minutes of parity and a first episode."""
    monkeypatch.setattr(parity, "guard", lambda *_, **__: pytest.fail("parity was shown first"))
    models = {POLICY: {"trainable": True, "sampleable": True}, USER: {"sampleable": True}}
    with serving(models=models) as service:
        monkeypatch.setenv("TINKER_BASE_URL", service.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        started = time.monotonic()
        with pytest.raises(BackendError, match=f"does not serve {JUDGE}, the judge; it serves {POLICY}, {USER}"):
            run_spec(brief())
        assert time.monotonic() - started < 10
        assert not service.requests["create_session"]
    assert not (tmp_path / "run").exists()
