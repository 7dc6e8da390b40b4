"""Many clients at once: right answers, bounded memory."""

import asyncio
import os
from typing import Any

import psutil
import tinker
from tinker import types

from paritygate import server
from tests.counts import soak

CLIENTS = soak(quick=4, full=20)
REQUESTS = soak(quick=10, full=50)  # a client


def test_concurrent_clients_get_right_answers_in_bounded_memory(running: server.Running) -> None:
    """1,000 sample requests from 20 clients under `make soak`; each answer is what the request gets when alone."""
    prompts = [[(7 * i + j) % 480 for j in range(5 + 13 * (i % 5))] for i in range(10)]

    def request(sampler: Any, number: int) -> Any:
        prompt = types.ModelInput.from_ints(prompts[number % 10])
        return sampler.sample(prompt, 1 + number % 2, types.SamplingParams(max_tokens=8 + number % 9, seed=number % 25))

    async def script() -> tuple[int, int]:
        clients = [
            await asyncio.to_thread(lambda: tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key))
            for _ in range(CLIENTS)
        ]
        samplers = [await c.create_sampling_client(base_model=running.model_name) for c in clients]
        alone = {n: (await request(samplers[0], n)).sequences for n in range(50)}
        memory = psutil.Process(os.getpid()).memory_info().rss

        async def one(sampler: Any, offset: int) -> int:
            jobs = [(offset + i) % 50 for i in range(REQUESTS)]
            results = await asyncio.gather(*(request(sampler, n) for n in jobs))
            return sum(
                [(s.tokens, s.logprobs) for s in r.sequences] == [(s.tokens, s.logprobs) for s in alone[n]]
                for n, r in zip(jobs, results, strict=True)
            )

        right = sum(await asyncio.gather(*(one(s, 3 * i) for i, s in enumerate(samplers))))
        grown = psutil.Process(os.getpid()).memory_info().rss - memory
        for client in clients:
            await client.close("success")
        return right, grown

    right, grown = asyncio.run(script())
    assert right == CLIENTS * REQUESTS
    # The tiny model's caches are bounded by 2 GiB by default; what this load may touch of them is far less.
    assert grown < 400 * 1024**2
    assert running.service.engine.load()["rows"] == 0
