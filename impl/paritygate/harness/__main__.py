"""`python -m paritygate.harness MODULE | new NAME | mutants [NAME ...]`.

Hold another trainer's losses (MODULE, an adapter such as those of examples/trainers) to the definitions; write the
pieces of a new loss; do its mutants die?
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paritygate.bootstrap import Parser, exit_code
from paritygate.extras import require

COMMANDS = ("hold", "new", "mutants")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 bad input, 3 a mutant lives or plain inputs depart."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        arguments.insert(0, "hold")
    parser = Parser(prog="python -m paritygate.harness", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="MODULE | new | mutants")
    hold = commands.add_parser("hold", help="MODULE against the definitions: plain inputs, stresses, promises")
    hold.add_argument("module", metavar="MODULE", help="an adapter: has the names of paritygate.losses that it offers")
    hold.add_argument("--json", type=Path, metavar="FILE", help="write the report there, and a page beside it (.html)")
    hold.add_argument("--html", type=Path, metavar="FILE", help="write the page there")
    hold.add_argument("--known", type=Path, metavar="FILE", help="known departures, each with a reason")
    new = commands.add_parser("new", help="write spec entry, reference, implementation, test and mutant of a loss")
    new.add_argument("name", metavar="NAME", help="a Python identifier in small letters")
    mutants = commands.add_parser("mutants", help="does each known mistake die by the obligation that it names?")
    mutants.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    options = parser.parse_args(arguments)
    return exit_code("paritygate.harness", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Run the command that was parsed; its exit code."""
    require("harness")
    if options.command == "hold":
        from paritygate.harness.conformance.command import conformance

        return conformance(options)
    from paritygate.harness.mutants import run_mutants
    from paritygate.harness.pieces import check_name, project_for, write_pieces
    from paritygate.spec.project import project_around

    if options.command == "new":
        check_name(options.name)
        project, written = project_for(Path.cwd())
        print(*written, *write_pieces(project, options.name), sep="\n")
        return 0
    alive = run_mutants(project_around(Path.cwd()), options.names, lambda line: print(line, flush=True))
    return 3 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
