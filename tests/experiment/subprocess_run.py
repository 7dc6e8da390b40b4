"""A run in a process of its own, to be killed: SPEC OUTPUT TAU_BENCH [--resume] [--vocabularies].

With a stub for the guard, and, for a foreign service, stand-ins for vocabularies that are in no package.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "impl"), str(ROOT)]


def main() -> int:
    """The exit code of run.py."""
    from paritygate import experiment, report
    from paritygate.errors import ParityGateError
    from paritygate.experiment.correctness import paths
    from paritygate.spec import load
    from tests import harmony_bytes
    from tests.experiment import stub_guard

    async def none(_: object) -> list[object]:
        return []

    stub_guard.install()
    if "--vocabularies" in sys.argv:
        harmony_bytes.stand_in()
    paths.model_comparisons = none
    report.write = lambda directory: (Path(directory) / "report.html").write_text("page")
    spec, output, data = sys.argv[1:4]
    try:
        resume = "--resume" in sys.argv
        experiment.run(load(spec), root=ROOT, output=Path(output), resume=resume, tau_bench=data, quiet=True)
    except ParityGateError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
