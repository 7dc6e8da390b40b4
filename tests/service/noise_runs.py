"""Prove right services whose answers are noisy, or that honour no seed: a line of JSON for each.

`python tests/service/noise_runs.py SIGMA:SEED|without-seeds ... [--only GROUP]`
"""

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("impl", "reference", ".")]

from tests.mutants import hold_service  # noqa: E402
from tests.mutants.service.harmless import WITHOUT_SEEDS, noise  # noqa: E402


def main() -> None:
    """A process for each service, one after another, so that nothing is shared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("services", nargs="+", metavar="SIGMA:SEED", help="or without-seeds")
    parser.add_argument("--only", action="append", default=[], metavar="GROUP")
    args = parser.parse_args()
    hold_service.preload()
    for name in args.services:
        sigma, _, seed = name.partition(":")
        mutant = WITHOUT_SEEDS if name == WITHOUT_SEEDS.name else noise(float(sigma), int(seed))
        results = hold_service.proved(mutant, args.only)
        if isinstance(results, str):
            sys.exit(f"{name}: {results}")
        outcomes = {result.name: result.outcome for result in results.values()}
        ratios = {r.name: r.figure / r.bound for r in results.values() if r.figure is not None and r.bound}
        worst = max(ratios, key=ratios.__getitem__)
        departures = {r.name: r.because for r in results.values() if r.outcome == "departs"}
        line = {"service": name, "worst": worst, "of_its_bound": ratios[worst], "departs": departures}
        print(json.dumps({**line, "outcomes": outcomes}), flush=True)


if __name__ == "__main__":
    main()
