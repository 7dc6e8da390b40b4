"""The SDK's session, with what it lacks: closed connections, every answer seen, Retry-After kept, billing at once."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from tinker import ServiceClient, types
from tinker.lib._auth_token_provider import AuthTokenProvider, CredentialCmdAuthProvider
from tinker.lib.internal_client_holder import ClientConnectionPool, InternalClientHolder

from paritygate.backend.credentials import printed_key

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


async def _limited(self: CredentialCmdAuthProvider) -> str:
    return await printed_key(self._cmd)  # pyright: ignore[reportPrivateUsage]


CredentialCmdAuthProvider.get_token = _limited


class WitnessAuth(AuthTokenProvider):
    """An auth provider that reports the status of every answer, and keeps each route's Retry-After.

    not_before: by path, the time.monotonic() before which it is not asked; shared by the pools of a session. Sampling
    in tinker 0.38.0 asks again after a second whatever the service said.
    """

    def __init__(self, auth: AuthTokenProvider, heard: Heard, not_before: dict[str, float]) -> None:
        self._auth = auth
        self._heard = heard
        self._not_before = not_before

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


class ObservedHolder(InternalClientHolder):
    """tinker 0.38.0 with five repairs.

    It reads `client/config` over a pool of its own and forgets it open: this one closes it. It waits minutes, silently,
    on HTTP 402: this one reports it and lets the request fail. It does not say that the service answers: this one does.
    Sampling does not wait as Retry-After says: this one's does (`WitnessAuth`). It waits for a credential command
    without an end, before any request: here it is asked within `printed_key`'s limits (`_limited`).
    """

    _one_off: list[ClientConnectionPool]

    def __init__(self, heard: Heard, **options: Any) -> None:
        self._heard = heard
        self._not_before: dict[str, float] = {}
        super().__init__(**options)

    def _create_client_connection_pool(
        self, max_requests_per_client: int, auth: AuthTokenProvider, **kwargs: Any
    ) -> ClientConnectionPool:
        witness = WitnessAuth(auth, self._heard, self._not_before)
        pool = super()._create_client_connection_pool(max_requests_per_client, witness, **kwargs)
        if getattr(self, "_reading_flags", False):
            self._one_off.append(pool)
        return pool

    def _should_pause_on_billing(self, status_code: int, detail: str) -> bool:
        if status_code == 402:
            self._heard(status_code, detail)
        return False

    async def _fetch_client_config(self, auth: Any) -> types.ClientConfigResponse:
        self._reading_flags, self._one_off = True, []
        try:
            return await super()._fetch_client_config(auth)
        finally:
            self._reading_flags = False
            await asyncio.gather(*(pool.close() for pool in self._one_off))


def open_session(service: ServiceClient, base_url: str, api_key: str | None, heard: Heard) -> InternalClientHolder:
    """Open the session of `service`; talks to the service and blocks. heard(status, detail) is told of every answer.

    Without `api_key` the SDK finds a credential: the environment, TINKER_CREDENTIAL_CMD, `tinker auth login`.
    """
    holder = ObservedHolder(heard, base_url=base_url, api_key=api_key)
    service._session_holder = holder  # pyright: ignore[reportPrivateUsage]
    return holder
