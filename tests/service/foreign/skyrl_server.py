"""Serve skyrl's Tinker API on a CPU: `python skyrl_server.py MODEL PORT FOLDER`, in skyrl's own environment.

skyrl 0.4.0 starts its engine by `uv run`; here the engine is started by this interpreter, since uv may be missing.
What JAX compiled is kept in FOLDER: without it every shape costs seconds to a minute again.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import uvicorn
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, config_to_argv


def main(model: str, port: int, folder: Path) -> None:
    """Serve `model` (a folder) on 127.0.0.1:`port`; checkpoints and the request database lie in `folder`."""
    (folder / "tinker.db").unlink(missing_ok=True)  # what a killed run left waiting
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    api._build_uv_run_cmd_engine = lambda _, config: [
        sys.executable,
        "-m",
        "skyrl.tinker.engine",
        *config_to_argv(config),
    ]
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
