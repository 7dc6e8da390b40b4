"""The SDK's session, with one repair: it closes the connection over which it read the service's flags."""

import asyncio
from typing import Any

from tinker import ServiceClient, types
from tinker.lib.internal_client_holder import ClientConnectionPool, InternalClientHolder


class ClosingHolder(InternalClientHolder):
    """tinker 0.38.0 reads `client/config` over a pool of its own and forgets it open; this one remembers it."""

    _one_off: list[ClientConnectionPool]

    def _create_client_connection_pool(self, *args: Any, **kwargs: Any) -> ClientConnectionPool:
        pool = super()._create_client_connection_pool(*args, **kwargs)
        if getattr(self, "_reading_flags", False):
            self._one_off.append(pool)
        return pool

    async def _fetch_client_config(self, auth: Any) -> types.ClientConfigResponse:
        self._reading_flags, self._one_off = True, []
        try:
            return await super()._fetch_client_config(auth)
        finally:
            self._reading_flags = False
            await asyncio.gather(*(pool.close() for pool in self._one_off))


def open_session(service: ServiceClient, base_url: str, api_key: str) -> InternalClientHolder:
    """Open the session of `service`; talks to the service and blocks."""
    holder = ClosingHolder(base_url=base_url, api_key=api_key)
    service._session_holder = holder  # pyright: ignore[reportPrivateUsage]
    return holder
