"""Hold somebody else's Tinker-compatible service to the definitions: `python prove.py skyrl|hatchery [-- OPTIONS]`.

Builds two environments under build/foreign (the service's, and the Tinker SDK that it speaks), serves a tiny Qwen3 on
127.0.0.1, runs `python -m paritygate.service` against it and writes JSON, page and receipt beside them; what an
interrupted run had is kept, and the same command goes on. Needs Python 3.12 (PYTHON312). Not part of the suite: an
environment is several gigabytes. Exit codes are the proof's; 2 too where something is missing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "impl")]

from tests.service.foreign import services  # noqa: E402


def prove(name: str, version: str | None, file: Path, rest: list[str]) -> int:
    """The exit code of the proof of `name` with SDK `version` (None: the service's), written to `file`.

    A service that ends in the middle (skyrl's JAX engine does, out of memory maps after some 1,000 calls) is started
    again, and the proof goes on, as long as that brings it further.
    """
    while True:
        had = _kept(file)
        code = _once(name, version, file, rest)
        if code != 5 or _kept(file) <= had:
            return code
        print(
            f"prove.py: {name} ended after {_kept(file)} obligations; it is started again.", file=sys.stderr, flush=True
        )


def _kept(file: Path) -> int:
    """How many obligations of an unfinished proof are there to go on from."""
    report = json.loads(file.read_text()) if file.exists() else {"complete": True}
    return 0 if report["complete"] else len(report["obligations"])


def _once(name: str, version: str | None, file: Path, rest: list[str]) -> int:
    service = services.SERVICES[name]
    python = services.sdk(version or service.sdk)
    with services.serving(name, file.parent) as (url, model):
        command = [python, "-m", "paritygate.service", "--base-url", url, *model, "--limit", str(service.limit)]
        command += ["--json", str(file), *rest]
        keys = {"PYTHONPATH": str(ROOT / "impl"), "TINKER_API_KEY": services.KEY, "TINKER_TELEMETRY": "0"}
        proof = subprocess.Popen(command, env={**os.environ, **keys})
        try:
            return proof.wait()
        except BaseException:
            proof.terminate()  # what it had is on disk
            proof.wait()
            raise


def terminated(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends this program as Ctrl-C does: the server is stopped."""
    raise KeyboardInterrupt


def main() -> int:
    """The proof's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=services.SERVICES)
    parser.add_argument("--sdk", metavar="VERSION", help="another Tinker SDK than the one that the service speaks")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, rest = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    signal.signal(signal.SIGTERM, terminated)
    folder = services.BUILD / options.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return prove(options.name, options.sdk, folder / "service-proof.json", rest)
    except services.Missing as missing:
        print(f"prove.py: {missing}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prove.py: interrupted; the service is stopped, and the same command goes on.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
