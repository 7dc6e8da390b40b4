"""The key of a request: given, TINKER_API_KEY, what TINKER_CREDENTIAL_CMD prints, or stored by `tinker auth login`."""

import os
import time
from typing import TYPE_CHECKING

from paritygate.errors import BadInputError

if TYPE_CHECKING:
    from tinker.lib._auth_token_provider import AuthTokenProvider

NEEDED = "set TINKER_API_KEY, name a command that prints a key in TINKER_CREDENTIAL_CMD, or run `tinker auth login`"
FRESH_SECONDS = 60.0  # a command is not run again within these


class Credential:
    """One credential of the SDK's kinds, in the SDK's order; raises BadInputError when there is none that can be used.

    given: the key itself where it is a fixed one, None where a command prints it: then the SDK runs the command.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._base_url = base_url
        self._printed: tuple[float, str] | None = None
        self._provider: AuthTokenProvider | None = None
        key = api_key or os.environ.get("TINKER_API_KEY", "")
        self.given: str | None = key if key.startswith("tml-") else None
        if self.given is not None:  # nothing to find out: a dead address is named before the SDK and torch are imported
            return
        from tinker import TinkerError
        from tinker.lib._auth_token_provider import ApiKeyAuthProvider, resolve_auth_provider

        try:
            self._provider = resolve_auth_provider(api_key or None, enforce_cmd=False)
        except TinkerError as error:
            if "tml-" in str(error):
                raise BadInputError(f"The key for {base_url} must start with tml-; {NEEDED}.") from None
            raise BadInputError(f"{base_url} needs an API key; {NEEDED}.") from None
        if isinstance(self._provider, ApiKeyAuthProvider):
            self.given = self._provider.api_key

    async def token(self) -> str:
        """What a request carries now; BadInputError where the command prints nothing of use, or the key has expired."""
        if self._provider is None:
            return str(self.given)
        if self._printed is not None and time.monotonic() - self._printed[0] < FRESH_SECONDS:
            return self._printed[1]
        try:
            token = await self._provider.get_token()
        except Exception as error:  # the SDK's, the shell's, or of a token that is none
            raise BadInputError(f"No key for {self._base_url}: {error} {NEEDED[0].upper()}{NEEDED[1:]}.") from None
        if not token or not token.startswith(("tml-", "eyJ")):
            raise BadInputError(f"The key for {self._base_url} must start with tml-; {NEEDED}.")
        if self.given is None:
            self._printed = (time.monotonic(), token)
        return token
