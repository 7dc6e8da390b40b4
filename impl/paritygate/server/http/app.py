"""The routes of the SDK's training and sampling clients, and their long polls."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paritygate.server.http.checkpoints import checkpoint_routes, download_routes
from paritygate.server.http.not_served import METHODS, not_served
from paritygate.server.http.openai import openai_routes
from paritygate.server.http.requests import LOG, Handler, fields, guarded, parse, problem, read_body
from paritygate.server.sessions.promises import Promise
from paritygate.server.sessions.service import Service
from paritygate.server.wire.fields import Fields


def build_app(service: Service, api_key: str) -> Starlette:
    """Every route of the API under /api/v1; a request without the key gets 401."""
    routes = [*_routes(service), *checkpoint_routes(service, api_key)]
    service.routes = [(method, path) for method, path, _ in routes]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        reaper = asyncio.create_task(_reap(service))
        yield
        reaper.cancel()

    return Starlette(
        routes=[
            *(
                Route(f"/api/v1/{path}", guarded(handler, api_key), methods=[method])
                for method, path, handler in routes
            ),
            *download_routes(service, api_key),
            *openai_routes(service, api_key),
            Route("/{path:path}", guarded(not_served, api_key), methods=METHODS),
        ],
        lifespan=lifespan,
    )


async def _reap(service: Service) -> None:
    while True:
        await asyncio.sleep(min(5.0, service.limits.session_seconds / 4, service.limits.silent_seconds / 4))
        try:
            service.reap()
        except Exception:  # the next round may succeed; without rounds nothing would ever be freed
            LOG.exception("freeing what vanished clients left")


def _routes(service: Service) -> list[tuple[str, str, Handler]]:
    def at_once(answer: Callable[[Fields], dict[str, Any]]) -> Handler:
        async def handler(request: Request) -> Response:
            return JSONResponse(answer(await fields(request, service.limits)))

        return handler

    def promised(start: Callable[[Fields, bytes], Promise]) -> Handler:
        async def handler(request: Request) -> Response:
            raw = await read_body(request, service.limits)
            return JSONResponse(start(Fields(parse(raw)), raw).answer)

        return handler

    async def forward_backward(request: Request) -> Response:
        return JSONResponse(service.trainers.forward_backward(await read_body(request, service.limits)).answer)

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(request: Request) -> Response:
        return JSONResponse(
            {
                "supported_models": [
                    {
                        "model_name": service.model_name,
                        "max_context_length": service.engine.network.shape.context,
                        "trainable": True,
                        "sampleable": True,
                    }
                ]
            }
        )

    async def finish(request: Request) -> Response:
        service.finish_session(request.path_params["session_id"])
        return Response(status_code=204)

    async def get_sampler(request: Request) -> Response:
        sampler = service.sampler(request.path_params["sampler_id"])
        return JSONResponse(
            {"sampler_id": sampler.id, "base_model": service.model_name, "model_path": sampler.model_path}
        )

    async def get_session(request: Request) -> Response:
        return JSONResponse(service.get_session(request.path_params["session_id"]))

    async def retrieve(request: Request) -> Response:
        return await _retrieve(request, service)

    async def cancel(request: Request) -> Response:
        promise_id = (await fields(request, service.limits)).text("request_id")
        promise = service.promises.get(promise_id)
        if promise is not None and promise.samples:
            service.promises.drop(promise)
        return Response(status_code=204)

    config = {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False}
    return [
        ("GET", "healthz", healthz),
        ("GET", "get_server_capabilities", capabilities),
        ("POST", "client/config", at_once(lambda body: config)),
        ("POST", "client/dynamic_config", at_once(lambda body: {"sample_cancel_enabled": True})),
        ("POST", "create_session", at_once(service.create_session)),
        ("POST", "session_heartbeat", at_once(service.heartbeat)),
        ("POST", "telemetry", at_once(lambda body: {"status": "accepted"})),
        ("POST", "sessions/{session_id}/finish", finish),
        ("GET", "sessions/{session_id}", get_session),
        ("POST", "get_info", at_once(service.get_info)),
        ("POST", "create_sampling_session", at_once(service.create_sampling_session)),
        ("GET", "samplers/{sampler_id}", get_sampler),
        ("POST", "create_model", promised(service.create_model)),
        ("POST", "unload_model", promised(service.trainers.unload)),
        ("POST", "forward_backward", forward_backward),
        ("POST", "optim_step", promised(service.trainers.optim_step)),
        ("POST", "save_weights", promised(service.trainers.save)),
        ("POST", "save_weights_for_sampler", promised(service.trainers.save_for_sampler)),
        ("POST", "save_weights_external", promised(service.trainers.save_external)),
        ("POST", "load_weights", promised(service.load_weights)),
        ("POST", "asample", promised(service.sample)),
        ("POST", "retrieve_future", retrieve),
        ("POST", "cancel_future", cancel),
        ("POST", "weights_info", at_once(service.weights_info)),
    ]


async def _retrieve(request: Request, service: Service) -> Response:
    """Wait for a promise: its payload, its error, 408 while pending, 410 once forgotten, 404 if never known."""
    promise_id = (await fields(request, service.limits)).text("request_id")
    promise = service.promises.get(promise_id)
    if promise is None:
        if service.promises.gone(promise_id):
            return problem(f"the answer to {promise_id} is gone; send the request again", 410)
        return problem(f"there is no request {promise_id!r}", 404)
    if promise.session in service.sessions.live:
        service.sessions.get(promise.session)
    if promise.pending:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(promise.event.wait(), service.limits.poll_seconds)
    if promise.payload is not None:
        return Response(promise.payload.body, media_type=promise.payload.media_type)
    if promise.error is not None:
        return JSONResponse({"error": promise.error[0], "category": promise.error[1]})
    return JSONResponse({"type": "try_again", "request_id": promise.id, "queue_state": "active"}, 408)
