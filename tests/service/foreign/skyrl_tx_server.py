"""Serve skyrl-tx's Tinker API on a CPU: `python skyrl_tx_server.py MODEL PORT FOLDER`, in skyrl-tx's own environment.

skyrl-tx 0.3.0, the JSON-speaking predecessor of skyrl, starts its engine by `uv run`; here this interpreter does.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import uvicorn
from tx.tinker import api
from tx.tinker.config import EngineConfig

execute = asyncio.create_subprocess_exec


async def without_uv(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """The same command by this interpreter: `uv run --extra ... -m MODULE ARGUMENTS` from -m on."""
    return await execute(sys.executable, *command[command.index("-m") :], **options)


def main(model: str, port: int, folder: Path) -> None:
    """Serve `model` (a folder) on 127.0.0.1:`port`; checkpoints and the request database lie in `folder`."""
    (folder / "tinker.db").unlink(missing_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    asyncio.create_subprocess_exec = without_uv  # type: ignore[assignment]
    api.app.state.engine_config = EngineConfig(
        base_model=model,
        backend="jax",
        backend_config={"max_lora_adapters": 32, "max_lora_rank": 8},
        checkpoints_base=str(folder / "checkpoints"),
        database_url=f"sqlite:///{folder}/tinker.db",
    )
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
