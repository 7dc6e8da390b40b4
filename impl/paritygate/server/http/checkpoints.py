"""Training runs and checkpoints, as the SDK's RestClient and the tinker command line ask for them."""

import hashlib
import hmac
import time
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from paritygate.server.errors import RequestError
from paritygate.server.http.requests import Handler, fields, problem
from paritygate.server.sessions.service import Service

URL_SECONDS = 3600


def checkpoint_routes(service: Service, api_key: str) -> list[tuple[str, str, Handler]]:
    """(method, path, handler) of each, with the key."""
    one = "training_runs/{run}/checkpoints/{kind}/{name}"

    async def training_runs(request: Request) -> Response:
        return JSONResponse(service.training_runs(*_page(request, 20)))

    async def training_run(request: Request) -> Response:
        return JSONResponse(service.training_run(request.path_params["run"]))

    async def sessions(request: Request) -> Response:
        limit, offset = _page(request, 20)
        return JSONResponse({"sessions": list(service.sessions.live)[offset : offset + limit]})

    async def all_checkpoints(request: Request) -> Response:
        return JSONResponse(service.all_checkpoints(*_page(request, 100)))

    async def checkpoints(request: Request) -> Response:
        return JSONResponse(service.checkpoints(request.path_params["run"]))

    async def delete(request: Request) -> Response:
        service.store.delete(_path(request))
        return Response(status_code=204)

    async def set_ttl(request: Request) -> Response:
        body = await fields(request, service.limits)
        service.store.set_ttl(_path(request), body.optional_integer("ttl_seconds", low=1, high=315_576_000))
        return Response(status_code=204)

    async def urls(request: Request) -> Response:
        checkpoint = service.store.find(_path(request))
        if checkpoint.kind != "external_weights":
            raise RequestError(f"{checkpoint.path} has no files for other programs; call save_weights_external first")
        expires = int(time.time()) + URL_SECONDS
        base = f"{request.url.scheme}://{request.url.netloc}/download"
        return JSONResponse(
            {
                "urls": {
                    name: f"{base}/{where}?expires={expires}&signature={_signature(api_key, where, expires)}"
                    for name in service.store.files(checkpoint)
                    for where in [f"{checkpoint.run}/{checkpoint.name}/{name}"]
                },
                "expires": datetime.fromtimestamp(expires, UTC).isoformat(),
            }
        )

    return [
        ("GET", "training_runs", training_runs),
        ("GET", "training_runs/{run}", training_run),
        ("GET", "sessions", sessions),
        ("GET", "checkpoints", all_checkpoints),
        ("GET", "training_runs/{run}/checkpoints", checkpoints),
        ("DELETE", one, delete),
        ("PUT", f"{one}/ttl", set_ttl),
        ("GET", f"{one}/external_weights_urls", urls),
    ]


def download_routes(service: Service, api_key: str) -> list[Route]:
    """Files of external weights, for whoever has a signed URL: downloaders send no key."""

    async def download(request: Request) -> Response:
        where = "/".join(request.path_params[name] for name in ("run", "name", "file"))
        expires = request.query_params.get("expires", "")
        given = request.query_params.get("signature", "")
        if not expires.isdecimal() or not hmac.compare_digest(given, _signature(api_key, where, int(expires))):
            return problem("the signature of this URL is wrong; ask for external_weights_urls again", 403)
        if int(expires) < time.time():
            return problem("this URL has expired; ask for external_weights_urls again", 403)
        try:
            path = f"tinker://{request.path_params['run']}/external_weights/{request.path_params['name']}"
            file = service.store.files(service.store.find(path)).get(request.path_params["file"])
        except RequestError as error:
            return problem(str(error), error.status)
        return FileResponse(file) if file is not None else problem(f"{path} has no such file", 404)

    return [Route("/download/{run}/{name}/{file}", download, methods=["GET"])]


def _signature(api_key: str, where: str, expires: int) -> str:
    return hmac.new(api_key.encode(), f"{where}:{expires}".encode(), hashlib.sha256).hexdigest()


def _path(request: Request) -> str:
    where = request.path_params
    return f"tinker://{where['run']}/{where['kind']}/{where['name']}"


def _page(request: Request, limit: int) -> tuple[int, int]:
    """(limit, offset) of a listing."""
    values: list[int] = []
    for name, default, low in (("limit", limit, 1), ("offset", 0, 0)):
        text = request.query_params.get(name, str(default))
        if not text.isdecimal() or not low <= int(text) <= 2**31:
            raise RequestError(f"{name} must be an integer from {low}, found {text!r}", 422)
        values.append(int(text))
    return values[0], values[1]
