"""Other people's Tinker-compatible services: what pip installs, and how each is started and stopped on this machine.

Everything lies under build/foreign. A missing interpreter, a failed installation or a server that does not come up is
`Missing`, with one sentence.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "foreign"
KEY = "tml-proof"
TORCH = "torch==2.13.0"


class Missing(Exception):  # noqa: N818 - what it is
    """Something that a person has to provide, in one sentence."""


class Service(NamedTuple):
    """installs: arguments of pip, call by call. script: what serves. sdk: what speaks to it. limit: a call's, in s."""

    installs: tuple[tuple[str, ...], ...]
    script: str
    sdk: str
    limit: int


# hatchery-core 0.3.0 asks for torch 2.10, several gigabytes; it runs with the torch that the rest of this project has.
SERVICES = {
    "skyrl": Service(((TORCH, "skyrl[tinker,jax]==0.4.0", "aiohttp"),), "skyrl_server.py", "0.25.0", 300),
    "hatchery": Service(
        (
            (TORCH, "transformers==5.16.1", "peft==0.18.1", "fastapi", "uvicorn[standard]", "msgpack", "aiosqlite"),
            ("structlog", "httpx", "pydantic"),
            ("--no-deps", "hatchery-core==0.3.0", "hatchery-client==0.2.0"),
        ),
        "hatchery_server.py",
        "0.24.1",
        60,
    ),
    "skyrl-tx": Service(
        ((TORCH, "skyrl-tx[tinker]==0.3.0", "jax<1.0,>=0.8", "flax", "optax"),), "skyrl_tx_server.py", "0.18.1", 300
    ),
    "embedded": Service((), "", "0.38.0", 60),
}


def python312() -> str:
    """A Python 3.12 or later: PYTHON312, else python3.12 of the path."""
    check = "import sys; sys.exit(sys.version_info < (3, 12))"
    for interpreter in (os.environ.get("PYTHON312"), shutil.which("python3.12")):
        with suppress(OSError):
            if interpreter and subprocess.run([interpreter, "-c", check], check=False).returncode == 0:
                return interpreter
    raise Missing("These services need Python 3.12: name its interpreter in PYTHON312.")


def environment(name: str, installs: tuple[tuple[str, ...], ...]) -> str:
    """The interpreter of the virtual environment `name`, made on first use and when `installs` change."""
    folder = BUILD / f"{name}-env"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(" ".join(one) for one in installs)
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    maker = python312()
    print(f"Making {folder.relative_to(ROOT)} ({wanted.split()[0]} and more); this can take minutes.", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run([maker, "-m", "venv", str(folder)], f"{maker} cannot make a virtual environment")
    for one in installs:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *one]
        _run(pip, f"pip cannot install {' '.join(one)}")
    stamp.write_text(wanted)
    return str(python)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise Missing(f"{what}: {lines[-1] if lines else f'exit code {done.returncode}'}")


def sdk(version: str) -> str:
    """The interpreter of an environment with that Tinker SDK and NumPy."""
    # What SDKs import without asking for it: orjson in 0.18, aiohttp in 0.25.
    return environment(f"tinker-{version}", ((f"tinker=={version}", "numpy", "aiohttp", "orjson"),))


def tiny_model() -> Path:
    """A folder with the embedded server's tiny Qwen3: random weights, a tokenizer of 480 tokens."""
    folder = BUILD / "tiny-qwen3"
    if not (folder / "generation_config.json").exists():
        from paritygate.server.model import tiny

        folder.mkdir(parents=True, exist_ok=True)
        tiny.build(folder)
        # As before transformers 5, which both read.
        tokenizer, config = folder / "tokenizer_config.json", folder / "config.json"
        tokenizer.write_text(tokenizer.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
        values = json.loads(config.read_text())
        config.write_text(json.dumps({**values, "rope_theta": values["rope_parameters"]["rope_theta"]}))
    return folder


def port_of(folder: Path) -> int:
    """The port that `folder` had before, where it is free, so that an unfinished proof is gone on with; else a new."""
    kept = folder / "port"
    for wanted in (int(kept.read_text()) if kept.exists() else 0, 0):
        with socket.socket() as listener:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            port = int(listener.getsockname()[1])
            kept.write_text(str(port))
            return port
    raise Missing("No port of 127.0.0.1 is free.")


@contextmanager
def serving(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `name` with its files in `folder`; its address, and the arguments of the proof that name its model.

    Stopped with all its children.
    """
    service, model = SERVICES[name], tiny_model()
    folder.mkdir(parents=True, exist_ok=True)
    port, log = port_of(folder), folder / "service.log"
    if service.script:
        python = environment(name, service.installs)
        command = [python, str(HERE / service.script), str(model), str(port), str(folder)]
    else:
        command = [sys.executable, "-m", "paritygate.server", "--model", str(model), "--port", str(port)]
        command += ["--api-key", KEY]
    paths = {"PYTHONPATH": "" if service.script else str(ROOT / "impl")}
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **paths}
        )
        try:
            _wait(f"http://127.0.0.1:{port}/api/v1/healthz", server, log)
            yield f"http://127.0.0.1:{port}", ["--model", str(model)] if service.script else []
        finally:
            _stop(server)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise Missing(f"The service ended with exit code {server.returncode} ({lines[-1] if lines else 'silent'}).")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:
            return  # it answers, if only that a key is wanted
        except OSError:
            time.sleep(1.0)
    raise Missing(f"{url} did not answer within {seconds:g} s; see {log.relative_to(ROOT)}.")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server's whole process group: skyrl's engine is a child of its API."""
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(seconds)
    server.wait()
