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


def metric(name: str, value: Any) -> Forge:
    """Set a metric of the last step in its unit and in metrics.jsonl alike."""

    def forge(run: Path) -> None:
        edit(run / "units/train-sdpo_token/step-001.json", lambda record: record["metrics"].update({name: value}))
        last = ("sdpo_token", "train", 1)
        edit(
            run / "metrics.jsonl",
            lambda line: line.update({name: value}) if (line["arm"], line["phase"], line["step"]) == last else None,
        )

    return forge


def rollouts(change: Callable[[Any], object], pattern: str = "trajectories/train-sdpo_token-001.jsonl") -> Forge:
    """Change every line of a step's trajectories."""
    return lambda run: edit(first(run, pattern), change)


def facts(phase: str, change: Callable[[Any], object]) -> Forge:
    """Change a phase's record, and link the chain anew."""

    def forge(run: Path) -> None:
        entries = [json.loads(path.read_bytes()) for path in sorted((run / "phases").iterdir())]
        shutil.rmtree(run / "phases")
        chain = PhaseChain(run)
        for entry in entries:
            if entry["phase"] == phase:
                change(entry["record"])
            chain.append(entry["phase"], entry["record"], entry["files"])

    return forge


def depends_on(name: str, change: Callable[[Any], object]) -> Forge:
    """Change what receipt.json says of a dependency."""

    def forge(run: Path) -> None:
        receipt = json.loads((run / "receipt.json").read_bytes())
        for entry in receipt["predicate"]["buildDefinition"]["resolvedDependencies"]:
            if entry["name"] == name:
                change(entry["annotations"])
        (run / "receipt.json").write_bytes(canonical(receipt))

    return forge


def one_step_less(run: Path) -> None:
    """The last step of an arm, its metrics and its trajectories, gone; those of the others numbered anew."""
    (run / "units/train-sdpo_token/step-001.json").unlink()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    assert (lines[-1]["arm"], lines[-1]["step"]) == ("sdpo_token", 1)
    (run / "metrics.jsonl").write_bytes(b"".join(canonical(line) + b"\n" for line in lines[:-1]))


def both_arms_a_step_less(run: Path) -> None:
    """The last step of training gone from every arm, its metrics and its trajectories too."""
    for path in (*run.glob("units/train-*/step-001.json"), *run.glob("trajectories/train-*-001.jsonl")):
        path.unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    last = [(line["phase"], line["step"]) for line in map(json.loads, lines[-2:])]
    assert last == [("train", 1)] * 2
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-2]))


def arms_exchanged(run: Path) -> None:
    """Each arm under the other's name, in every file and in every file's name."""
    for path in [*run.glob("units/*"), *run.glob("trajectories/*")]:
        path.rename(path.with_name("new-" + exchanged(path.name)))
    for path in [*run.glob("units/new-*"), *run.glob("trajectories/new-*")]:
        path.rename(path.with_name(path.name.removeprefix("new-")))
    for path in [
        *run.rglob("units/*/*.json"),
        *run.glob("trajectories/*"),
        *run.glob("phases/*"),
        *run.glob("*.jsonl"),
    ]:
        lines = [json.loads(exchanged(line)) for line in path.read_text("utf-8").splitlines()]
        if path.name == "items.jsonl":
            lines.sort(key=lambda line: line["arm"])
        path.write_bytes(b"\n".join(map(canonical, lines)) + b"\n" * (path.suffix == ".jsonl"))
        edit(path, lambda _: None)
    facts("", said_better)(run)


def exchanged(text: str) -> str:
    return text.replace("sdpo_token", "?").replace("grpo", "sdpo_token").replace("?", "grpo")


def said_better(line: Any) -> None:
    line["judgement"].update(ungrounded_claims=1.0, composite=None)


def passed(record: Any) -> None:
    record["facts"]["gates"]["grpo"][0].update(measured=1.0)


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
    "a metric and its unit": (metric("composite_rubric_score", 1.0), "composite_rubric_score is 1"),
    "mixed groups and their unit": (metric("groups_with_mixed_reward", 2), "groups_with_mixed_reward is 2, 0 by"),
    "a count": (
        lambda run: edit(first(run, "units/train-*/*.json"), lambda record: record["tally"].update(judge_parsed=3)),
        "judge_parsed is 3, 4 by",
    ),
    "a reward in training": (rollouts(lambda line: line.update(reward=1.0)), "teacher_told_unsuccessful is 0, 4 by"),
    "scores in training": (rollouts(said_better), "its judgement is not in the judge's last answer"),
    "scores of an item": (
        rollouts(said_better, "trajectories/evaluate-*.jsonl"),
        "its judgement is not in the judge's last answer",
    ),
    "a seed": (rollouts(lambda line: line.update(seed=7)), "and seed 7, not train and "),
    "the seed of an item": (
        rollouts(lambda line: line.update(seed=7), "trajectories/evaluate-*.jsonl"),
        "and seed 7, not test and ",
    ),
    "a split": (rollouts(lambda line: line.update(split="test")), "has split test"),
    "a task": (rollouts(lambda line: line.update(task_index=line["task_index"] + 1)), "the spec has ["),
    "a rollout": (rollouts(lambda line: line.update(rollout=0)), "has not the 2 rollouts of the spec"),
    "a mask": (
        rollouts(lambda line: line.update(mask=[1, *line["mask"][1:]])),
        "its mask, spans, turns and logprobs are not of the same sampled tokens",
    ),
    "a sibling": (rollouts(lambda line: line["teacher"].update(sibling=1 - line["rollout"])), "another sibling"),
    "a step less": (one_step_less, "hold 1 steps of sdpo_token, the spec has 2"),
    "a step less of both": (both_arms_a_step_less, "hold 1 steps of grpo, the spec has 2"),
    "the arms exchanged": (arms_exchanged, "are not those of its composites and logprobs"),
    "the gates of the pilot": (facts("activation_pilot", passed), "the gates of grpo are not those of"),
    "what training came to": (
        facts("train", lambda record: record["facts"]["counts"]["grpo"].update(groups=9)),
        "the counts of grpo are not those of its units",
    ),
    "what the evaluation came to": (
        facts("evaluate", lambda record: record["facts"]["arms"]["grpo"].update(composite=1.0)),
        "what the evaluation came to is not what",
    ),
    "what the evaluation came to, in words": (
        facts("evaluate", lambda record: record.update(decided="sdpo_token is far better")),
        "what the evaluation came to is not what",
    ),
    "money": (lambda run: edit(run / "cost.json", lambda cost: cost.update(money=0.01)), "cost.json is not what"),
    "tokens": (
        lambda run: edit(run / "timings.jsonl", lambda line: line.update(used={}) if "used" in line else None),
        "cost.json is not what",
    ),
    "prices": (
        lambda run: edit(run / "cost.json", lambda cost: cost["rows"][0].update(price=0.0, money=0.0)),
        "cost.json is not what",
    ),
    "the judge in the receipt": (depends_on("judge", lambda judge: judge.update(temperature=0.5)), "judge is {"),
    "the judge's answers in the receipt": (
        depends_on("judge", lambda judge: judge["judged"].update(parsed_at_first=1)),
        "'parsed_at_first': 1",
    ),
    "the model in the receipt": (depends_on("base model", lambda model: model.update(model="x")), "base model is 'x'"),
    "the adapters in the receipt": (depends_on("service", lambda stated: stated.update(adapters={})), "service is {}"),
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
    shutil.copytree(honest, tmp_path / "handed on")  # a reviewer may call it what they like
    assert audit.audit(tmp_path / "handed on", ROOT) == lines
    unseen: dict[str, str] = {}
    for name, (forge, sentence) in FORGERIES.items():
        run = tmp_path / "forged"
        shutil.copytree(honest, run)
        forge(run)
        try:
            unseen[name] = audit.audit(run, ROOT)[-2]
        except Refused as refusal:
            if sentence not in str(refusal):
                unseen[name] = str(refusal)
        shutil.rmtree(run)
    assert unseen == {}
