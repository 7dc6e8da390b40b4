"""A run in a process of its own, to be killed: SPEC OUTPUT TAU_BENCH [--resume], with a stub for the guard."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "impl"), str(ROOT)]


def main() -> int:
    """The exit code of run.py."""
    from paritygate import experiment, report
    from paritygate.errors import ParityGateError
    from paritygate.spec import load
    from tests.experiment import stub_guard

    stub_guard.install()
    report.write = lambda directory: (Path(directory) / "report.html").write_text("page")
    spec, output, data = sys.argv[1:4]
    try:
        resume = "--resume" in sys.argv
        experiment.run_experiment(load(spec), root=ROOT, output=Path(output), resume=resume, tau_bench=data, quiet=True)
    except ParityGateError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
