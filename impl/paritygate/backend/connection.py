"""Where to connect: a service that is named, or the embedded server, started here and owned."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from paritygate.address import checked_url
from paritygate.backend.credentials import Credential
from paritygate.backend.embedded import EmbeddedServer
from paritygate.backend.guard import Guard, in_daemon_thread, probe
from paritygate.backend.sampler import Sampler
from paritygate.backend.tokenizers import load_tokenizer
from paritygate.backend.trainer import Trainer, no_retries
from paritygate.errors import BackendError, BadInputError, redacted

if TYPE_CHECKING:
    import tinker
    from tinker.lib.internal_client_holder import InternalClientHolder

PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy")

LIST_SECONDS = 20.0  # a service without the route may answer 5xx, which the SDK repeats for five minutes


class Backend:
    """An open session at a Tinker-compatible service; made by `connect`.

    endpoint: its address. embedded: whether it is our own server. models: the names that it reports.
    context_lengths: the context in tokens of each model for which the service reports one.
    """

    def __init__(
        self,
        service: "tinker.ServiceClient",
        rest: "tinker.RestClient",
        guard: Guard,
        capabilities: "Sequence[tinker.types.SupportedModel]",
        *,
        embedded: bool,
    ) -> None:
        self.endpoint = guard.base_url
        self.api_key = guard.api_key  # None: the SDK's own credentials
        self.embedded = embedded
        named = [(str(model.model_name), model) for model in capabilities if model.model_name]
        self.models: tuple[str, ...] = tuple(name for name, _ in named)
        self.context_lengths: dict[str, int] = {
            name: model.max_context_length for name, model in named if model.max_context_length
        }
        # A service that does not say what a model is for may serve it for either.
        self._untrainable = {name for name, model in named if model.trainable is False}
        self._unsampleable = {name for name, model in named if model.sampleable is False}
        self._service = service
        self._rest = rest
        self._guard = guard
        self._local = local_host(guard.base_url) is not None
        self._tokenizers: dict[str, Any] = {}
        self._trainers: dict[str, Trainer] = {}  # of a server on this machine, one a model

    def session(self) -> AbstractAsyncContextManager["Backend"]:
        """Another session at the same service: what is created in it is freed at its end, saved states excepted."""
        parent = self._guard
        guard = Guard(parent.base_url, parent.api_key, parent.credential, patience=parent.patience, limit=parent.limit)
        guard.process_ended = parent.process_ended
        return _session(guard, embedded=self.embedded)

    def require(self, base_model: str, *, trained: bool) -> None:
        """BackendError unless the service reports the model, for training or for sampling."""
        if self.models and base_model not in self.models:
            raise BackendError(f"{self.endpoint} does not serve {base_model}; it serves {', '.join(self.models)}.")
        if base_model in (self._untrainable if trained else self._unsampleable):
            use, other = ("trained", "sampled from") if trained else ("sampled from", "trained")
            raise BackendError(
                f"{self.endpoint} serves {base_model} only to be {other}; the spec wants it to be {use}."
            )

    async def tokenizer(self, base_model: str) -> Any:
        """The tokenizer of a model (see `load_tokenizer`); BadInputError names what helps where there is none."""
        if base_model not in self._tokenizers:
            # A server on this machine may name its own folder, which only a training client's info tells.
            if self._local and base_model not in {*self._trainers, *self._untrainable}:
                await self.training(base_model, rank=1)
            trainer = self._trainers.get(base_model)
            load = partial(load_tokenizer, base_model, None if trainer is None else trainer.tokenizer_id)
            self._tokenizers[base_model] = await in_daemon_thread(load)
        return self._tokenizers[base_model]

    async def training(self, base_model: str, rank: int = 32, seed: int = 0) -> Trainer:
        """A fresh LoRA adapter on `base_model`, initialised by `seed`; BackendError if it is not served."""
        self.require(base_model, trained=True)
        client = await self._guard.once(
            "Creating a training client",
            lambda: self._service.create_lora_training_client(base_model, rank=rank, seed=seed),
        )
        trainer = Trainer(client, self._guard, self._restored, self.tokenizer)
        if self._local:
            self._trainers.setdefault(base_model, trainer)
        return trainer

    async def restored(self, path: str, *, optimizer: bool = True) -> Trainer:
        """A trainer that goes on from the state at `path` (of `Trainer.save`); without `optimizer`, Adam is fresh."""
        client = await self._restored(path) if optimizer else await self._loaded(path)
        return Trainer(client, self._guard, self._restored, self.tokenizer)

    async def sampling(self, base_model: str | None = None, model_path: str | None = None) -> Sampler:
        """A sampler of a base model, or of saved sampler weights at `model_path`; exactly one of the two is given."""
        if (base_model is None) == (model_path is None):
            raise BadInputError("A sampler takes a base model or a path of saved weights: one of the two.")
        if base_model is not None:
            self.require(base_model, trained=False)
        client = await self._guard.repeatable(
            "Creating a sampler",
            lambda: self._service.create_sampling_client(model_path, base_model, retry_config=no_retries()),
        )
        return Sampler(client, self._guard, await self.tokenizer(client.get_base_model()), model_path)

    async def delete(self, path: str) -> None:
        """Delete a saved state of any kind; one that is gone already is no error, other refusals are BackendErrors."""
        import tinker

        try:
            await self._guard.once(
                "Deleting a saved state", lambda: self._rest.delete_checkpoint_from_tinker_path(path)
            )
        except BackendError as error:
            if not isinstance(error.__cause__, tinker.NotFoundError):
                raise

    async def checkpoints(self, client: str) -> list[str]:
        """The paths of what a training client (the service's id of it) has saved and is there; none of an unknown one.

        Raises BackendError where the service does not list them.
        """
        import tinker

        try:
            async with asyncio.timeout(LIST_SECONDS):
                answer = await self._guard.once("Listing saved states", lambda: self._rest.list_checkpoints(client))
        except TimeoutError:
            raise BackendError(f"{self.endpoint} did not list what {client} saved in {LIST_SECONDS:g} s.") from None
        except BackendError as error:
            if isinstance(error.__cause__, tinker.NotFoundError):
                return []
            raise
        return [str(checkpoint.tinker_path) for checkpoint in answer.checkpoints]

    async def _restored(self, path: str) -> "tinker.TrainingClient":
        return await self._guard.once(
            "Loading state", lambda: self._service.create_training_client_from_state_with_optimizer(path)
        )

    async def _loaded(self, path: str) -> "tinker.TrainingClient":
        return await self._guard.once("Loading weights", lambda: self._service.create_training_client_from_state(path))


@asynccontextmanager
async def connect(
    base_url: str | None = None,
    api_key: str | None = None,
    *,
    embedded_model: str | None = None,
    embedded_dtype: str = "float32",
    state_dir: str | Path | None = None,
    patience: float = 60.0,
    limit: float = 1800.0,
) -> AsyncGenerator[Backend]:
    """Open a session: at `base_url`, else at TINKER_BASE_URL, else at an embedded server of `embedded_model`.

    The embedded server runs in a child process, keeps its saves in `state_dir` (None: a temporary one), and ends with
    this context. patience: seconds without health before waiting calls fail. limit: seconds that one call may take.
    Raises BackendError within 10 s when no service answers at the address, BadInputError for what is no address
    (`checked_url`), and when there is no key: given, in TINKER_API_KEY, printed by TINKER_CREDENTIAL_CMD, or stored by
    `tinker auth login`.
    """
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    if logging.lastResort is not None:  # shows what the SDK logs of a service's answers
        logging.lastResort.addFilter(_redact)
    server: EmbeddedServer | None = None
    named = base_url or os.environ.get("TINKER_BASE_URL")
    if named:
        base_url = checked_url(named, "base_url" if base_url else "TINKER_BASE_URL")
    else:
        folder = Path(state_dir) if state_dir is not None else None
        server = EmbeddedServer(embedded_model or "smollm2", folder, embedded_dtype)
        await server.start()
        base_url, api_key = server.base_url, server.api_key
    try:
        credential = Credential(base_url, api_key)
        reach_without_proxy(base_url)
        await probe(base_url, await credential.token())
        guard = Guard(base_url, credential.given, credential, patience=patience, limit=limit)
        if server is not None:
            guard.process_ended = server.ended
        async with _session(guard, embedded=server is not None) as backend:
            yield backend
    finally:
        if server is not None:
            await server.stop()


def _redact(record: logging.LogRecord) -> bool:
    record.msg, record.args = redacted(record.getMessage()), ()
    if record.exc_info:
        record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
    return True


@asynccontextmanager
async def _session(guard: Guard, *, embedded: bool) -> AsyncGenerator[Backend]:
    import tinker

    service = tinker.ServiceClient(base_url=guard.base_url, api_key=guard.api_key)
    status: Literal["success", "errored", "interrupted"] = "success"
    try:
        holder = await _opened(service, guard)
        rest = tinker.RestClient(holder)
        response = await guard.repeatable("Reading the service's capabilities", rest.get_server_capabilities)
        yield Backend(service, rest, guard, response.supported_models, embedded=embedded)
    except Exception:
        status = "errored"
        raise
    except BaseException:
        status = "interrupted"
        raise
    finally:
        await guard.close()
        await _close(service, guard, status)


async def _opened(service: "tinker.ServiceClient", guard: Guard) -> "InternalClientHolder":
    from tinker import TinkerError

    from paritygate.backend.holder import open_session

    open_it = partial(open_session, service, guard.base_url, guard.api_key, guard.heard)
    try:
        return await guard.once("Opening a session", lambda: in_daemon_thread(open_it))
    except BackendError as error:
        if guard.api_key is not None or not isinstance(error.__cause__, TinkerError):
            raise
    # A credential command and a service without token exchange, for which the SDK wants a plain key: what it prints.
    guard.api_key = await guard.token()
    open_it = partial(open_session, service, guard.base_url, guard.api_key, guard.heard)
    return await guard.once("Opening a session", lambda: in_daemon_thread(open_it))


async def _close(
    service: "tinker.ServiceClient", guard: Guard, status: Literal["success", "errored", "interrupted"]
) -> None:
    try:
        # The SDK would ask for many seconds; a service that is gone cannot be told that the session is over.
        await probe(guard.base_url, await guard.token(), tries=1, seconds=2.0)
        async with asyncio.timeout(10):
            await service.close(status)
    except Exception:
        return  # its connections are dropped with the process


def local_host(base_url: str) -> str | None:
    """The host of an address on this machine, None for any other."""
    try:
        host = urlsplit(base_url).hostname
    except ValueError:
        return None
    return host if host in ("127.0.0.1", "localhost", "::1") else None


def reach_without_proxy(base_url: str) -> None:
    """Keep a proxy for the outside, set in the environment, from being asked for an address on this machine."""
    host = local_host(base_url)
    for name in ("NO_PROXY", "no_proxy") if host else ():
        excluded = [part for part in os.environ.get(name, "").split(",") if part]
        if host and host not in excluded and any(proxy in os.environ for proxy in PROXIES):
            os.environ[name] = ",".join([*excluded, host])
