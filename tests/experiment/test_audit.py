"""A run whose every digest is right and which contradicts itself: the sentence names the file that does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import Refused
from paritygate.experiment import audit
from paritygate.receipts import PhaseChain, canonical
from tests.experiment.scaled_spec import brief
from tests.experiment.tiny_spec import ROOT
from tests.scripted_service import ScriptedService

Forge = Callable[[Path], object]


@pytest.fixture
def honest(run_spec: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(audit, "replay", lambda *_: ["the verdict"])  # digests have tests of their own
    scripted(ScriptedService())
    run_spec(brief())
    return tmp_path / "run"


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change every JSON line of a file, in the form in which a run writes it."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        change(line)
    end = b"" if path.suffix == ".json" else b"\n"
    if path.parent.name == "trajectories":
        dumped = [json.dumps(line, sort_keys=True, separators=(",", ":")).encode() for line in lines]
    else:
        dumped = [canonical(line) for line in lines]
    path.write_bytes(b"".join(line + end for line in dumped))


def first(run: Path, pattern: str) -> Path:
    return sorted(run.glob(pattern))[0]


def item(name: str, value: Any, *, unit: bool, trajectory: bool = False) -> Forge:
    """Set a field of the first arm's first item in items.jsonl, its unit and its trajectory, as told."""

    def forge(run: Path) -> None:
        lines = (run / "items.jsonl").read_bytes().splitlines(keepends=True)
        changed = json.loads(lines[0]) | {name: value}
        (run / "items.jsonl").write_bytes(b"".join([canonical(changed) + b"\n", *lines[1:]]))
        path = run / "units" / f"evaluate-{changed['arm']}" / f"task-{changed['task_index']:04d}-0.json"
        if unit:
            edit(path, lambda record: record["item"].update({name: value}))
        if trajectory:
            edit(run / json.loads(path.read_bytes())["trajectories"], lambda line: line.update({name: value}))

    return forge


def drop_phase(run: Path) -> None:
    phases = sorted((run / "phases").iterdir())
    entries = [json.loads(path.read_bytes()) for path in phases]
    for path in phases:
        path.unlink()
    chain = PhaseChain(run)
    for entry in entries:
        if entry["phase"] != "activation_pilot":
            chain.append(entry["phase"], entry["record"], entry["files"])


def stop_at(name: str) -> Forge:
    """Say that a gate stopped the run at a phase, and leave out those after it."""

    def forge(run: Path) -> None:
        phases = sorted((run / "phases").iterdir())
        entries = [json.loads(path.read_bytes()) for path in phases]
        names = [entry["phase"] for entry in entries]
        for path in phases:
            path.unlink()
        chain = PhaseChain(run)
        for entry in entries[: names.index(name) + 1]:
            outcome = {"outcome": "stopped"} if entry["phase"] == name else {}
            chain.append(entry["phase"], entry["record"] | outcome, entry["files"])

    return forge


FORGERIES: dict[str, tuple[Forge, str]] = {
    "an item alone": (item("composite", 1.0, unit=False), "items.jsonl does not hold the items of"),
    "an item and its unit": (item("composite", 1.0, unit=True), "composite is 1 in the item"),
    "tokens of an item": (item("assistant_tokens", 3, unit=True), "assistant_tokens is 3 in the item"),
    "a reward everywhere": (item("reward", 1.0, unit=True, trajectory=True), "earn a reward of 0.0, not 1"),
    "a metric": (lambda run: edit(run / "metrics.jsonl", lambda line: line.update(step=9)), "metrics.jsonl does not"),
    "a unit less": (lambda run: first(run, "units/train-*/*.json").unlink(), "a unit that had metrics is missing"),
    "advantages": (
        lambda run: edit(
            first(run, "trajectories/train-*.jsonl"),
            lambda line: line.update(advantages=[2.0 * a + 1e-6 for a in line["advantages"]]),
        ),
        "are not those of its composites and logprobs",
    ),
    "a phase less": (drop_phase, "activation_pilot is missing"),
    "stopped before it trained": (stop_at("activation_pilot"), "though a gate stopped the run before"),
    "stopped for an item that is there": (stop_at("evaluate"), "misses none"),
    "the page": (lambda run: (run / "report.html").write_text("<p>validated</p>"), "is not the page that"),
    "no JSON": (lambda run: (run / "metrics.jsonl").unlink(), "of another form than a run writes"),
}


def test_a_run_that_contradicts_itself(honest: Path, tmp_path: Path) -> None:
    lines = audit.audit(honest, ROOT)
    assert lines[-1] == "the verdict"
    assert "rewards graded anew; the page made anew" in lines[-2]
    assert lines[0].startswith("the service at http://scripted was proved with SDK stand-in: ")
    assert lines[1] == "not signed: digests alone do not show who made it"
    for name, (forge, sentence) in FORGERIES.items():
        run = tmp_path / "forged"
        shutil.copytree(honest, run)
        forge(run)
        with pytest.raises(Refused) as refusal:
            audit.audit(run, ROOT)
        assert sentence in str(refusal.value), (name, str(refusal.value))
        shutil.rmtree(run)
