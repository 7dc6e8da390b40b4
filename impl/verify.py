"""python impl/verify.py --parity [--spec FILE] | RUN_DIR | FILE: does a receipt fit; re-check a run or receipt."""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
sys.pycache_prefix = os.devnull  # no cached bytecode of ours can lie there: a poisoned one is not read
from paritygate.bootstrap import Parser, bootstrap, exit_code  # noqa: E402


def main() -> int:
    """Parse the command line, check, print one line; the exit code."""
    parser = Parser(prog="verify.py", description=__doc__)
    parser.add_argument(
        "run_dir",
        nargs="?",
        metavar="RUN_DIR",
        help="re-check offline: a finished run, or a service receipt (a file)",
    )
    parser.add_argument("--parity", action="store_true", help="is there a green parity receipt for this tree?")
    parser.add_argument("--spec", metavar="FILE", help="with --parity: only the losses that this experiment stands on")
    parser.add_argument("--device", default="cpu", metavar="D", help="with --parity: cpu or cuda")
    arguments = parser.parse_args()
    if arguments.parity == (arguments.run_dir is not None):
        parser.error("name a RUN_DIR, or --parity")

    def work() -> str:
        root = bootstrap(__file__)
        if arguments.parity:
            return parity(root, arguments.spec, arguments.device)
        if Path(arguments.run_dir).is_file():
            from paritygate.service.receipt import sentence, verify

            return f"{arguments.run_dir} verifies: {sentence(verify(Path(arguments.run_dir)))}"
        from paritygate.experiment.audit import audit

        return "\n".join(audit(Path(arguments.run_dir), root))

    return exit_code("verify.py", work)


def parity(root: Path, spec: str | None, device: str) -> str:
    """One line about the receipt that fits the tree at `root`; raises Refused when none does."""
    from paritygate.receipts import guard
    from paritygate.spec.losses import load_losses

    named: tuple[str, ...] = ()
    if spec is None:
        losses = tuple(load_losses(root)["losses"])
    else:
        from paritygate.spec import Experiment, load

        loaded = load(spec)
        losses, named = loaded.losses, loaded.entry_points if isinstance(loaded, Experiment) else ()
    receipt = guard(root, losses, device)
    lines = [f"parity holds for {', '.join(losses)} on {device}: receipts/{receipt.path.name}"]
    for name in named:
        from paritygate.experiment.run.entry_points import require

        lines.append(f"parity holds for {name}: {require(name).path}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
