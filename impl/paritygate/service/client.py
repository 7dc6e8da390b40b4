"""A thin layer over the SDK: answers are NumPy, and SDKs 0.18 to 0.38 look alike."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paritygate.service.connection import Broken, Connection, NoAnswer, Refusal, is_future, with_limit
from paritygate.service.journal import PathCode, number, numbers

T = TypeVar("T")
Array = NDArray[np.float64]
TTL_SECONDS = 86_400  # a proof deletes what it saved; what a killed one leaves, the service deletes after a day


@dataclass(frozen=True)
class Datum:
    """`tokens` (N,) and what the loss reads, by wire name: `target_tokens` (N,) or (N, K) ids, floats of that shape."""

    tokens: tuple[int, ...]
    targets: NDArray[np.int64]
    inputs: Mapping[str, Array] = field(default_factory=dict[str, Array])

    def with_inputs(self, **inputs: Any) -> "Datum":
        """The same tokens with other loss inputs, as float64 arrays of the targets' shape."""
        return Datum(self.tokens, self.targets, {name: np.asarray(value, float) for name, value in inputs.items()})

    def to_sdk(self) -> Any:
        from tinker import types

        inputs: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in self.inputs.items()}
        inputs["target_tokens"] = self.targets
        return types.Datum(model_input=types.ModelInput.from_ints(list(self.tokens)), loss_fn_inputs=inputs)

    def code(self) -> str:
        inputs = "".join(f", {name}={numbers(value)}" for name, value in self.inputs.items())
        return f"datum({list(self.tokens)}, {numbers(self.targets)}{inputs})"


@dataclass(frozen=True)
class Pass:
    """What forward or forward_backward returned: `loss` is loss:sum (None where there is none), nats per target."""

    loss: float | None
    logprobs: list[Array]
    metrics: dict[str, float]

    @property
    def flat(self) -> Array:
        """All logprobs end to end."""
        return np.concatenate([values.ravel() for values in self.logprobs]) if self.logprobs else np.zeros(0)


@dataclass(frozen=True)
class Sample:
    """One sampled sequence; `stopped` is False where it ended for its length."""

    tokens: tuple[int, ...]
    logprobs: Array | None
    stopped: bool


@dataclass(frozen=True)
class Sampled:
    """A sample call's answer; `prompt_logprobs` has NaN for None, `topk` a list of (id, logprob) or None a position."""

    sequences: list[Sample]
    prompt_logprobs: Array | None
    topk: list[list[tuple[int, float]] | None] | None


def quietly(function: Callable[..., T], *arguments: Any) -> T:
    """Call what newer SDKs call deprecated, and older ones have nothing else for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


class Session:
    """One SDK session: training and sampling clients are made in it, and freed with it where the SDK can."""

    def __init__(self, connection: Connection) -> None:
        import tinker

        self.connection = connection
        os.environ["TINKER_TELEMETRY"] = "0"
        self._trainers: list[Any] = []
        url, key = connection.base_url, connection.api_key

        def open_it() -> Any:
            service = tinker.ServiceClient(base_url=url, api_key=key)
            return service, service.holder  # the session itself is opened by the first use of the holder

        self.service, holder = connection.call("opening a session", open_it)
        self._watch(holder)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session; without a `close` in the SDK each model is unloaded, and a service that cannot is let be."""
        with contextlib.suppress(Refusal, Broken, NoAnswer):
            if hasattr(self.service, "close"):
                self.connection.call("closing a session", lambda: self.service.close("success"), limit=10.0)
                return
        for client in self._trainers:
            with contextlib.suppress(Exception):
                with_limit("unload_model", lambda client=client: _unload(client), 5.0)

    def _watch(self, holder: Any) -> None:
        from paritygate.backend.retry_after import be_patient  # imports the SDK

        be_patient(holder, self.connection.not_before, self.connection.heard)
        # Newer SDKs wait for minutes, without a word, where an account is without means (402): it is said at once.
        holder._should_pause_on_billing = lambda status, detail: False

    def _rest(self) -> Any:
        """The client that lists and deletes; in newer SDKs it has a holder of its own, made at its first use."""
        make = getattr(self.service, "_get_rest_holder", None)
        if make is not None:
            self._watch(make())
        return quietly(self.service.create_rest_client)

    def models(self) -> dict[str, int | None]:
        """The names that the service reports, each with its context in tokens where that is reported."""

        # Newer SDKs have it in RestClient, older ones only here.
        def ask() -> Any:
            self._rest()
            return quietly(self.service.get_server_capabilities)

        answer = self.connection.call("get_server_capabilities", ask)
        return {
            str(model.model_name): getattr(model, "max_context_length", None)
            for model in answer.supported_models
            if model.model_name
        }

    def checkpoints(self, trainer: "Trainer") -> int:
        """How many checkpoints the service lists for a training client."""
        answer = self.connection.call(
            "list_checkpoints", lambda: self._rest().list_checkpoints(trainer.client.model_id)
        )
        return len(answer.checkpoints)

    def delete_saved(self) -> None:
        """Delete every checkpoint of this proof; a service that cannot keeps them."""
        with contextlib.suppress(Exception):
            rest = self._rest()
            while self.connection.saved:
                path = self.connection.saved.pop()
                with_limit("deleting", lambda path=path: rest.delete_checkpoint_from_tinker_path(path), 5.0)
                self.connection.usage.deleted(path)

    def create(self, rank: int, seed: int | None = None, **flags: bool) -> "Trainer":
        """A fresh adapter; flags are train_mlp, train_attn, train_unembed."""
        model = self.connection.model
        options: dict[str, Any] = {"rank": rank, **flags, **({} if seed is None else {"seed": seed})}
        code = ", ".join(["MODEL", *(f"{name}={value}" for name, value in options.items())])
        verb = "create_lora_training_client"
        return self._trainer(verb, code, lambda: self.service.create_lora_training_client(model, **options))

    def restore(self, path: str, *, optimizer: bool = False) -> "Trainer":
        """An adapter from the state at `path`, with Adam's moments or without."""
        verb = "create_training_client_from_state" + ("_with_optimizer" if optimizer else "")
        return self._trainer(verb, PathCode.of(path), lambda: getattr(self.service, verb)(path))

    def _trainer(self, verb: str, code: str, make: Callable[[], Any]) -> "Trainer":
        name = self.connection.journal.name("t")
        self.connection.journal.add(f"{name} = wait(service.{verb}({code}))")
        client = self.connection.call(verb, make)
        self._trainers.append(client)
        return Trainer(self, client, name)

    def sampler(self, path: str | None = None) -> "Sampler":
        """A sampler of the weights saved at `path`, or of the base model."""
        arguments = {"base_model": self.connection.model} if path is None else {"model_path": path}
        name = self.connection.journal.name("s")
        code = "base_model=MODEL" if path is None else f"model_path={PathCode.of(path)}"
        self.connection.journal.add(f"{name} = wait(service.create_sampling_client({code}))")
        client = self.connection.call(
            "create_sampling_client", lambda: self.service.create_sampling_client(**arguments, **_no_retries())
        )
        return Sampler(self.connection, client, name)


def _unload(client: Any) -> None:
    from tinker import types
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

    async def send() -> None:
        with client.holder.aclient(ClientConnectionPoolType.TRAIN) as inner:
            await inner.models.unload(request=types.UnloadModelRequest(model_id=client.model_id))

    client.holder.run_coroutine_threadsafe(send()).result(timeout=5)


def _no_retries() -> dict[str, Any]:
    """The SDK's sampler repeats resets for two hours."""
    from tinker.lib.retry_handler import RetryConfig

    return {"retry_config": RetryConfig(enable_retry_logic=False)}


class Trainer:
    """One training client; `name` is its variable in the program of a check."""

    def __init__(self, session: Session, client: Any, name: str) -> None:
        self.session, self.client, self.name = session, client, name
        self.connection = session.connection

    def info(self) -> Any:
        return self.connection.call("get_info", self.client.get_info)

    def forward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", config: Mapping[str, float] | None = None
    ) -> Pass:
        """Logprobs and loss without a gradient."""
        return self._pass("forward", data, loss, config)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        config: Mapping[str, float] | None = None,
        limit: float | None = None,
    ) -> Pass:
        """The same, and the gradient is added to what waits for `step`."""
        return self._pass("forward_backward", data, loss, config, limit)

    def start_pass(
        self, verb: str, data: Sequence[Datum], loss: str, config: Mapping[str, float] | None
    ) -> Callable[[], Any]:
        """Submit without waiting; call the result to wait."""
        future = self._submitted(verb, data, loss, config)
        return lambda: self._counted(verb, data, future.result())

    def _submitted(self, verb: str, data: Sequence[Datum], loss: str, config: Mapping[str, float] | None) -> Any:
        batch, options = [datum.to_sdk() for datum in data], None if config is None else dict(config)
        return getattr(self.client, verb)(batch, loss, options)

    def _counted(self, verb: str, data: Sequence[Datum], answer: Any) -> Any:
        self._count("prefill" if verb == "forward" else "trained", data)
        return answer

    def _count(self, kind: str, data: Sequence[Datum]) -> None:
        self.connection.usage.count(kind, sum(len(datum.tokens) for datum in data))

    def _pass(
        self,
        verb: str,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, float] | None,
        limit: float | None = None,
    ) -> Pass:
        result = self.connection.journal.name("o")
        more = "" if config is None else f", {dict(config)}"
        code = ", ".join(datum.code() for datum in data)
        self.connection.journal.add(f"{result} = wait({self.name}.{verb}([{code}], {loss!r}{more}))")
        answer = self.connection.call(f"{verb} ({loss})", lambda: self._submitted(verb, data, loss, config), limit)
        return read_pass(self._counted(verb, data, answer), data)

    def custom(self, data: Sequence[Datum], loss: Callable[[Any, Any], Any], code: str) -> Pass:
        """forward_backward_custom; `code` is `loss` as an expression of the program."""
        batch = [datum.to_sdk() for datum in data]
        listed = ", ".join(datum.code() for datum in data)
        self.connection.journal.add(f"wait({self.name}.forward_backward_custom([{listed}], {code}))")
        answer = self.connection.call(
            "forward_backward_custom", lambda: self.client.forward_backward_custom(batch, loss)
        )
        for kind in ("prefill", "trained"):  # a pass for the logprobs, and one for the gradient
            self._count(kind, data)
        return read_pass(answer, data)

    def step(self, limit: float | None = None, **adam: float) -> dict[str, float]:
        """optim_step with AdamParams of exactly these fields."""
        self.connection.journal.add(
            f"wait({self.name}.optim_step(types.AdamParams({', '.join(f'{k}={number(v)}' for k, v in adam.items())})))"
        )
        answer = self.connection.call("optim_step", lambda: self.client.optim_step(_adam(adam)), limit)
        return dict(getattr(answer, "metrics", None) or {})

    def start_step(self, **adam: float) -> Callable[[], Any]:
        """Submit without waiting; call the result to wait."""
        return self.client.optim_step(_adam(adam)).result

    def save(self, name: str) -> str:
        """Save the training state; its path."""
        return self._saved("save_state", name)

    def save_for_sampler(self, name: str) -> str:
        """Save weights for sampling; their path."""
        return self._saved("save_weights_for_sampler", name)

    def _saved(self, verb: str, name: str) -> str:
        run, usage = str(self.client.model_id), self.connection.usage
        usage.saving(run, name)
        answer, limit = self._answer_to_save(verb, name)
        path = str(answer.path)
        usage.saved(run, name, path)
        self.connection.saved.append(path)
        variable = self.connection.journal.name("path")
        self.connection.journal.add(f"{variable} = wait({self.name}.{verb}({name!r}, {limit})).path")
        PathCode.remember(path, variable)
        return path

    def _answer_to_save(self, verb: str, name: str) -> tuple[Any, int | None]:
        """The answer, and the time limit that the service took: none where it has refused one."""
        save = getattr(self.client, verb)
        if self.connection.limits_states:
            try:
                return self.connection.call(verb, lambda: save(name, TTL_SECONDS)), TTL_SECONDS
            except Refusal:
                answer = self.connection.call(verb, lambda: save(name))  # a refusal of the name would be one again
                self.connection.limits_states = False
                return answer, None
        return self.connection.call(verb, lambda: save(name)), None

    def snapshot(self) -> "Sampler":
        """A sampler of the weights as they are now, without a name."""
        name = self.connection.journal.name("s")
        self.connection.journal.add(f"{name} = wait({self.name}.save_weights_and_get_sampling_client())")
        client = self.connection.call(
            "save_weights_and_get_sampling_client", self.client.save_weights_and_get_sampling_client
        )
        return Sampler(self.connection, client, name)

    def load(self, path: str, *, optimizer: bool = False) -> None:
        """load_state in place, which newer SDKs call deprecated."""
        verb = "load_state_with_optimizer" if optimizer else "load_state"
        self.connection.journal.add(f"wait({self.name}.{verb}({PathCode.of(path)}))")

        self.connection.call(verb, lambda: quietly(getattr(self.client, verb), path))


def _adam(fields: Mapping[str, float]) -> Any:
    from tinker import types

    return types.AdamParams(**fields)


def read_pass(answer: Any, data: Sequence[Datum]) -> Pass:
    """The SDK's ForwardBackwardOutput as arrays; Broken where a datum's logprobs are missing or of another shape."""
    metrics = {str(name): float(value) for name, value in (answer.metrics or {}).items()}
    outputs = list(answer.loss_fn_outputs or [])
    if len(outputs) != len(data):
        raise Broken(f"{len(outputs)} loss_fn_outputs for {len(data)} datums")
    arrays: list[Array] = []
    for index, (output, datum) in enumerate(zip(outputs, data, strict=True)):
        if "logprobs" not in output:
            raise Broken(f"loss_fn_outputs[{index}] has no logprobs, only {sorted(output)}")
        values = np.asarray(output["logprobs"].to_numpy(), float)
        if values.size != datum.targets.size:
            raise Broken(f"loss_fn_outputs[{index}] has {values.size} logprobs for {datum.targets.size} targets")
        arrays.append(values.reshape(datum.targets.shape))
    return Pass(metrics.get("loss:sum"), arrays, metrics)


class Sampler:
    """One sampling client."""

    def __init__(self, connection: Connection, client: Any, name: str) -> None:
        self.connection, self.client, self.name = connection, client, name

    def sample(
        self,
        prompt: Sequence[int],
        count: int = 1,
        *,
        prompt_logprobs: bool = False,
        topk: int = 0,
        limit: float | None = None,
        **params: Any,
    ) -> Sampled:
        """`params` are the SamplingParams that are sent; a field that is not given is left to the service."""
        options = {"include_prompt_logprobs": True} if prompt_logprobs else {}
        options |= {"topk_prompt_logprobs": topk} if topk else {}
        settings = ", ".join(f"{k}={v!r}" for k, v in params.items())
        more = "".join(f", {k}={v!r}" for k, v in options.items())
        result = self.connection.journal.name("r")
        self.connection.journal.add(
            f"{result} = wait({self.name}.sample(types.ModelInput.from_ints({list(prompt)}), {count}, "
            f"types.SamplingParams({settings}){more}))"
        )
        answer = self.connection.again("sample", lambda: self._submitted(prompt, count, options, params), limit)
        return read_sampled(self._counted(prompt, answer))

    def start(
        self, prompt: Sequence[int], count: int, options: Mapping[str, Any], params: Mapping[str, Any]
    ) -> Callable[[], Any]:
        """Submit without waiting; call the result to wait."""
        future = self._submitted(prompt, count, options, params)
        return lambda: self._counted(prompt, future.result() if is_future(future) else future)

    def _submitted(
        self, prompt: Sequence[int], count: int, options: Mapping[str, Any], params: Mapping[str, Any]
    ) -> Any:
        from tinker import types

        return self.client.sample(
            types.ModelInput.from_ints(list(prompt)), count, types.SamplingParams(**params), **options
        )

    def _counted(self, prompt: Sequence[int], answer: Any) -> Any:
        self.connection.usage.count("prefill", len(prompt))
        self.connection.usage.count("sampled", sum(len(sequence.tokens) for sequence in answer.sequences))
        return answer

    def logprobs(self, tokens: Sequence[int]) -> Array:
        """compute_logprobs: (L,), NaN where the service has None."""
        from tinker import types

        result = self.connection.journal.name("l")
        self.connection.journal.add(
            f"{result} = wait({self.name}.compute_logprobs(types.ModelInput.from_ints({list(tokens)})))"
        )
        answer = self.connection.again(
            "compute_logprobs", lambda: self.client.compute_logprobs(types.ModelInput.from_ints(list(tokens)))
        )
        self.connection.usage.count("prefill", len(tokens))
        if answer is None:
            raise Broken("compute_logprobs: the answer has no prompt logprobs")
        return _with_nan(answer)


def read_sampled(answer: Any) -> Sampled:
    """The SDK's SampleResponse as arrays."""
    sequences: list[Sample] = []
    for sequence in answer.sequences:
        logprobs = None if sequence.logprobs is None else _with_nan(sequence.logprobs)
        stopped = "stop" in str(getattr(sequence.stop_reason, "value", sequence.stop_reason)).lower()
        sequences.append(Sample(tuple(int(token) for token in sequence.tokens), logprobs, stopped))
    topk = getattr(answer, "topk_prompt_logprobs", None)
    rows = None if topk is None else [None if row is None else [(int(t), float(p)) for t, p in row] for row in topk]
    prompt = None if answer.prompt_logprobs is None else _with_nan(answer.prompt_logprobs)
    return Sampled(sequences, prompt, rows)


def _with_nan(values: Iterator[Any] | Sequence[Any]) -> Array:
    return np.array([np.nan if value is None else float(value) for value in values], float)
