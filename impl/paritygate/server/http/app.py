"""The HTTP face: bodies bounded and decoded, the key checked, routes, long polls."""

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import zstandard
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paritygate.server.errors import RequestError
from paritygate.server.sessions.promises import Promise
from paritygate.server.sessions.service import Service
from paritygate.server.wire.fields import Fields

_LOG = logging.getLogger("uvicorn.error")
Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service, api_key: str) -> Starlette:
    """Every route of the API under /api/v1; a request without the key gets 401."""
    routes = _routes(service)
    service.routes = [(method, path) for method, path, _ in routes]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        reaper = asyncio.create_task(_reap(service))
        yield
        reaper.cancel()

    return Starlette(
        routes=[
            Route(f"/api/v1/{path}", _guarded(handler, api_key), methods=[method]) for method, path, handler in routes
        ],
        lifespan=lifespan,
    )


async def _reap(service: Service) -> None:
    while True:
        await asyncio.sleep(min(5.0, service.limits.session_seconds / 4))
        try:
            service.reap()
        except Exception:  # the next round may succeed; without rounds nothing would ever be freed
            _LOG.exception("freeing what vanished clients left")


def _guarded(handler: Handler, api_key: str) -> Handler:
    async def guarded(request: Request) -> Response:
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), api_key.encode()):
            return _problem("the API key is missing or wrong (header X-API-Key)", 401)
        try:
            return await handler(request)
        except RequestError as error:
            return _problem(str(error), error.status)
        except Exception as error:
            _LOG.exception("%s %s", request.method, request.url.path)
            return _problem(f"a bug of the server: {type(error).__name__}: {error}", 500)

    return guarded


def _problem(message: str, status: int) -> Response:
    return JSONResponse({"detail": message}, status)


def _routes(service: Service) -> list[tuple[str, str, Handler]]:
    def at_once(answer: Callable[[Fields], dict[str, Any]]) -> Handler:
        async def handler(request: Request) -> Response:
            return JSONResponse(answer(Fields(_parse(await _body(request, service)))))

        return handler

    def promised(start: Callable[[Fields, bytes], Promise]) -> Handler:
        async def handler(request: Request) -> Response:
            raw = await _body(request, service)
            return JSONResponse(start(Fields(_parse(raw)), raw).answer)

        return handler

    async def forward_backward(request: Request) -> Response:
        return JSONResponse(service.trainers.forward_backward(await _body(request, service)).answer)

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

    async def checkpoints(request: Request) -> Response:
        return JSONResponse(service.checkpoints(request.path_params["run"]))

    async def delete_checkpoint(request: Request) -> Response:
        where = request.path_params
        service.store.delete(f"tinker://{where['run']}/{where['kind']}/{where['name']}")
        return Response(status_code=204)

    async def retrieve(request: Request) -> Response:
        return await _retrieve(request, service)

    async def cancel(request: Request) -> Response:
        promise_id = Fields(_parse(await _body(request, service))).text("request_id")
        promise = service.promises.get(promise_id)
        if promise is not None and "sample_sequence_ids" in promise.answer:  # training runs in order, to its end
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
        ("POST", "forward_backward", forward_backward),
        ("POST", "optim_step", promised(service.trainers.optim_step)),
        ("POST", "save_weights", promised(service.trainers.save)),
        ("POST", "save_weights_for_sampler", promised(service.trainers.save_for_sampler)),
        ("POST", "load_weights", promised(service.load_weights)),
        ("POST", "asample", promised(service.sample)),
        ("POST", "retrieve_future", retrieve),
        ("POST", "cancel_future", cancel),
        ("POST", "weights_info", at_once(service.weights_info)),
        ("GET", "training_runs/{run}/checkpoints", checkpoints),
        ("DELETE", "training_runs/{run}/checkpoints/{kind}/{name}", delete_checkpoint),
    ]


async def _retrieve(request: Request, service: Service) -> Response:
    """Wait for a promise: its payload, its error, 408 while pending, 410 once forgotten, 404 if never known."""
    promise_id = Fields(_parse(await _body(request, service))).text("request_id")
    promise = service.promises.get(promise_id)
    if promise is None:
        if service.promises.gone(promise_id):
            return _problem(f"the answer to {promise_id} is gone; send the request again", 410)
        return _problem(f"there is no request {promise_id!r}", 404)
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


async def _body(request: Request, service: Service) -> bytes:
    """The whole body, decompressed if it says zstd; 413 over the limit, 400 if it does not decompress."""
    limit = service.limits.request_bytes
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(service.limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise RequestError(f"the body is over {limit} bytes; send fewer datums a request", 413)
                parts.append(part)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {service.limits.body_seconds} s", 408) from None
    except ClientDisconnect:
        raise RequestError("the client went away before the whole body had come") from None
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise RequestError(f"Content-Encoding {encoding!r} is not served: send identity or zstd", 415)
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not valid zstd ({error})") from error
    if len(plain) > limit:
        raise RequestError(f"the body decompresses to over {limit} bytes", 413)
    return plain


def _parse(body: bytes) -> object:
    try:
        return json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({error})") from error
