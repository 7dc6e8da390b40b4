"""Which Tinker SDK speaks to which service: `python sdk_matrix.py`, a table and build/foreign/matrix/sdk-matrix.json.

Each pair proves a few obligations of every group with `python -m paritygate.service`; SDKs and services have
environments of their own (see services.py). A pair that cannot speak has to end in one sentence and exit code 5 or 2,
not in a traceback and not in a hang.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "impl")]

from tests.service.foreign import services  # noqa: E402
from tests.service.foreign.prove import terminated  # noqa: E402

SDKS = ("0.18.1", "0.24.1", "0.25.0", "0.38.0")
ONE_EACH = (
    *("wire/verbs", "wire/loss_sum", "value/cross_entropy", "value/ppo", "gradient/ppo", "gradient/custom"),
    *("sums/split", "optimiser/betas", "state/optimizer_restored", "sampling/three_ways", "sampling/seed_repeats"),
    "isolation/two_tenants",
)
SECONDS = 1500  # for one pair; skyrl compiles for minutes


def pair(name: str, version: str, url: str, model: list[str], rest: list[str]) -> dict[str, Any]:
    """One row of the table."""
    file = services.BUILD / "matrix" / f"{name}-{version}.json"
    file.unlink(missing_ok=True)
    command = [services.sdk(version), "-m", "paritygate.service", "--base-url", url, *model, "--json", str(file)]
    command += ["--quiet", "--limit", str(services.SERVICES[name].limit), *rest]
    keys = {"PYTHONPATH": str(ROOT / "impl"), "TINKER_API_KEY": services.KEY, "TINKER_TELEMETRY": "0"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, env={**os.environ, **keys}, capture_output=True, text=True, check=False, timeout=SECONDS
        )
        code, lines = done.returncode, done.stderr.strip().splitlines()
        trace = any("Traceback" in line for line in lines)
        last = "a traceback" if trace else lines[-1].removeprefix("paritygate.service: ") if code in (2, 5) else ""
    except subprocess.TimeoutExpired:
        code, last = None, f"no end within {SECONDS} s"
    counts: dict[str, int] = {}
    for entry in json.loads(file.read_text())["obligations"] if file.exists() else ():
        counts[entry["outcome"]] = counts.get(entry["outcome"], 0) + 1
    seconds = round(time.monotonic() - started)
    return {"service": name, "sdk": version, "exit": code, "outcomes": counts, "said": last, "seconds": seconds}


def main() -> int:
    """0 when every pair ended as it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--service", action="append", choices=services.SERVICES, help="default: all of them")
    parser.add_argument("--sdk", action="append", metavar="VERSION", help=f"default: {', '.join(SDKS)}")
    parser.add_argument("--only", action="append", metavar="GROUP", help="default: a few of every group")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, terminated)
    rest = [part for one in options.only or ONE_EACH for part in ("--only", one)]
    rows: list[dict[str, Any]] = []
    try:
        for name in options.service or services.SERVICES:
            for version in options.sdk or SDKS:  # a fresh server each: what a pair left behind is not the next one's
                services.sdk(version)
                with services.serving(name, services.BUILD / "matrix" / name) as (url, model):
                    rows.append(row := pair(name, version, url, model, rest))
                outcomes = ", ".join(f"{count} {outcome}" for outcome, count in row["outcomes"].items())
                message = f"  {row['said']}" if row["said"] else ""
                (services.BUILD / "matrix" / "sdk-matrix.json").write_text(json.dumps(rows, indent=1) + "\n")
                print(f"{name:9} tinker {version:7} exit {row['exit']}  {outcomes}{message}", flush=True)
    except services.Missing as missing:
        print(f"sdk_matrix.py: {missing}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sdk_matrix.py: interrupted; the service is stopped.", file=sys.stderr)
        return 130
    return 0 if all(row["exit"] in (0, 2, 3, 5) and row["said"] != "a traceback" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
