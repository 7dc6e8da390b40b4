"""Serve hatchery-core's Tinker API on a CPU: `python hatchery_server.py MODEL PORT FOLDER`, in its own environment.

hatchery-core 0.3.0 falls back to a scripted worker where there is no GPU; here its real worker runs on the CPU, in one
process with the gateway, in float32, and with a slot for every adapter: beyond its 20 slots a session that comes back
fails ("Adapter ... not found"), and the SDK cannot unload one (it sends the id in the body, the route wants a query),
so sessions add up.
A job that the worker raises at is printed and left unanswered, as the package's loop does.
"""

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import structlog
import torch
import uvicorn
from hatchery.core.backends.auth.api_key import APIKeyAuthProvider
from hatchery.core.backends.compute.local import LocalComputeBackend
from hatchery.core.backends.metadata.memory import InMemoryMetadataStore
from hatchery.core.backends.metrics.log import LogMetrics
from hatchery.core.backends.object_store.memory import InMemoryObjectStore
from hatchery.core.backends.queue.memory import InMemoryJobQueue
from hatchery.core.config import Config
from hatchery.core.gateway import create_app, set_config
from hatchery.core.worker import GPUWorker

KEY = "tml-proof"


def _line(_logger: object, _method: str, event: dict[str, Any]) -> str:
    """The event and its exception, without the locals of every frame."""
    error = sys.exc_info()[1]
    return f"{event} {type(error).__name__}: {str(error)[:300]}" if error else str(event)


async def main(model: str, port: int) -> None:
    """Serve `model` (a folder) on 127.0.0.1:`port` to the key tml-proof."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING), processors=[_line])
    auth = APIKeyAuthProvider()
    auth.add_key(KEY, user_id="proof", tier="enterprise", max_concurrent_sessions=1_000_000, max_rank=256)
    config = Config(
        auth=auth,
        metadata=InMemoryMetadataStore(),
        objects=InMemoryObjectStore(),
        queue=InMemoryJobQueue(),
        compute=LocalComputeBackend(),
        metrics=LogMetrics(),
    )
    set_config(config)
    await config.metadata.initialize()
    await config.queue.initialize()
    worker = GPUWorker(
        worker_id="cpu-0",
        base_model_name=model,
        config=config,
        device="cpu",
        dtype=torch.float32,
        max_lora_slots=1000,
    )
    await worker.register()

    async def work() -> None:
        while True:
            job = await config.queue.dequeue(worker_id="cpu-0", model_filter=model, visibility_timeout=300)
            if job is None:
                await asyncio.sleep(0.02)
                continue
            try:
                await worker._process_one(job)
            except Exception as error:
                print(f"the worker raised {type(error).__name__}: {str(error)[:300]}", flush=True)

    jobs = asyncio.create_task(work())
    app = create_app(config=config)
    await uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")).serve()
    jobs.cancel()


if __name__ == "__main__":
    os.environ["HATCHERY_WORKER_LOCAL_DIR"] = str(Path(sys.argv[3]) / "worker")
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
