"""A service that is busy is left alone for as long as it asks: Retry-After, which the SDK keeps for some requests."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from tinker.lib._auth_token_provider import AuthTokenProvider

Heard = Callable[[int, str], None]
LONGEST_WAIT = 60.0  # seconds of a Retry-After that are kept before the service is asked again


def retry_after(status: int, headers: Mapping[str, str]) -> float:
    """Seconds that a 429 or 503 asks to be left alone (RFC 9110, 10.2.3: a number or a date); 0 without, at most 60."""
    asked = headers.get("retry-after", "") if status in (429, 503) else ""
    try:
        seconds = float(asked)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(asked).timestamp() - time.time()
        except ValueError:
            return 0.0
    return 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_WAIT)


class PatientAuth(AuthTokenProvider):
    """An auth provider that keeps each route's Retry-After, and reports the status of every answer.

    not_before: by path, the time.monotonic() before which it is not asked; shared by the pools of a client. tinker
    0.38.0 asks again for samples after a second whatever the service said, and for results at once.
    """

    def __init__(
        self, auth: AuthTokenProvider, not_before: dict[str, float], heard: Heard = lambda status, detail: None
    ) -> None:
        self._auth = auth
        self._not_before = not_before
        self._heard = heard

    async def get_token(self) -> str | None:
        """The wrapped provider's credential."""
        return await self._auth.get_token()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """The wrapped provider's flow; each response passes by here."""
        flow = self._auth.async_auth_flow(request)
        path = request.url.path
        try:
            while (left := self._not_before.get(path, 0.0) - time.monotonic()) > 0:
                await asyncio.sleep(left)
            signed = await flow.__anext__()
            while True:
                response = yield signed
                self._heard(response.status_code, response.reason_phrase)
                wait = retry_after(response.status_code, response.headers)
                if wait:
                    self._not_before[path] = time.monotonic() + wait
                signed = await flow.asend(response)
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()


def be_patient(holder: Any, not_before: dict[str, float], heard: Heard = lambda status, detail: None) -> None:
    """Let what an SDK's open session (tinker 0.18 to 0.38) asks for from now on keep Retry-After; heard: `PatientAuth`.

    What opens a session is repeated by the SDK's HTTP layer, which keeps it by itself.
    """
    find = holder._get_client_connection_pool
    if find.__name__ == "patient":
        return  # it is, already

    def patient(kind: Any) -> Any:
        pool = find(kind)
        options = pool._constructor_kwargs
        if not isinstance(options["_auth"], PatientAuth):
            options["_auth"] = PatientAuth(options["_auth"], not_before, heard)
        return pool

    holder._get_client_connection_pool = patient
