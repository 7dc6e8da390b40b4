"""A LoRA adapter in training on the service."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from paritygate.backend.data import Datum
from paritygate.backend.guard import Guard
from paritygate.backend.sampler import Sampler
from paritygate.errors import BackendError

if TYPE_CHECKING:
    import tinker
    from tinker.lib.retry_handler import RetryConfig

T = TypeVar("T")


@dataclass(frozen=True)
class FwdBwd:
    """What a pass returned: the summed loss and, per datum, the logprob of each target (L - 1, nats).

    `logprobs` is empty where the service returns none, and where a position has several targets (cross_entropy, K > 1).
    """

    loss: float
    logprobs: tuple[tuple[float, ...], ...]
    metrics: dict[str, float]


class Trainer:
    """One training client: gradients accumulate over `forward_backward` calls until `optim_step`.

    base_model and rank are what the service reported, not what was asked for.
    """

    def __init__(
        self,
        client: "tinker.TrainingClient",
        guard: Guard,
        restore: "Callable[[str], Awaitable[tinker.TrainingClient]]",
        tokenizer: Callable[[str], Awaitable[Any]],
    ) -> None:
        self._client = client
        self._guard = guard
        self._restore = restore
        self._tokenizer = tokenizer

    @property
    def base_model(self) -> str:
        """The model name that the service reports for this client; empty where it reports none."""
        return str(self._client.get_info().model_data.model_name or "")

    @property
    def rank(self) -> int | None:
        """The LoRA rank that the service reports, None when it reports none."""
        return self._client.get_info().lora_rank

    @property
    def model_id(self) -> str:
        """The service's id of this client."""
        return self._client.model_id

    @property
    def tokenizer_id(self) -> str | None:
        """The folder or name of the model's tokenizer that the service reports, None when it reports none."""
        return self._client.get_info().model_data.tokenizer_id

    async def forward_backward(self, data: Sequence[Datum], loss_fn: str = "importance_sampling") -> FwdBwd:
        """Add the gradients of `loss_fn` summed over `data`; never repeated, since a repeat would count twice.

        Raises BackendError when the service fails or returns no `loss:sum`.
        """
        batch = [datum.to_tinker() for datum in data]
        output = await self._guard.once(
            "forward_backward",
            lambda: self._client.forward_backward(batch, loss_fn),  # pyright: ignore[reportArgumentType]
        )
        return _passed(output, len(batch))

    async def forward(self, data: Sequence[Datum], loss_fn: str = "importance_sampling") -> FwdBwd:
        """As `forward_backward` without gradients."""
        batch = [datum.to_tinker() for datum in data]
        output = await self._guard.once(
            "forward",
            lambda: self._client.forward(batch, loss_fn),  # pyright: ignore[reportArgumentType]
        )
        return _passed(output, len(batch))

    async def optim_step(
        self, learning_rate: float, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8
    ) -> dict[str, float]:
        """One Adam step on the accumulated gradients, no weight decay, no clipping; returns the service's metrics."""
        import tinker

        adam = tinker.AdamParams(learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps)
        response = await self._guard.once("optim_step", lambda: self._client.optim_step(adam))
        return dict(response.metrics or {})

    async def snapshot(self, name: str, ttl_seconds: int | None = None) -> Sampler:
        """A sampler of the weights as they are now, saved under `name`; training on does not move it.

        ttl_seconds: after which the service deletes what was saved; None: it is kept.
        """
        response = await self._saved(
            "Saving sampler weights", lambda ttl: self._client.save_weights_for_sampler(name, ttl), ttl_seconds
        )
        client = await self._guard.repeatable(
            "Creating a sampler", lambda: self._client.create_sampling_client(response.path, retry_config=no_retries())
        )
        return Sampler(client, self._guard, await self._tokenizer(self.base_model), response.path)

    async def save(self, name: str, ttl_seconds: int | None = None) -> str:
        """Save weights and optimiser state under `name`, over an older save of that name; returns its path.

        ttl_seconds: after which the service deletes it; None: it is kept.
        """
        response = await self._saved(
            "Saving state", lambda ttl: self._client.save_state(name, ttl, overwrite=True), ttl_seconds
        )
        return response.path

    async def _saved(self, what: str, save: Callable[[int | None], Awaitable[T]], ttl_seconds: int | None) -> T:
        """With a time limit, unless the service has shown that it takes none: then what is saved has to be deleted."""
        import tinker

        if ttl_seconds is not None and self._guard.limits_states:
            try:
                return await self._guard.once(what, lambda: save(ttl_seconds))
            except BackendError as error:
                if not isinstance(error.__cause__, tinker.BadRequestError | tinker.UnprocessableEntityError):
                    raise
        response = await self._guard.once(what, lambda: save(None))
        self._guard.limits_states = self._guard.limits_states and ttl_seconds is None
        return response

    async def load(self, path: str) -> None:
        """Go on from a saved state, optimiser included: this trainer then stands for a new client at the service."""
        self._client = await self._restore(path)


def no_retries() -> "RetryConfig":
    """The SDK's sampler retries resets for two hours; ours are bounded, in `Guard`."""
    from tinker.lib.retry_handler import RetryConfig

    return RetryConfig(enable_retry_logic=False)


def _passed(output: "tinker.ForwardBackwardOutput", count: int) -> FwdBwd:
    if "loss:sum" not in output.metrics:
        raise BackendError(f"forward_backward returned no loss:sum, only {sorted(output.metrics)}.")
    arrays = [row["logprobs"].to_numpy() for row in output.loss_fn_outputs if "logprobs" in row]
    if len(arrays) not in (0, count):
        raise BackendError(f"forward_backward returned logprobs of {len(arrays)} datums for {count}.")
    single = all(array.ndim == 1 for array in arrays)
    rows = tuple(tuple(float(x) for x in array) for array in arrays) if single else ()
    return FwdBwd(output.metrics["loss:sum"], rows, dict(output.metrics))
