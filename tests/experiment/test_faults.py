"""A bad network and a service that is gone: the same results, or one sentence in ten seconds and a run that goes on."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import BackendError, GateStopped
from paritygate.experiment.step import training_step
from paritygate.receipts import PhaseChain
from paritygate.server import Running
from tests.counts import SOAK, soak
from tests.experiment.faulty_proxy import FAULTS, FaultyProxy
from tests.experiment.tiny_spec import TINY, small_at_a_service

FINAL = ("metrics.jsonl", "items.jsonl", "verdict.json")


@pytest.fixture
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of a quarter second and more, between the tries of client and SDK, last a tenth; not at full counts."""
    if SOAK:
        return
    real = asyncio.sleep

    async def sleep(delay: float, result: Any = None) -> Any:
        return await real(delay / 10 if delay >= 0.25 else delay, result)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr("anyio._backends._asyncio.sleep", sleep)  # what the SDK's HTTP client waits by


@pytest.mark.usefixtures("lean", "quick_pauses")
def test_a_bad_network_changes_nothing(run_spec: Any, at_tiny: Any, tiny_server: Running, tmp_path: Path) -> None:
    at_tiny(tiny_server.base_url)
    run_spec(small_at_a_service(), output=tmp_path / "clean")
    rate, stall = soak(quick=3, full=5) / 100, float(soak(quick=1, full=10))
    with FaultyProxy(tiny_server.base_url, rate=rate, stall=stall, seed=5) as proxy:
        at_tiny(proxy.url)
        run_spec(small_at_a_service(), output=tmp_path / "faulty")
        assert all(proxy.done[fault] for fault in FAULTS), proxy.done
    for name in FINAL:
        assert (tmp_path / "faulty" / name).read_bytes() == (tmp_path / "clean" / name).read_bytes(), name


@pytest.mark.usefixtures("lean")
def test_a_service_that_is_down_is_named_and_the_run_goes_on_later(
    run_spec: Any, at_tiny: Any, tiny_server: Running, tmp_path: Path
) -> None:
    at_tiny(tiny_server.base_url)
    run_spec(small_at_a_service(), until="design_check")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        at_tiny(nobody)
        began = time.monotonic()
        with pytest.raises(BackendError, match="No healthy Tinker service at " + nobody) as failed:
            run_spec(small_at_a_service(), resume=True)
        assert time.monotonic() - began < 10
        # Said before anything long: parity has not been shown for it.
        assert "correctness_preflight" not in PhaseChain(tmp_path / "run").completed
        assert failed.value.exit_code == 5
    at_tiny(tiny_server.base_url)
    result = run_spec(small_at_a_service(), resume=True, until="restoration_preflight")
    assert result.completed[-1] == "restoration_preflight"


@pytest.mark.usefixtures("lean")
def test_a_service_without_the_model_says_what_it_serves(run_spec: Any, at_tiny: Any, tiny_server: Running) -> None:
    at_tiny(tiny_server.base_url)
    spec = json.loads(json.dumps(small_at_a_service()).replace(TINY, "Qwen/Qwen3.5-4B"))
    with pytest.raises(BackendError, match=r"does not serve Qwen/Qwen3\.5-4B, the base model"):
        run_spec(spec)


@pytest.mark.usefixtures("lean")
def test_a_loss_that_overflows_at_the_server_stops_before_the_step(
    run_spec: Any, at_tiny: Any, tiny_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded server refuses a loss of infinity; the run says in which trajectory, where and at which token."""
    right, planted = training_step.make_batch, list[tuple[str, int, int]]()

    async def overflowing(*arguments: Any) -> Any:
        batch = await right(*arguments)
        last = len(batch.datums) - 1
        datum = batch.datums[last]
        place = max((t for t, advantage in enumerate(datum.inputs["advantages"]) if advantage), default=None)
        if place is None:
            return batch
        datum.inputs["logprobs"][place] = -800.0  # a ratio of exp(790)
        planted.append((batch.labels[last], place + 1, datum.tokens[place + 1]))
        return batch

    at_tiny(tiny_server.base_url)
    run_spec(small_at_a_service(), until="activation_pilot")
    monkeypatch.setattr(training_step, "make_batch", overflowing)
    with pytest.raises(GateStopped, match="stopped before the optimiser step") as stopped:
        run_spec(small_at_a_service(), resume=True)
    message = str(stopped.value)
    assert any(f"of {label} at position {place}, token {token}" in message for label, place, token in planted)
