"""The embedded server as a child process: started, read, and stopped by its own process id."""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from paritygate.backend.guard import in_daemon_thread
from paritygate.bootstrap import LIBRARIES, LOADED, command, merge
from paritygate.errors import BackendError

# Building the real small model takes a minute of one core, once; a busy machine takes several.
START_SECONDS = 600.0
STOP_SECONDS = 10.0


class EmbeddedServer:
    """One `python -m paritygate.backend.embedded` child; `base_url`, `api_key` and `model` are known once it runs."""

    def __init__(self, model: str, state_dir: Path | None = None, dtype: str = "float32") -> None:
        self.base_url = ""
        self.api_key = "tml-" + secrets.token_hex(16)
        self.model = model
        self.dtype = dtype
        self._temporary_dir = tempfile.TemporaryDirectory(prefix="paritygate-") if state_dir is None else None
        self._dir = Path(self._temporary_dir.name) if self._temporary_dir is not None else Path(str(state_dir))
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, None before the start."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the child and wait for its one JSON line; raises BackendError with the end of its log when it dies."""
        self._dir.mkdir(parents=True, exist_ok=True)
        self._log = (self._dir / "server.log").open("a", encoding="utf-8")
        arguments = ["--model", self.model, "--dtype", self.dtype, "--port", "0", "--share-cores"]
        arguments += ["--api-key", self.api_key, "--state", str(self._dir)]
        argv, environment, proven = command("paritygate.backend.embedded")
        self._process = subprocess.Popen(
            [*argv, str(os.getpid()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the child in order
        )
        try:
            with contextlib.suppress(BrokenPipeError):  # it died already: its log says why
                self._tell(proven)
            announced = await self._announcement()
        except BaseException:
            await self.stop()
            raise
        self.base_url, self.model = str(announced["base_url"]), str(announced["model"])

    def ended(self) -> str | None:
        """Why the child is gone, with the last lines of its log, or None while it runs."""
        code = self._process.poll() if self._process else None
        if code is None:
            return None
        log = self._dir / "server.log"
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:] if log.exists() else []
        return f"The embedded server's process ended with code {code}: {' | '.join(tail)[-600:] or 'no log'}"

    async def stop(self) -> None:
        """End the child: asked first, killed after ten seconds; then remove the state directory if it is ours.

        What the child says at its end it has loaded counts as loaded by this process too (`bootstrap.LOADED`).
        """
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            until = time.monotonic() + STOP_SECONDS
            while self._process.poll() is None and time.monotonic() < until:
                await asyncio.sleep(0.02)
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
        if self._process is not None and self._process.stdout is not None and not self._process.stdout.closed:
            self._merge_loaded(self._process.stdout.read())
            self._process.stdout.close()
        if self._log is not None:
            self._log.close()
        if self._temporary_dir is not None:
            with contextlib.suppress(OSError):
                self._temporary_dir.cleanup()

    def _tell(self, proven: str) -> None:
        """Hand the child the digests of the sources that it may load."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(proven)
        self._process.stdin.close()

    @staticmethod
    def _merge_loaded(output: str) -> None:
        """A child that was killed has said nothing: what it could load was checked as it was loaded."""
        for line in output.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                statement: dict[str, dict[str, str]] = json.loads(line)
                if LOADED:  # else this process does not read sources only, and vouches for nothing
                    merge(statement.get("loaded", {}), statement.get("libraries", {}))

    async def _announcement(self) -> dict[str, object]:
        assert self._process is not None
        assert self._process.stdout is not None
        reading = asyncio.ensure_future(in_daemon_thread(self._process.stdout.readline))
        done, _ = await asyncio.wait({reading}, timeout=START_SECONDS)
        line = reading.result() if done else ""
        try:
            announced: dict[str, object] = json.loads(line)
            if {"base_url", "model"} <= announced.keys():
                return announced
            if "loaded" in announced:  # its last words
                line = ""
        except (json.JSONDecodeError, AttributeError):
            pass
        if done and not line:
            await in_daemon_thread(lambda process=self._process: process.wait(timeout=60))
        reason = f"it said {line.strip()[:200]!r} where its address was expected" if done else f"in {START_SECONDS:g} s"
        raise BackendError(f"The embedded server with model {self.model!r} did not start: {self.ended() or reason}")


def main() -> None:
    """The child's entry: run the server, say what it loaded, and end when the process that started it is gone."""
    import runpy
    import threading

    parent = int(sys.argv.pop(1))

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    sys.argv[0] = "paritygate.server"
    code: object = 0
    try:
        runpy.run_module("paritygate.server", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    finally:
        print(json.dumps({"loaded": LOADED, "libraries": LIBRARIES}), flush=True)
    os._exit(code if isinstance(code, int) else int(code is not None))  # torch's modules take a second to take apart


if __name__ == "__main__":
    main()
