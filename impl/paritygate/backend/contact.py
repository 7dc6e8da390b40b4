"""First contact: what a run needs of a service, asked within seconds and before anything long is begun."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from paritygate.backend.connection import local_host, reach_without_proxy
from paritygate.backend.credentials import Credential
from paritygate.backend.guard import TRY_PAUSE, get, in_daemon_thread, probe, refuse_account
from paritygate.backend.tokenizers import NoTokenizer, load_tokenizer
from paritygate.errors import BackendError, one_line

SECONDS = 8.0  # credential, probe and capabilities together; with the imports before them, within ten
TRY_SECONDS = 3.0  # one of the probe's two tries, at most
HUB_SECONDS = 60.0  # for a tokenizer, which may be downloaded


@dataclass(frozen=True)
class Need:
    """One model that a run asks for: what it is called, in which role, and whether it is trained."""

    role: str
    model: str
    trained: bool = False


@dataclass(frozen=True)
class Contact:
    """What the service said of itself, and the tokenizer of each model that was asked for.

    A server on this machine may have a tokenizer that only its training clients name: None stands for it here.
    """

    endpoint: str
    models: tuple[str, ...]
    context_lengths: dict[str, int]
    tokenizers: dict[str, Any]


async def first_contact(needs: Sequence[Need], base_url: str, api_key: str | None = None) -> Contact:
    """Key, address, models and what they are served for, within ten seconds; then the tokenizers.

    No session is opened and nothing is created. Raises BadInputError for a missing key or tokenizer, BackendError for a
    refused key, an address without a service, an account without means (HTTP 402), a model that is not served for its
    role.
    """
    began = time.monotonic()
    token = await Credential(base_url, api_key).token()
    reach_without_proxy(base_url)
    left = began + SECONDS - time.monotonic()
    await probe(base_url, token, seconds=min(TRY_SECONDS, (left - TRY_PAUSE) / 2))
    served = await _capabilities(base_url, token, began + SECONDS - time.monotonic())
    for need in needs:
        _require(base_url, need, served)
    local = local_host(base_url) is not None
    # A local server's own tokenizer is named by its training clients, which a model that is not trained has none of.
    may_have = {name for name, model in served.items() if local and model.get("trainable") is not False}
    tokenizers = {need.model: await _tokenizer(need, local=need.model in may_have) for need in needs}
    lengths = {name: int(m["max_context_length"]) for name, m in served.items() if m.get("max_context_length")}
    return Contact(base_url, tuple(served), lengths, tokenizers)


async def _capabilities(base_url: str, token: str, seconds: float) -> dict[str, dict[str, Any]]:
    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(timeout=seconds, headers={"X-API-Key": token}) as client,
        ):
            status, body = await get(client, base_url, "get_server_capabilities")
        refuse_account(base_url, status, body)
        if status != 200:
            raise ValueError(f"HTTP status {status}")
        return {str(m["model_name"]): m for m in json.loads(body)["supported_models"] if m.get("model_name")}
    except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = one_line(str(error), 200) or type(error).__name__
        raise BackendError(f"The service at {base_url} does not say which models it serves: {text}.") from None


def _require(base_url: str, need: Need, served: dict[str, dict[str, Any]]) -> None:
    if need.model not in served:
        names = ", ".join(served) or "none"
        raise BackendError(f"{base_url} does not serve {need.model}, the {need.role}; it serves {names}.")
    flags = ("trainable", "sampleable") if need.trained else ("sampleable",)
    for flag in flags:
        if served[need.model].get(flag) is False:
            raise BackendError(f"{base_url} reports {need.model}, the {need.role}, as not {flag}.")


async def _tokenizer(need: Need, *, local: bool) -> Any:
    """Loaded in a thread that a hub which does not answer cannot keep; None where a local server may have it."""
    try:
        async with asyncio.timeout(HUB_SECONDS):
            return await in_daemon_thread(partial(load_tokenizer, need.model, hub=not local))
    except NoTokenizer:
        if local:
            return None
        raise
    except TimeoutError:
        raise BackendError(
            f"The tokenizer of {need.model}, the {need.role}, did not come from the hub in {HUB_SECONDS:g} s; put its "
            f"files into FOLDER/{need.model} and set PARITYGATE_TOKENIZERS=FOLDER."
        ) from None
