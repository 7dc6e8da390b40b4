"""A finished run directory as small as one can be: the local spec, three phases, per-item results, a verdict."""

import json
from collections.abc import Iterable
from pathlib import Path

from paritygate.experiment.run.replay import verdict
from paritygate.receipts import PhaseChain, canonical, read_parity_receipt, write_atomic, write_run_receipt
from paritygate.spec import load
from tests.guard.small_tree import ROOT, Tree

LOSSES = ("other", "toy")


def build_run(tree: Tree, run_dir: Path, losses: Iterable[str] = LOSSES) -> Path:
    """The directory of a run that `tree`'s own parity receipt let start."""
    spec = load(ROOT / "spec" / "sdpo-local.json")
    chain = new_chain(run_dir, spec.frozen)
    write_atomic(run_dir / "items.jsonl", b"".join(canonical(item) + b"\n" for item in items(spec)))
    chain.append("evaluate", {"outcome": "done"}, ["items.jsonl", "metrics.jsonl"])
    write_atomic(run_dir / "verdict.json", canonical(verdict(run_dir)))
    write_atomic(run_dir / "report.html", b"<p>a page</p>")
    chain.append("decide", {"outcome": "done"}, ["verdict.json"])
    write_receipt(tree, run_dir, spec.frozen, losses)
    return run_dir


def new_chain(run_dir: Path, frozen) -> PhaseChain:
    """The chain after its first two phases, with a metrics file that the next one appends to."""
    run_dir.mkdir(parents=True)
    write_atomic(run_dir / "spec.json", canonical(dict(frozen)))
    (run_dir / "trajectories").mkdir()
    write_atomic(run_dir / "trajectories" / "train-grpo-1.jsonl", b'{"tokens":[1,2,3]}\n')
    write_atomic(run_dir / "metrics.jsonl", b'{"step":1}\n')
    write_atomic(run_dir / "timings.jsonl", b'{"seconds":1.5}\n')
    chain = PhaseChain(run_dir)
    chain.append("spec_preflight", {"outcome": "done"}, ["spec.json"])
    chain.append("train", {"outcome": "done"}, ["metrics.jsonl", "trajectories/train-grpo-1.jsonl"])
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":2}\n')
    return chain


def items(spec) -> list[dict]:
    """A complete evaluation of both arms."""
    tasks, arms = spec.frozen["protocol"]["evaluation"]["tasks"], spec.frozen["protocol"]["comparison"]
    dimensions = dict.fromkeys(("invalid_tool_use", "ungrounded_claims", "upfront_clarification"), 0.5)
    return [
        {"arm": arm, "task_index": task, "composite": (task % 7) / 10 + lift, "reward": 1.0, "dimensions": dimensions}
        for arm, lift in ((arms["treatment"], 0.2), (arms["baseline"], 0.0))
        for task in tasks
    ]


def write_receipt(tree: Tree, run_dir: Path, frozen, losses: Iterable[str] = LOSSES) -> Path:
    """The run receipt over what lies in `run_dir` now."""
    return write_run_receipt(
        run_dir,
        root=tree.root,
        spec=frozen,
        parity=read_parity_receipt(tree.receipts()[0]),
        losses=losses,
        device="cpu",
        dependencies=[
            {"name": "tau-bench", "digest": {"gitCommit": "0" * 40}, "annotations": {"initial_database": "1" * 64}},
            {"name": "base model", "annotations": {"name": "tiny", "tokenizer": "2" * 64}},
        ],
    )


def recount(tree: Tree, run_dir: Path, losses: Iterable[str] = LOSSES) -> None:
    """What a forger does after an edit: a new chain and a new receipt, every digest in them consistent."""
    frozen = json.loads((run_dir / "spec.json").read_bytes())
    receipt, phases = run_dir / "receipt.json", sorted((run_dir / "phases").iterdir())
    entries = [json.loads(path.read_bytes()) for path in phases]
    for path in (receipt, *phases):
        path.unlink()
    chain = PhaseChain(run_dir)
    for entry in entries:
        chain.append(entry["phase"], entry["record"], entry["files"])
    write_receipt(tree, run_dir, frozen, losses)
