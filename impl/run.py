"""Run what a spec names: python impl/run.py --spec spec/sdpo-local.json"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
sys.pycache_prefix = os.devnull  # no cached bytecode of ours can lie there: a poisoned one is not read
from paritygate.bootstrap import Parser, bootstrap, exit_code  # noqa: E402
from paritygate.errors import BadInputError  # noqa: E402

EXIT_CODES = "exit codes: 0 done; 2 bad input; 3 refused; 4 stopped by a gate; 5 the service failed (--resume); 1 a bug"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The parsed command line; argparse itself exits with 2 and one sentence."""
    parser = Parser("run.py", description="Run the experiment that a spec names.", epilog=EXIT_CODES)
    parser.add_argument("--spec", required=True, metavar="FILE", help="the spec, anywhere (spec/sdpo.json)")
    parser.add_argument("--output", type=Path, metavar="PATH", help="run directory, or a .json file (synthetic)")
    parser.add_argument("--resume", action="store_true", help="go on at the first phase without a receipt")
    parser.add_argument("--check", action="store_true", help="print the whole plan; needs no service, refuses nothing")
    parser.add_argument("--until", metavar="PHASE", help="stop after this phase")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--seeds", metavar="N,N,...", help="seeds of a synthetic component, e.g. 42,43,44")
    parser.add_argument("--tau-bench", metavar="DIR", help="tau-bench retail data (default: PARITYGATE_TAU_BENCH)")
    parser.add_argument("--environment", choices=("own", "upstream"), default="own", help="which retail environment")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="a price table (default: the one the spec names)")
    parser.add_argument("--trust-receipt", action="store_true", help="take a signed parity receipt, do not re-run it")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args(argv)


def call(root: Path, options: dict[str, Any]) -> Any:
    """Load the spec and hand over to what it names."""
    from paritygate.spec import Synthetic, load

    spec, check, environment = load(options.pop("spec")), options.pop("check"), options.pop("environment")
    for name in (
        ("resume", "until", "tau_bench", "trust_receipt", "prices") if isinstance(spec, Synthetic) else ("seeds",)
    ):
        if options.pop(name):
            raise BadInputError(f"--{name.replace('_', '-')} is for another kind of run than {spec.path} names.")
    if isinstance(spec, Synthetic):
        from paritygate import synthetic

        return synthetic.plan(spec, **options) if check else synthetic.run(spec, root=root, **options)
    if check:
        from paritygate.experiment.check import plan

        return plan(spec, root=root, **{name: options[name] for name in ("device", "tau_bench", "prices")})
    from paritygate import experiment

    return experiment.run_experiment(spec, root=root, environment=environment, **options)


def main(argv: list[str] | None = None) -> int:
    """The exit code; everything that is not a bug of ours is one sentence on stderr."""

    def work() -> str:
        root, options = bootstrap(__file__), vars(arguments(argv))
        result = call(root, options)
        return json.dumps(result.to_json(), indent=2, ensure_ascii=False) if options["json"] else result.text()

    interrupted = "interrupted. --resume goes on at the first phase without a receipt."
    return exit_code("run.py", work, interrupted=interrupted)


if __name__ == "__main__":
    raise SystemExit(main())
