"""python impl/verify.py --parity [--spec FILE] | RUN_DIR: does a receipt fit this tree; re-check a finished run."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
sys.pycache_prefix = os.devnull  # no cached bytecode of ours can lie there: a poisoned one is not read
from paritygate.bootstrap import bootstrap  # noqa: E402
from paritygate.errors import ParityGateError, Refused  # noqa: E402


def main() -> int:
    """Parse the command line, check, print one line; the exit code."""
    parser = argparse.ArgumentParser(prog="verify.py", description=__doc__)
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="a finished run: re-check it offline")
    parser.add_argument("--parity", action="store_true", help="is there a green parity receipt for this tree?")
    parser.add_argument("--spec", metavar="FILE", help="with --parity: only the losses that this experiment stands on")
    parser.add_argument("--device", default="cpu", metavar="D", help="with --parity: cpu or cuda")
    arguments = parser.parse_args()
    if arguments.parity == (arguments.run_dir is not None):
        parser.error("name a RUN_DIR, or --parity")
    try:
        root = bootstrap(__file__)
        if arguments.parity:
            print(parity(root, arguments.spec, arguments.device))
        else:
            print(run(root, Path(arguments.run_dir)))
    except ParityGateError as error:
        print(f"verify.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parity(root: Path, spec: str | None, device: str) -> str:
    """One line about the receipt that fits the tree at `root`; raises Refused when none does."""
    from paritygate.receipts import guard
    from paritygate.receipts.obligations import load_losses

    if spec is None:
        losses = tuple(load_losses(root)["losses"])
    else:
        from paritygate.spec import load

        losses = load(spec).losses
    receipt = guard(root, losses, device)
    return f"parity holds for {', '.join(losses)} on {device}: receipts/{receipt.path.name}"


def run(root: Path, run_dir: Path) -> str:
    """One line about the run in `run_dir`, checked and its verdict recomputed; raises Refused naming the file."""
    from paritygate.receipts import verify_run
    from paritygate.receipts.environment import installed

    receipt = verify_run(run_dir, root=root, stands_on=stands_on, recompute=verdict)
    then, here = receipt["predicate"]["buildDefinition"]["internalParameters"]["installed"], installed(root)
    for name in sorted(name for name in then.keys() | here.keys() if then.get(name) != here.get(name)):
        print(f"{name}: {then.get(name, 'not named')} in the run, {here.get(name, 'not named')} here (not judged)")
    path = run_dir / "verdict.json"
    outcome = json.loads(path.read_bytes())["outcome"] if path.exists() else "none: a gate stopped the run"
    return f"{run_dir} verifies; the verdict, recomputed from the per-item results: {outcome}"


def stands_on(run_dir: Path) -> tuple[str, ...]:
    """The losses of the spec in `run_dir`; raises Refused when it is no spec."""
    from paritygate.spec import SpecError, load

    try:
        return load(run_dir / "spec.json").losses
    except SpecError as error:
        raise Refused(f"{run_dir / 'spec.json'} is no spec: {error}.") from error


def verdict(run_dir: Path) -> Any:
    """The verdict of the files in `run_dir`, computed anew, as JSON; raises Refused naming a file that gives none."""
    from paritygate.experiment.journal import finite
    from paritygate.statistics import decide_frozen

    items = run_dir / "items.jsonl"
    try:
        rows = [json.loads(line) for line in items.read_bytes().splitlines()]
        return finite(decide_frozen(json.loads((run_dir / "spec.json").read_bytes()), rows).to_json())
    except (OSError, ValueError, KeyError, TypeError, ParityGateError) as error:
        raise Refused(f"{items} gives no verdict with {run_dir / 'spec.json'}: {error!r}.") from error


if __name__ == "__main__":
    raise SystemExit(main())
