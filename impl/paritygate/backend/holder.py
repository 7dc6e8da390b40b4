"""The SDK's session, with what it leaves to be wished: closed connections, every answer seen, billing named at once."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
from tinker import ServiceClient, types
from tinker.lib._auth_token_provider import AuthTokenProvider
from tinker.lib.internal_client_holder import ClientConnectionPool, InternalClientHolder

Heard = Callable[[int, str], None]


class WitnessAuth(AuthTokenProvider):
    """An auth provider that reports the status of every answer to the requests that it signs."""

    def __init__(self, auth: AuthTokenProvider, heard: Heard) -> None:
        self._auth = auth
        self._heard = heard

    async def get_token(self) -> str | None:
        """The wrapped provider's credential."""
        return await self._auth.get_token()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """The wrapped provider's flow; each response passes by here."""
        flow = self._auth.async_auth_flow(request)
        try:
            signed = await flow.__anext__()
            while True:
                response = yield signed
                self._heard(response.status_code, response.reason_phrase)
                signed = await flow.asend(response)
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()


class ObservedHolder(InternalClientHolder):
    """tinker 0.38.0 with three repairs.

    It reads `client/config` over a pool of its own and forgets it open: this one closes it. It waits minutes, silently,
    on HTTP 402: this one reports it and lets the request fail. It does not say that the service answers: this one does.
    """

    _one_off: list[ClientConnectionPool]

    def __init__(self, heard: Heard, **options: Any) -> None:
        self._heard = heard
        super().__init__(**options)

    def _create_client_connection_pool(
        self, max_requests_per_client: int, auth: AuthTokenProvider, **kwargs: Any
    ) -> ClientConnectionPool:
        witness = WitnessAuth(auth, self._heard)
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
