"""The page and the receipt of a run, finished or stopped: written last, over every file of its directory."""

from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.state import State


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
