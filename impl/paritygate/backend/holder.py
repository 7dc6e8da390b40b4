"""The SDK's session, with what it lacks: closed connections, every answer seen, Retry-After kept, billing at once."""

import asyncio
from typing import Any

from tinker import ServiceClient, types
from tinker.lib._auth_token_provider import AuthTokenProvider, CredentialCmdAuthProvider
from tinker.lib.internal_client_holder import ClientConnectionPool, InternalClientHolder

from paritygate.backend.credentials import printed_key
from paritygate.backend.retry_after import Heard, PatientAuth


async def _limited(self: CredentialCmdAuthProvider) -> str:
    return await printed_key(self._cmd)  # pyright: ignore[reportPrivateUsage]


CredentialCmdAuthProvider.get_token = _limited


class ObservedHolder(InternalClientHolder):
    """tinker 0.38.0 with five repairs.

    It reads `client/config` over a pool of its own and forgets it open: this one closes it. It waits minutes, silently,
    on HTTP 402: this one reports it and lets the request fail. It does not say that the service answers: this one does.
    Sampling does not wait as Retry-After says: this one's does (`PatientAuth`). It waits for a credential command
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
        patient = PatientAuth(auth, self._not_before, self._heard)
        pool = super()._create_client_connection_pool(max_requests_per_client, patient, **kwargs)
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
