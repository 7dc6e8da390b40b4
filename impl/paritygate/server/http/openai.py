"""OpenAI-compatible sampling, for evaluation harnesses: /oai/api/v1/completions, /chat/completions and /models."""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paritygate.server.engine.jobs import SampleJob
from paritygate.server.errors import RequestError
from paritygate.server.http.requests import fields, guarded
from paritygate.server.sessions.service import Service
from paritygate.server.wire import openai as wire

Decode = Callable[..., list[wire.Request]]


def problem(message: str, status: int) -> Response:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


def openai_routes(service: Service, api_key: str) -> list[Route]:
    """The routes under /oai/api/v1, with the key as a bearer token.

    `model` is the base model's name, a tinker://.../sampler_weights/... path, or "NAME;PATH".
    """
    engine, limits = service.engine, service.limits
    tokenizer: Any = engine.decoder

    def sampling(decode: Decode, *, chat: bool) -> Any:
        async def handler(request: Request) -> Response:
            body = await fields(request, limits)
            model = body.text("model")
            snapshot = service.samplers.of_model(model)
            requests = decode(body, tokenizer, engine.network.shape, limits, secrets.randbits(62))
            if engine.waiting_jobs + len(requests) > limits.waiting_samples:
                raise RequestError(f"{engine.waiting_jobs} sample requests are waiting; try again later", 429)
            jobs = [
                SampleJob(r.prompt, r.params, r.number, snapshot, r.scoring, r.top_k if r.logprobs else 0, Future())
                for r in requests
            ]
            for job in jobs:
                engine.submit(job)
            try:
                results = await asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise
            return JSONResponse(wire.encode(model, requests, results, tokenizer, chat=chat))

        return handler

    async def models(request: Request) -> Response:
        paths = [checkpoint.path for checkpoint in service.store.listed() if checkpoint.kind == "sampler_weights"]
        data = [{"id": name, "object": "model", "owned_by": "local"} for name in (service.model_name, *paths)]
        return JSONResponse({"object": "list", "data": data})

    handlers = (
        ("GET", "models", models),
        ("POST", "completions", sampling(wire.decode_completion, chat=False)),
        ("POST", "chat/completions", sampling(wire.decode_chat, chat=True)),
    )
    return [
        Route(f"/oai/api/v1/{path}", guarded(handler, api_key, problem), methods=[method])
        for method, path, handler in handlers
    ]
