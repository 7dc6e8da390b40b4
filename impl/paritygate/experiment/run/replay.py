"""A finished run checked again from its files alone: the receipts, the losses of its spec, its verdict."""

from pathlib import Path
from typing import Any

from paritygate.errors import ParityGateError, Refused
from paritygate.experiment.run.journal import finite
from paritygate.receipts import verify_run
from paritygate.receipts.environment import installed
from paritygate.receipts.files import read_json


def replay(run_dir: Path, root: Path) -> list[str]:
    """Check the run in `run_dir` against the checkout at `root`; raises Refused naming the file.

    The lines say how the versions here differ from those of the run (which is not judged), and the verdict.
    """
    receipt = verify_run(run_dir, root=root, stands_on=stands_on, recompute=verdict)
    then, here = receipt["predicate"]["buildDefinition"]["internalParameters"]["installed"], installed(root)
    lines = [
        f"{name}: {then.get(name, 'not named')} in the run, {here.get(name, 'not named')} here (not judged)"
        for name in sorted(then.keys() | here.keys())
        if then.get(name) != here.get(name)
    ]
    path = run_dir / "verdict.json"
    outcome = read_json(path)["outcome"] if path.exists() else "none, a gate stopped the run"
    return [*lines, f"{run_dir} verifies; the verdict, recomputed from the per-item results: {outcome}"]


def stands_on(run_dir: Path) -> tuple[str, ...]:
    """The losses of the spec in `run_dir`; raises Refused when it is no spec."""
    from paritygate.spec import SpecError, load

    try:
        return load(run_dir / "spec.json").losses
    except SpecError as error:
        raise Refused(f"{run_dir / 'spec.json'} is no spec: {error}.") from error


def verdict(run_dir: Path) -> Any:
    """The verdict of the files in `run_dir`, computed anew, as JSON; raises Refused naming a file that gives none."""
    from paritygate.statistics import decide_frozen

    items = run_dir / "items.jsonl"
    try:
        rows = [read_json(items, line) for line in items.read_bytes().splitlines()]
        return finite(decide_frozen(read_json(run_dir / "spec.json"), rows).to_json())
    except (OSError, ValueError, KeyError, TypeError, ParityGateError) as error:
        raise Refused(f"{items} gives no verdict with {run_dir / 'spec.json'}: {error!r}.") from error
