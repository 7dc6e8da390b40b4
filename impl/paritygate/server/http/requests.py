"""What every route does first: the key checked, the body bounded, decompressed and parsed, errors as JSON."""

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable

import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.wire.fields import Fields
from paritygate.spec.strict import unique_keys

LOG = logging.getLogger("uvicorn.error")
Handler = Callable[[Request], Awaitable[Response]]
Problem = Callable[[str, int], Response]


def problem(message: str, status: int) -> Response:
    """An error as the SDK reads it."""
    return JSONResponse({"detail": message}, status)


def guarded(handler: Handler, api_key: str, problem: Problem = problem) -> Handler:
    """`handler` for requests with the key; its errors are made answers by `problem`."""

    async def checked(request: Request) -> Response:
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), api_key.encode()):
            return problem("the API key is missing or wrong (header X-API-Key)", 401)
        try:
            return await handler(request)
        except RequestError as error:
            return problem(str(error), error.status)
        except Exception as error:
            LOG.exception("%s %s", request.method, request.url.path)
            return problem(f"a bug of the server: {type(error).__name__}: {error}", 500)

    return checked


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, decompressed if it says zstd; 413 over the limit, 400 if it does not decompress."""
    limit = limits.request_bytes
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise RequestError(f"the body is over {limit} bytes; send fewer datums a request", 413)
                parts.append(part)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {limits.body_seconds} s", 408) from None
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


def parse(body: bytes) -> object:
    """The JSON value of a body, {} for none; RequestError where it is no JSON in UTF-8 or has a key twice."""
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=unique_keys) if body else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({error})") from error


async def fields(request: Request, limits: Limits) -> Fields:
    """The JSON object of a request's body."""
    return Fields(parse(await read_body(request, limits)))
