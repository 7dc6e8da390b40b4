"""`python -m paritygate.service`: hold a Tinker-compatible service to the definitions. The key is in TINKER_API_KEY."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paritygate.address import checked_url
from paritygate.bootstrap import Parser, exit_code
from paritygate.errors import BackendError, BadInputError
from paritygate.extras import require
from paritygate.service import obligations as spec

if TYPE_CHECKING:
    from paritygate.service.report import Report
    from paritygate.service.runner import Result

KEPT = "The same command goes on from here."


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 nothing departs, 3 something does, 2 bad input, 5 the service failed (run again to resume)."""
    args = _parser().parse_args(argv)
    return exit_code(
        "paritygate.service", lambda: _run(args), interrupted="interrupted; the same command goes on from here."
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m paritygate.service", description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"), help="default: TINKER_BASE_URL")
    parser.add_argument("--model", help="base model; default: the only one that the service reports")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("service-proof.json"),
        metavar="FILE",
        help="results, kept after every check; the page and the receipt are written beside it",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="GROUP", help="a group or an obligation; may be repeated"
    )
    parser.add_argument("--obligations", type=Path, metavar="FILE", help="default: spec/service.json")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank (default 8)")
    parser.add_argument(
        "--tokens", default="5:250", metavar="LOW:HIGH", help="token ids that the model has (default 5:250)"
    )
    parser.add_argument("--draws", type=int, default=2048, help="single tokens drawn for a distribution (default 2048)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for one call (default 120)")
    parser.add_argument("--fresh", action="store_true", help="do not go on from FILE, and replace it")
    parser.add_argument("--plan", action="store_true", help="say what would be checked and its price, call nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _run(args: argparse.Namespace) -> int:
    obligations = spec.load(args.obligations).only(args.only)
    calls, tokens = obligations.price
    groups = list(dict.fromkeys(entry.group for entry in obligations.entries))
    print(
        f"{len(obligations.entries)} obligations ({', '.join(groups)}): about {calls} calls and "
        f"{tokens} tokens; a call is given {args.limit:g} s.",
        file=sys.stderr,
        flush=True,
    )
    if args.plan:
        return 0
    require("service", "tinker")  # what a checkout needs beside NumPy; the wheel's extra brings more
    settings = _settings(args)
    if not args.base_url:
        raise BadInputError("Name the service: --base-url, or TINKER_BASE_URL.")
    name = "TINKER_BASE_URL" if args.base_url == os.environ.get("TINKER_BASE_URL") else "--base-url"
    args.base_url = checked_url(args.base_url, name)
    if not os.environ.get("TINKER_API_KEY"):
        raise BadInputError("Set TINKER_API_KEY to the service's key; a service without keys takes tml-anything.")
    from paritygate.service import proof
    from paritygate.service import report as reports
    from paritygate.service.lab import Settings

    reports.check_writable(args.json)
    earlier = None if args.fresh else reports.read(args.json)
    if earlier is not None and earlier.complete:
        _refuse_to_replace(args, earlier, obligations)
    logging.getLogger("tinker").setLevel(logging.CRITICAL)  # its retries and deprecations are not this report's subject

    receipt = args.json.with_suffix(".receipt.json")
    saved: list[reports.Report] = []

    def save(report: reports.Report) -> None:
        saved.append(report)
        receipt.unlink(missing_ok=True)  # of an earlier proof, which this one replaces
        reports.write_json(args.json, report)
        reports.write(args.json.with_suffix(".html"), reports.page(report, obligations))
        if not args.quiet and not report.complete:
            _say(report.results[-1], f"[{len(report.results)}/{len(obligations.entries)}]")

    try:
        report = proof.prove_at(
            args.base_url,
            os.environ["TINKER_API_KEY"],
            args.model,
            obligations,
            settings=Settings(**settings),
            limit=args.limit,
            earlier=earlier,
            save=save,
            say=lambda sentence: None if args.quiet else print(sentence, file=sys.stderr, flush=True),
        )
    except BackendError as error:
        raise BackendError(f"{error} {KEPT}" if saved else str(error)) from error
    _finish(args.json, report, obligations)
    return 3 if any(result.outcome == "departs" for result in report.results) else 0


def _refuse_to_replace(args: argparse.Namespace, earlier: "Report", obligations: spec.Obligations) -> None:
    """BadInputError where the file holds a finished proof that this one would not show again."""
    wanted = {entry.name for entry in obligations.entries}
    lost = [result.name for result in earlier.results if result.name not in wanted]
    if earlier.endpoint != args.base_url or args.model not in (None, earlier.model) or lost:
        raise BadInputError(
            f"{args.json} holds a finished proof of {earlier.endpoint} ({earlier.model}, {len(earlier.results)} "
            "obligations); name another file with --json, or say --fresh to replace it."
        )


def _say(result: "Result", place: str) -> None:
    figure = "" if result.figure is None else f" {result.figure:.2g} / {result.bound:.2g}"
    print(f"{place} {result.name}: {result.outcome}{figure}", file=sys.stderr, flush=True)


def _finish(path: Path, report: "Report", obligations: spec.Obligations) -> None:
    import json

    from paritygate.service import report as reports
    from paritygate.service.receipt import receipt

    written = path.with_suffix(".receipt.json")
    reports.write(written, json.dumps(receipt(report, obligations), indent=1) + "\n")
    print(reports.table(report.results))
    print(reports.summary(report))
    print(f"{path}, {path.with_suffix('.html')}, {written}")


def _settings(args: argparse.Namespace) -> dict[str, int]:
    try:
        low, high = (int(part) for part in args.tokens.split(":"))
    except ValueError:
        raise BadInputError(f"--tokens {args.tokens!r} is no LOW:HIGH, as in 5:250.") from None
    if low < 0 or high - low < 32:
        raise BadInputError(f"--tokens {args.tokens!r}: at least 32 ids from 0 on are needed.")
    for name in ("rank", "draws", "limit"):
        if not getattr(args, name) > 0:
            raise BadInputError(f"--{name} {getattr(args, name)} must be above 0.")
    return {"rank": args.rank, "low": low, "high": high, "draws": args.draws}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a call that hangs leaves a thread of the SDK behind
