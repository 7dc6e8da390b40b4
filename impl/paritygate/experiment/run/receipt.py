"""The page and the receipt of a run, finished or stopped: written last, over every file of its directory."""

import dataclasses

from paritygate.experiment.run.account.cost import TABLE
from paritygate.experiment.run.entry_points import folder, project_of
from paritygate.experiment.run.journal import Record, finite, read_lines
from paritygate.experiment.run.state import State
from paritygate.receipts import canonical, sha256_file, write_atomic

COST = "cost.json"


def write_report(state: State) -> None:
    """Write cost.json and report.html; a stopped run has them too."""
    from paritygate import report as page

    write_atomic(state.directory / COST, canonical(finite(state.cost().to_json())))
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
    """What the results depend on besides this tree, as in-toto resource descriptors; models as the service reports."""
    from paritygate.spec.pins import COOKBOOK, TREE_REFERENCE

    service, exp = state.facts("service_preflight"), state.exp
    probe, proof = service.get("probe", {}), state.facts("service_proof")
    restoration = state.facts("restoration_preflight")
    reported = {key: probe.get(key, {}) for key in ("base_model", "lora_rank")}
    adam = {"passed": restoration.get("adam", {}), "read_back": restoration.get("adam_read_back", "not asked")}
    described: list[Record] = [
        {
            "name": "tau-bench retail",
            "annotations": state.source.provenance | {"environment": state.options.environment},
        },
        {
            "name": COOKBOOK.source,
            "uri": f"pkg:pypi/{COOKBOOK.revision.replace('==', '@')}",
            "digest": {"sha256": str(COOKBOOK.sha256)},
        },
        {"name": TREE_REFERENCE, "digest": {"sha256": reference_digest(state)}},
        {"name": "tinker SDK", "annotations": {"version": service.get("sdk")}},
        {
            "name": "service",
            "annotations": {
                "endpoint": service.get("endpoint"),
                "models": service.get("models", []),
                "used": dict(state.account.used()),
                "adapters": state.facts("train").get("samplers", {}),
            },
        },
        *([{"name": "service proof", "digest": {"sha256": proof["sha256"]}}] if proof else []),
        {"name": "base model", "annotations": {"model": exp.base_model, "reported": reported, "adam": adam}},
        {"name": "user simulator", "annotations": dataclasses.asdict(exp.protocol.user)},
        {"name": "judge", "annotations": dataclasses.asdict(exp.protocol.judge) | {"judged": judged(state)}},
    ]
    if state.prices is not None:
        table = {"as_of": state.prices.as_of, "currency": state.prices.currency}
        described.append(
            {"name": "prices", "digest": {"sha256": sha256_file(state.directory / TABLE)}, "annotations": table}
        )
    for model, tokenizer in service.get("tokenizers", {}).items():
        what = {"model": model, "of": tokenizer["of"]}
        described.append(
            {"name": f"tokenizer of {model}", "digest": {"sha256": tokenizer["sha256"]}, "annotations": what}
        )
    return described + [entry_point(state, name) for name in exp.entry_points]


def entry_point(state: State, name: str) -> Record:
    """A loss that an arm names: the receipt that it was shown by, and the digest of each source of its repository.

    Raises Refused where code of it that ran is not what the receipt was shown for.
    """
    from paritygate.receipts import read_parity_receipt
    from paritygate.receipts.provenance import refuse_other_sources

    [path] = folder(state.directory, name).glob("parity-*.json")
    receipt = read_parity_receipt(path)
    refuse_other_sources(project_of(name).root, receipt)
    sources = {file: sha256 for file, sha256 in receipt.subjects.items() if not file.startswith("installed/")}
    return {"name": f"loss {name}", "digest": {"sha256": receipt.sha256}, "annotations": {"sources": sources}}


def reference_digest(state: State) -> str:
    """sha256 of {path: sha256} of every file under reference/, as parity was shown for: what `tree:reference` means."""
    from paritygate.receipts import digest, read_parity_receipt

    [parity] = state.directory.glob("parity-*.json")
    subjects = read_parity_receipt(parity).subjects
    return digest({name: sha256 for name, sha256 in subjects.items() if name.startswith("reference/")})


def judged(state: State) -> Record:
    """How many items were evaluated, and of how many the judge's answer was parsed, in the end and at first."""
    items = read_lines(state.directory / "items.jsonl")
    return {
        "items": len(items),
        "parsed": sum(item["composite"] is not None for item in items),
        "parsed_at_first": sum(bool(item["judge_first_try_parsed"]) for item in items),
    }
