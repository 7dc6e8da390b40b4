"""Every other route: one sentence, with the reason where the SDK has a method for it."""

import re

from starlette.requests import Request
from starlette.responses import Response

from paritygate.server.http.requests import problem

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

# Routes of tinker 0.38.0 that this server has no use for.
REASONS = {
    r"forward": "it takes forward_backward as protobuf, which SDKs before 0.25 do not send",
    r"copy_weights": "it has no projects or other owners to copy a checkpoint for",
    r"create_custom_loss": "forward_backward_custom computes the loss in the client, as client/config says",
    r"join_sampling_session": "client/config does not announce it",
    r"retrieve_futures": "client/config does not announce it: retrieve_future is polled for each request",
    r"auth/.*": "it has one key, given to it when it was started",
    r"audit|billing/.*": "it has no accounts",
    r"sessions/search": "it keeps no sessions that have ended",
    r"sessions/[^/]*/project": "it has no projects",
    r"sessions/[^/]*/trace_export": "it records no traces",
    r"training_runs/.*/checkpoints/.*/publish": "it has one owner, so every checkpoint is as public as its address",
    r"training_runs/.*/checkpoints/.*/archive": "save_weights_external and external_weights_urls give the files",
}


async def not_served(request: Request) -> Response:
    """404: final for the SDK, which would send a 5xx again for minutes."""
    path = request.url.path.removeprefix("/api/v1/")
    reason = next((why for pattern, why in REASONS.items() if re.fullmatch(pattern, path)), None)
    because = f": {reason}" if reason else ""
    return problem(f"{request.method} {request.url.path} is not served by paritygate's embedded server{because}", 404)
