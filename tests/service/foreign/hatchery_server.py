"""Serve hatchery-core's Tinker API on a CPU: `python hatchery_server.py MODEL PORT FOLDER`, in its own environment.

hatchery-core 0.3.0 falls back to a scripted worker where there is no GPU; here its real worker runs on the CPU, in one
process with the gateway. A job that the worker raises at is printed and left unanswered, as the package's loop does.
"""

import asyncio
import sys

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


async def main(model: str, port: int) -> None:
    """Serve `model` (a folder) on 127.0.0.1:`port` to the key tml-proof."""
    auth = APIKeyAuthProvider()
    auth.add_key(KEY, user_id="proof", tier="enterprise", max_concurrent_sessions=100, max_rank=256)
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
    worker = GPUWorker(worker_id="cpu-0", base_model_name=model, config=config, device="cpu")
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
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
