"""`python -m paritygate.harness MODULE`: a bounded process judges the module, and a report of it is written."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paritygate
from paritygate.errors import BadInputError
from paritygate.harness.conformance.known import apply, load
from paritygate.harness.conformance.report import page, table
from paritygate.harness.conformance.snippet import snippet

SECONDS = 300.0
MEMORY = 2 << 30
KINDS = ("plain", "stress", "promises")


def conformance(options: argparse.Namespace) -> int:
    """Print the table, write what is asked for; 0 where all plain rows agree or are known, 3 where one departs.

    Raises BadInputError (exit 2) for a module that does not import, and where the process ended before its time.
    """
    accepted = load(options.known) if options.known else []
    report, unfinished = judged(options.module)
    unused = apply(accepted, report)
    print(table(report, unused))
    html = options.html or (options.json.with_suffix(".html") if options.json else None)
    texts = {options.json: json.dumps(report, indent=1) + "\n", html: page(report) if html else ""}
    for path, text in texts.items():
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if unfinished:
        raise BadInputError(unfinished)
    return 3 if any(row["outcome"] in ("departs", "scaled") and "known" not in row for row in report["plain"]) else 0


def judged(module: str) -> tuple[dict[str, Any], str]:
    """The report of a module, and why it is unfinished ("" where it is not); raises BadInputError: does not import."""
    with tempfile.TemporaryDirectory(prefix="paritygate-") as folder:
        output, log = Path(folder) / "rows", Path(folder) / "log"
        ended = bounded(module, output, log)
        lines = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
        last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    facts = {key: value for line in lines for key, value in line.items() if key not in KINDS}
    if "failed" in facts:
        raise BadInputError(facts["failed"])
    if "start" not in facts:
        raise BadInputError(f"{module} was not imported: {ended or last or 'its process ended'}.")
    start = facts["start"]
    report: dict[str, Any] = {
        "module": module,
        "versions": start["versions"],
        "digests": start["digests"],
        **{kind: [line[kind] for line in lines if kind in line] for kind in KINDS},
    }
    for row in (row for kind in KINDS for row in report[kind]):
        if row["smallest"]:
            row["snippet"] = snippet(module, start["source"], row)
    return report, "" if "done" in facts else f"{module} was not judged to the end: {ended or last or 'no output'}."


def bounded(module: str, output: Path, log: Path) -> str:
    """Run the judging process within SECONDS and MEMORY; why it was ended, "" where it ended by itself."""
    roots = [root for root in homes() if root.is_dir()]
    path = os.pathsep.join([*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "paritygate.harness.conformance.child", module, str(output)]
    with log.open("wb") as file:
        child = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return watched(child)
        finally:
            with_children(child)


def homes() -> list[Path]:
    """Where paritygate comes from, and in a checkout the reference, which no run can import."""
    package = Path(paritygate.__file__ or "").resolve().parent
    return [package.parent, package.parent.parent / "reference"]


def watched(child: subprocess.Popen[bytes]) -> str:
    """Wait for the process; why it is to be ended, "" where it ended."""
    end = time.monotonic() + SECONDS
    while child.poll() is None:
        if time.monotonic() > end:
            return f"it took more than {SECONDS:g} seconds"
        if resident(child.pid) > MEMORY:
            return f"it used more than {MEMORY >> 30} GB"
        time.sleep(0.05)
    if child.returncode < 0:
        return f"its process was ended by signal {signal.Signals(-child.returncode).name}"
    return ""


def resident(pid: int) -> int:
    """Bytes of memory that the process holds; 0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def with_children(child: subprocess.Popen[bytes]) -> None:
    """End the process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
