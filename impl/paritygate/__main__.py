"""`paritygate server|service|harness|verify ...`: the commands of the wheel; each has its own --help."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paritygate.bootstrap import Parser, complain, exit_code, write

COMMANDS = {
    "server": "the embedded Tinker-compatible server",
    "service": "hold a Tinker-compatible service to the definitions",
    "harness": "hold another trainer's losses (MODULE); prove your own: the pieces of a new loss, its mutants",
    "verify": "is there a green parity receipt for the repository here?",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. A missing extra, bad input and a refusal are one sentence each."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name not in COMMANDS:
        lines = [f"  {command:<8} {what}" for command, what in COMMANDS.items()]
        usage = "\n".join(["usage: paritygate COMMAND ...", *lines])
        return write("paritygate", usage) if name in ("-h", "--help") else complain(usage, 2)
    return exit_code(f"paritygate {name}", lambda: _run(name, rest))


def _run(name: str, arguments: list[str]) -> int | str:
    from paritygate.extras import require

    if name != "service":  # which needs less than its extra brings, and says so itself
        require("harness" if name == "verify" else name)
    if name == "server":
        from paritygate.server.__main__ import main as command
    elif name == "service":
        from paritygate.service.__main__ import main as command
    elif name == "harness":
        from paritygate.harness.__main__ import main as command
    else:
        command = _verify
    return command(arguments)


def _verify(arguments: list[str]) -> str:
    """Which receipt fits the repository around the working folder; raises Refused where none does."""
    from paritygate.receipts import guard
    from paritygate.spec.losses import load_losses
    from paritygate.spec.project import project_around

    parser = Parser(prog="paritygate verify", description=_verify.__doc__)
    parser.add_argument("--losses", metavar="NAMES", help="these alone, separated by commas")
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda")
    options = parser.parse_args(arguments)
    root = project_around(Path(os.getcwd())).root
    losses = options.losses.split(",") if options.losses else list(load_losses(root)["losses"])
    receipt = guard(root, losses, options.device)
    return f"parity holds for {', '.join(losses)} on {options.device}: {receipt.path.relative_to(root)}"


if __name__ == "__main__":
    sys.exit(main())
