"""Start and stop a server in this process."""

import secrets
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritygate.errors import BackendError, BadInputError
from paritygate.server.limits import Limits

if TYPE_CHECKING:
    import uvicorn

    from paritygate.server.engine.loop import Engine
    from paritygate.server.sessions.service import Service

DTYPES = ("float32", "bfloat16")
WIDE = 256  # hidden size from which on a second thread is worth its start: the tiny model's products are too small


@dataclass
class Running:
    """A server that answers at `base_url`; `stop()` ends it and frees everything."""

    base_url: str
    api_key: str
    model_name: str
    tokenizer: Path
    service: "Service"
    _engine: "Engine"
    _server: "uvicorn.Server"
    _thread: threading.Thread
    _scratch: Path | None

    def stop(self) -> None:
        """Stop taking requests, fail what waits, join both threads; a second call does nothing."""
        self._engine.stop()  # first: it resolves every promise, so that no long poll holds the server back
        self._server.should_exit = True
        self._thread.join()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(
    model: str,
    *,
    port: int = 0,
    api_key: str | None = None,
    state_dir: str | Path | None = None,
    threads: int = 1,
    share_cores: bool = False,
    dtype: str = "float32",
    limits: Limits | None = None,
) -> Running:
    """Load `model` ("tiny", "smollm2" or a transformers folder) and serve it on 127.0.0.1.

    Port 0 takes a free one; no key makes one; no `state_dir` keeps saved states in a folder that goes with the server.
    One CPU thread runs the model unless `threads` says more; with `share_cores`, as many as the machine has cores for
    each busy server of this user that shares them, where the model is not tiny. With the compiled kernels
    (products.py) their number changes no bit of a sample or logprob; without a compiler it may, and so may batching
    at more than one.
    Raises BadInputError for an unusable model, key, dtype, port or state folder.
    """
    from paritygate.server.model import sources

    key = _check_key(api_key)
    if dtype not in DTYPES:
        raise BadInputError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    if threads < 1:
        raise BadInputError(f"--threads {threads}: at least 1")
    limits = limits or Limits()
    listener = _listen(port)
    scratch = None if state_dir is not None else Path(tempfile.mkdtemp(prefix="paritygate-server-"))
    try:
        folder = scratch or _writable(Path(str(state_dir)))
        source = sources.resolve(model)
        # Only now: importing torch and transformers takes seconds, and a mistyped argument should not.
        import torch
        import uvicorn

        from paritygate.server.engine.cores import SharedCores
        from paritygate.server.engine.loop import Engine
        from paritygate.server.http.app import build_app
        from paritygate.server.model.network import Network
        from paritygate.server.sessions.checkpoints import Store
        from paritygate.server.sessions.service import Service

        network = Network.load(source.folder, getattr(torch, dtype))
        cores = SharedCores() if share_cores and network.shape.hidden >= WIDE else None
        engine = Engine(network, limits, _tokenizer(source.folder), threads, cores)
        service = Service(engine, Store(folder), limits, source.name)
        config = uvicorn.Config(
            build_app(service, key), log_level="error", lifespan="on", timeout_graceful_shutdown=5, loop="asyncio"
        )
    except BaseException:
        listener.close()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="paritygate-http", daemon=True)
    engine.start()
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise BackendError("the embedded server ended while starting")
        time.sleep(0.01)
    base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    return Running(base_url, key, source.name, source.folder, service, engine, server, thread, scratch)


def _check_key(api_key: str | None) -> str:
    if api_key is None:
        return "tml-" + secrets.token_hex(16)
    if not api_key.startswith("tml-") or not api_key.isascii():
        raise BadInputError("--api-key: the SDK takes only keys that start with tml-")
    return api_key


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)  # bound alone, the port could be bound again before this server has started
    except (OSError, OverflowError) as error:
        listener.close()
        raise BadInputError(f"--port {port}: cannot listen on 127.0.0.1 ({error})") from error
    return listener


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"room")
    except OSError as error:
        raise BadInputError(f"--state {folder}: nothing can be saved there ({error})") from error
    return folder


def _tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, for stop strings; None if it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError):
        return None
