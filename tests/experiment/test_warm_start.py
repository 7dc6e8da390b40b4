"""The warm start: which gold episodes it trains on, in which order, weighted how, and what the arms begin with."""

import dataclasses
import json
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paritygate import retail
from paritygate.agent import prompt, renderer
from paritygate.agent.gold import gold_trajectory
from paritygate.backend.vocabulary import offline
from paritygate.errors import GateStopped, Refused
from paritygate.experiment.phases import warm_start
from paritygate.experiment.phases.preflight import service_proof
from paritygate.experiment.run.journal import read_lines
from paritygate.experiment.run.state import State
from paritygate.receipts import PhaseChain
from paritygate.service.runner import Result
from paritygate.spec import load
from tests.experiment import stub_proof
from tests.experiment.scaled_spec import brief
from tests.experiment.test_wiring import purpose
from tests.scripted_service import POLICY, ScriptedService, ScriptedTrainer, digest

TASKS, LR, BATCH, EPOCHS, SEED = [7, 3, 11, 5, 2], 1e-3, 2, 2, 9


def warmed() -> dict[str, Any]:
    """A small spec with a warm start on five tasks that nothing else of it uses."""
    chosen = {"tasks": {"split": "dev", "tasks": TASKS}, "learning_rate": LR, "batch_size": BATCH, "epochs": EPOCHS}
    spec = brief(warm_start=chosen | {"seed": SEED})
    spec["experiment_features"]["warmup_adaptation"] = True
    spec["protocol"]["service"] = {"embedded_model": "tiny"}
    return spec


@pytest.fixture
def run(lean: None, run_spec: Any, scripted: Any, tmp_path: Path) -> tuple[ScriptedService, Path]:
    service = scripted(ScriptedService())
    run_spec(warmed(), until="timing_pilot")
    return service, tmp_path / "run"


def test_what_is_trained_on_and_what_the_arms_begin_with(
    run: tuple[ScriptedService, Path], tau_bench_dir: Path
) -> None:
    service, folder = run
    source, rendering = retail.load(tau_bench_dir), renderer.load("qwen3.5", offline(POLICY))
    context = prompt.context("compact", source.wiki, source.tools)
    gold = [
        gold_trajectory(source, "dev", task, rendering, context, confirm=place in (1, 3))  # every other one asks
        for place, task in enumerate(TASKS)
    ]
    orders = [list(range(5)), list(range(5))]
    for epoch, order in enumerate(orders):
        random.Random(f"9/{epoch}").shuffle(order)
    assert orders[0] != orders[1]
    wanted = [order[start : start + 2] for order in orders for start in (0, 2, 4)]
    updates = [update for update in service.updates if update.get("adam", [0])[0] == LR]
    assert [update["loss_fn"] for update in updates] == ["cross_entropy"] * 6  # two epochs of batches of 2, 2 and 1
    for update, chosen in zip(updates, wanted, strict=True):
        assert update["adam"] == (LR, 0.9, 0.95, 1e-08)
        assert [tuple(datum.tokens) for datum in update["data"]] == [gold[index].tokens for index in chosen]
        trained = sum(sum(gold[index].mask) for index in chosen)  # the mean over the batch's tokens, not an episode's
        for datum, index in zip(update["data"], chosen, strict=True):
            weights = datum.inputs["weights"]
            assert weights == pytest.approx([mask / trained for mask in gold[index].mask[1:]], abs=1e-7)
    [warm] = [path for path in service.ever_saved if "/warm-start-" in path]
    facts = json.loads(next((folder / "phases").glob("*-warm_start.json")).read_text())["record"]["facts"]
    assert (facts["state"], facts["episodes"]) == (warm, 5)
    [pilot] = [weights for path, weights in service.ever_saved.items() if purpose(path) == "timing_pilot-sdpo_token-0"]
    assert pilot == digest("fresh", service.ever_saved[warm])  # its weights, not its moments


def test_a_cached_adapter_is_of_the_same_kernels() -> None:
    """The C++ that multiplies decides its bits, and so does the compiler of it (design/020)."""
    sources = warm_start.server_sources()
    assert {"native/vector.hpp", "server/model/products.cpp", "server/model/layers.hpp", "server/model/lora.py"} <= set(
        sources
    )
    assert not any("__pycache__" in name for name in sources)


def test_a_cached_adapter_is_of_the_same_dtype(tmp_path: Path) -> None:
    """The embedded server's weights in bfloat16 give other bits than those in float32."""
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(warmed()))
    exp: Any = load(path)

    def inputs(dtype: str) -> Any:
        service = dataclasses.replace(exp.protocol.service, embedded_dtype=dtype)
        other = dataclasses.replace(exp, protocol=dataclasses.replace(exp.protocol, service=service))

        collector: Any = SimpleNamespace(policy_tokenizer=SimpleNamespace(name_or_path=str(tmp_path)))
        state: Any = SimpleNamespace(exp=other)
        return warm_start._inputs(state, exp.protocol.warm_start, collector, [])

    assert inputs("float32") == inputs("float32") != inputs("bfloat16")


def test_two_runs_that_cache_the_same_adapter_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes second leaves the first one's files, which are of the same inputs."""
    saved, cache = tmp_path / "saved", tmp_path / "cache"
    saved.mkdir()
    for name in ("adapter.safetensors", "checkpoint.json"):
        (saved / name).write_text(name)
    monkeypatch.setattr(warm_start, "cache_folder", lambda: cache)
    state: Any = SimpleNamespace(saved=lambda path: saved)
    rename = Path.rename

    def second(scratch: Path, folder: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        warm_start._to_cache(state, "k" * 64, {"state": "first"})
        return rename(scratch, folder)

    monkeypatch.setattr(Path, "rename", second)
    warm_start._to_cache(state, "k" * 64, {"state": "second"})
    [folder] = (cache / "warm-start").iterdir()
    assert json.loads((folder / "record.json").read_text())["state"] == "first"


class TwoServers(ScriptedService):
    """Counts as embedded, so that a second one is at hand; `made` are the phases' files at each optimiser step."""

    embedded = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.made, self.stepped = folder, list[list[str]](), threading.Event()

    async def training(self, base_model: str, rank: int = 32, seed: int = 0) -> ScriptedTrainer:
        service = self

        class Watched(ScriptedTrainer):
            async def optim_step(self, *rates: float, **betas: float) -> dict[str, float]:
                service.made.append(committed(service.folder))
                service.stepped.set()
                return await super().optim_step(*rates, **betas)

        return Watched(self, digest(base_model, rank, seed))

    def warm(self) -> list[int]:
        """The weights that were saved as a warm start."""
        return [weights for path, weights in self.ever_saved.items() if "/warm-start-" in path]


def committed(folder: Path) -> list[str]:
    """The phases and units of a run that count."""
    phases = [path.stem.split("-", 1)[1] for path in sorted((folder / "phases").glob("*.json"))]
    return [*phases, *(str(path.relative_to(folder / "units")) for path in folder.glob("units/warm_start/*"))]


@pytest.fixture
def two_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lean: None, scripted: Any) -> TwoServers:
    service = scripted(TwoServers(tmp_path / "run"))
    monkeypatch.delenv("TINKER_BASE_URL")
    monkeypatch.setenv("PARITYGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warm_start, "_to_cache", lambda *_: None)  # there are no files of a scripted state
    monkeypatch.setattr(State, "side_by_side", staticmethod(lambda: 2))
    return service


def test_the_steps_are_taken_while_the_service_is_proved_and_count_after_it(
    two_servers: TwoServers, run_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one core they come after it; the weights are the same."""

    def prove(*arguments: Any, **options: Any) -> Any:
        assert two_servers.stepped.wait(20)
        return stub_proof.prove_at(*arguments, **options)

    for cores, before in ((2, "service_preflight"), (1, "service_proof")):
        two_servers.made.clear()
        monkeypatch.setattr(State, "side_by_side", staticmethod(lambda cores=cores: cores))
        monkeypatch.setattr(service_proof, "prove_at", prove if cores == 2 else stub_proof.prove_at)
        run_spec(warmed(), until="warm_start")
        assert two_servers.made[2][-1] == before  # two are of the preflight's clients
        assert committed(two_servers.folder)[-3:] == ["service_proof", "warm_start", "warm_start/adapter.json"]
        *_, used = [x["used"] for x in read_lines(two_servers.folder / "timings.jsonl") if x["what"] == "spent"]
        assert used["policy/trained"] > 1000
        assert used["saved_states"] == 1
        shutil.rmtree(two_servers.folder)
    one, other = two_servers.warm()
    assert one == other


def test_a_service_that_departs_leaves_nothing_of_a_warm_start_that_was_begun(
    two_servers: TwoServers, run_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def departs(*arguments: Any, **options: Any) -> Any:
        assert two_servers.stepped.wait(20)
        wrong = Result("gradient/zero", "departs", 0.9, 0.005, 0.4, "it moves", "print()")
        return stub_proof.proving({wrong.name: wrong})(*arguments, **options)

    monkeypatch.setattr(service_proof, "prove_at", departs)
    with pytest.raises(Refused, match="departs from gradient/zero"):
        run_spec(warmed(), until="restoration_preflight")
    assert committed(two_servers.folder)[-1] == "service_preflight"
    assert not two_servers.warm()
    monkeypatch.setattr(service_proof, "prove_at", stub_proof.prove_at)
    run_spec(warmed(), until="restoration_preflight", resume=True)
    assert len(two_servers.warm()) == 1


def test_a_warm_start_that_was_begun_stops_the_run_in_its_own_phase(
    two_servers: TwoServers, run_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def diverged(*_: Any) -> float:
        two_servers.stepped.set()
        raise GateStopped("warm start, batch 0: stopped before the optimiser step, since the loss is nan.")

    def prove(*arguments: Any, **options: Any) -> Any:
        assert two_servers.stepped.wait(20)
        return stub_proof.prove_at(*arguments, **options)

    monkeypatch.setattr(service_proof, "prove_at", prove)
    monkeypatch.setattr(warm_start, "_step", diverged)
    with pytest.raises(GateStopped, match="batch 0"):
        run_spec(warmed(), until="restoration_preflight")
    assert committed(two_servers.folder)[-2:] == ["service_proof", "warm_start"]
    assert PhaseChain(two_servers.folder).record("warm_start")["outcome"] == "stopped"
