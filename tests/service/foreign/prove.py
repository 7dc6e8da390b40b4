"""Hold somebody else's Tinker-compatible service to the definitions: `python prove.py skyrl|hatchery`.

Builds two environments under build/foreign (the service's, and the Tinker SDK that it speaks), serves a tiny Qwen3 on
127.0.0.1, runs `python -m paritygate.service` against it and writes JSON, page and receipt beside them. Needs Python
3.12 (PYTHON312). Not part of the suite: an environment is several gigabytes. Exit codes as the proof's.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "foreign"


class Foreign(NamedTuple):
    """A service: what pip installs, the script that serves it, the SDK that speaks to it, a call's limit in s."""

    packages: tuple[str, ...]
    script: str
    sdk: str
    limit: int


SERVICES = {
    "skyrl": Foreign(("skyrl[tinker,jax]==0.4.0", "aiohttp"), "skyrl_server.py", "tinker==0.25.0", 300),
    "hatchery": Foreign(("hatchery-core==0.3.0",), "hatchery_server.py", "tinker==0.24.1", 60),
}


def python312() -> str:
    """A Python 3.12; SystemExit with one sentence where there is none."""
    for interpreter in (os.environ.get("PYTHON312"), shutil.which("python3.12")):
        if interpreter and subprocess.run([interpreter, "--version"], capture_output=True, check=False).returncode == 0:
            return interpreter
    raise SystemExit("These services need Python 3.12: name one in PYTHON312.")


def environment(name: str, packages: tuple[str, ...]) -> str:
    """The interpreter of a virtual environment with `packages`, made on first use."""
    folder = BUILD / f"{name}-env"
    if not (folder / ".installed").exists():
        print(f"installing {', '.join(packages)} into {folder}", flush=True)
        subprocess.run([python312(), "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / ".installed").touch()
    return str(folder / "bin/python")


def tiny_model() -> Path:
    """A folder with the embedded server's tiny Qwen3: random weights, a tokenizer of 480 tokens."""
    folder = BUILD / "tiny-qwen3"
    if not (folder / "generation_config.json").exists():
        sys.path.insert(0, str(ROOT / "impl"))
        from paritygate.server.model import tiny

        folder.mkdir(parents=True, exist_ok=True)
        tiny.build(folder)
    return folder


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait(url: str, server: subprocess.Popen[bytes], seconds: float = 300.0) -> None:
    """Until `url` answers; SystemExit when the server ends or the time does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit(f"the service ended with exit code {server.returncode}; see its log.")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1.0)
    raise SystemExit(f"{url} did not answer within {seconds:g} s; see the service's log.")


def main() -> int:
    """The proof's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=SERVICES)
    parser.add_argument("rest", nargs="*", help="handed to `python -m paritygate.service`, after --")
    options = parser.parse_args()
    service = SERVICES[options.name]
    BUILD.mkdir(parents=True, exist_ok=True)
    theirs = environment(options.name, service.packages)
    ours = environment(service.sdk, (service.sdk, "numpy"))
    folder, port, model = BUILD / options.name, free_port(), tiny_model()
    folder.mkdir(exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    with (folder / "service.log").open("wb") as log:
        command = [theirs, str(HERE / service.script), str(model), str(port), str(folder)]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait(f"{url}/api/v1/healthz", server)
            command = [ours, "-m", "paritygate.service", "--base-url", url, "--model", str(model)]
            command += ["--limit", str(service.limit), "--json", str(folder / "service-proof.json"), *options.rest]
            keys = {"PYTHONPATH": str(ROOT / "impl"), "TINKER_API_KEY": "tml-proof", "TINKER_TELEMETRY": "0"}
            return subprocess.run(command, env={**os.environ, **keys}, check=False).returncode
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


if __name__ == "__main__":
    raise SystemExit(main())
