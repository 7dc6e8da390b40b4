"""The decision, by the rule that was declared before; then the page and the receipt."""

import json
import shutil

from paritygate.experiment.journal import Record, finite
from paritygate.experiment.state import SERVICE, Decided, PhaseStopped, State
from paritygate.receipts import canonical, write_atomic
from paritygate.statistics import decide_frozen

VERDICT = "verdict.json"
REPORT = "report.html"


async def decide(state: State) -> Decided:
    """The verdict from items.jsonl and the frozen spec alone, written to verdict.json."""
    items: list[Record] = [json.loads(line) for line in (state.directory / "items.jsonl").read_bytes().splitlines()]
    verdict = decide_frozen(state.exp.frozen, items)
    write_atomic(state.directory / VERDICT, canonical(finite(verdict.to_json())))
    facts: Record = {"outcome": verdict.outcome}
    if verdict.outcome == "incomplete":
        raise PhaseStopped(Decided(verdict.why, "nothing is imputed", facts, [VERDICT, "items.jsonl"]))
    return Decided(verdict.why, "the pre-declared rule, nothing else", facts, [VERDICT, "items.jsonl"])


async def report(state: State) -> Decided:
    """report.html from the files of the run alone; receipt.json follows when everything else is on the disk."""
    await state.close_service()
    keep_products(state)
    write_report(state)
    return Decided(
        f"the page is {state.directory / REPORT}", "made from the run's files alone; it opens offline", {}, [REPORT]
    )


def keep_products(state: State) -> None:
    """Of what the embedded server saved, keep the trained arms (their last state and sampler) and delete the rest."""
    last = f"step-{state.exp.steps - 1:03d}"
    arms = [state.journal.committed(f"train-{arm.name}/{last}") or {} for arm in state.exp.arms]
    paths = [arm["state"] for arm in arms] + list(state.facts("train")["samplers"].values())
    kept = {state.saved(path) for path in paths}
    for folder in sorted((state.directory / SERVICE).glob("*/*/*")):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in sorted((state.directory / SERVICE).glob("**/"), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def write_report(state: State) -> None:
    """Write report.html; a stopped run has one too."""
    from paritygate import report as page

    page.write(state.directory)


def write_receipt(state: State) -> None:
    """receipt.json over every file of a finished or stopped run; written last, when nothing else writes any more."""
    from paritygate.receipts import read_parity_receipt, write_run_receipt

    [parity] = state.directory.glob("parity-*.json")
    write_run_receipt(
        state.directory,
        root=state.options.root,
        spec=state.exp.frozen,
        parity=read_parity_receipt(parity),
        losses=state.exp.losses,
        device=state.options.device,
        dependencies=dependencies(state),
    )


def dependencies(state: State) -> list[Record]:
    """What the results depend on besides this tree, as in-toto resource descriptors."""
    from paritygate.spec.pins import COOKBOOK

    service = state.facts("service_preflight")
    data = state.source.provenance
    asked = service.get("asked_for", {})
    described: list[Record] = [
        {"name": "tau-bench retail", "annotations": data},
        {
            "name": COOKBOOK.source,
            "uri": f"pkg:pypi/{COOKBOOK.revision.replace('==', '@')}",
            "digest": {"sha256": str(COOKBOOK.sha256)},
        },
        {"name": "tinker SDK", "annotations": {"version": service.get("sdk")}},
        {"name": "service", "annotations": {"endpoint": service.get("endpoint"), "models": service.get("models", [])}},
        {"name": "tokenizer", "annotations": service.get("tokenizer", {})},
    ]
    described += [{"name": role, "annotations": {"model": name}} for role, name in asked.items() if name]
    return described
