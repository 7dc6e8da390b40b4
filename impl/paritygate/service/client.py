"""A thin layer over the SDK: every call has a time limit of ours, answers are NumPy, and SDKs 0.18 to 0.38 look alike.

The SDK repeats requests that fail with 5xx for ever and blocks while a service is down. Here each call runs in a daemon
thread of its own, and a call that is not done in time is `NoAnswer`: an outcome, not a hanging program.
"""

import contextlib
import itertools
import os
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from paritygate.errors import BackendError, BadInputError
from paritygate.service.journal import Journal, number, numbers

T = TypeVar("T")
Array = NDArray[np.float64]
RETRYABLE_STATUS = frozenset({408, 409, 425, 429})


class Refusal(Exception):  # noqa: N818 - what the service did
    """The service (or, where `by_sdk`, the SDK before it) said no, at once and for good."""

    def __init__(self, text: str, *, by_sdk: bool = False) -> None:
        super().__init__(text)
        self.by_sdk = by_sdk


class Broken(Exception):  # noqa: N818
    """An answer that the SDK cannot read, or an internal error of the service; `final` where it says so for good."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class NoAnswer(Exception):  # noqa: N818
    """No answer within our limit."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what}: no answer within {seconds:g} s")


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


@dataclass
class Connection:
    """Where the service is, how long a call may take, and what has been called so far."""

    base_url: str
    api_key: str | None  # None: the SDK's own credentials
    model: str
    limit: float = 120.0
    journal: Journal = field(default_factory=Journal)
    calls: int = 0
    tokens: int = 0
    slowest: float = 0.0
    silent: int = 0  # calls in a row without an answer
    saved: list[str] = field(default_factory=list[str])

    def probe(self, seconds: float | None = None) -> None:
        """GET healthz without the SDK, which would block; BackendError in one sentence when nobody answers there.

        A service that trains in the process that serves answers health late: by default it has twice a call's limit.
        """
        probe(self.base_url, self.api_key, max(10.0, 2 * self.limit) if seconds is None else seconds)

    def call(self, what: str, submit: Callable[[], Any], limit: float | None = None) -> Any:
        """The result of one SDK call, future or not.

        Raises Refusal, Broken or NoAnswer; BackendError when the service is gone.
        """
        seconds = self.limit if limit is None else limit
        self.calls += 1
        started = time.monotonic()
        try:
            value = _with_limit(what, submit, seconds, self._gone)
        except NoAnswer:
            self.silent += 1
            self.probe()
            if self.silent >= 4 and limit is None:
                raise BackendError(
                    f"{self.base_url} answers its health check and nothing else: {self.silent} calls in a row were "
                    f"without an answer for {seconds:g} s, the last was {what}."
                ) from None
            raise
        except BackendError:
            raise
        except Exception as error:
            self.silent = 0
            failure = _classified(what, error)
            if isinstance(failure, Broken):
                self.probe()  # a service that is gone is no departure
            raise failure from error
        self.silent = 0
        self.slowest = max(self.slowest, time.monotonic() - started)
        return value

    def _gone(self) -> None:
        """BackendError when nothing listens at the address any more: the SDK would wait for minutes."""
        parts = urlsplit(self.base_url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
        except ConnectionRefusedError:
            raise BackendError(f"{self.base_url} is gone: it refuses connections.") from None
        except OSError:
            return


def probe(base_url: str, api_key: str | None, seconds: float = 10.0) -> None:
    """Ask GET /api/v1/healthz twice, `seconds` at the most; BackendError says in one sentence what is wrong."""
    url = f"{base_url.rstrip('/')}/api/v1/healthz"
    reason = ""
    for attempt in range(2):
        if attempt:
            time.sleep(0.5)
        try:
            request = urllib.request.Request(url, headers={} if api_key is None else {"X-API-Key": api_key})
            body = _with_limit("healthz", lambda request=request: _get(request, seconds / 2), seconds / 2)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                if api_key is None:
                    return
                raise BackendError(f"{base_url} refuses the API key; correct TINKER_API_KEY.") from None
            reason = f"GET {url} has HTTP status {error.code}"
            if error.code == 404:
                break
        except NoAnswer:
            reason = f"GET {url} had no answer within {seconds / 2:g} s"
        except (OSError, ValueError, urllib.error.URLError) as error:
            cause = getattr(error, "reason", error)
            reason = f"{cause}" if str(cause) else type(error).__name__
        except Exception as error:  # of http.client: an answer that is no HTTP
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        else:
            if b"<html" in body[:500].lower() or b"<!doctype" in body[:500].lower():
                reason = f"GET {url} answers with an HTML page"
                break
            return
    raise BackendError(f"No Tinker service answers at {base_url} ({reason}); start it, or correct --base-url.")


def _get(request: urllib.request.Request, seconds: float) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({})) if _local(request) else urllib.request
    open_it = opener.open if isinstance(opener, urllib.request.OpenerDirector) else opener.urlopen
    with open_it(request, timeout=seconds) as response:
        return response.read(4096)


def _local(request: urllib.request.Request) -> bool:
    return (request.host or "").rsplit(":", 1)[0] in ("127.0.0.1", "localhost", "[::1]")


def _with_limit(
    what: str, submit: Callable[[], T], seconds: float, watch: Callable[[], None] | None = None, every: float = 3.0
) -> T:
    """Run in a daemon thread; NoAnswer after `seconds`. `watch` is called meanwhile; what it raises twice ends it."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def body() -> None:
        try:
            value: Any = submit()
            answers.put((value.result() if _is_future(value) else value, None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=body, daemon=True, name=f"service proof: {what}").start()
    end, failures = time.monotonic() + seconds, 0
    while True:
        rest = end - time.monotonic()
        try:
            value, error = answers.get(timeout=max(0.0, min(rest, every) if watch else rest))
            break
        except queue.Empty:
            if rest <= every or watch is None:
                raise NoAnswer(what, seconds) from None
        try:
            watch()
        except BackendError:
            failures += 1
            if failures > 1:
                raise
    if error is not None:
        raise error
    return value


def quietly(function: Callable[..., T], *arguments: Any) -> T:
    """Call what newer SDKs call deprecated, and older ones have nothing else for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


def _is_future(value: Any) -> bool:
    return hasattr(value, "result") and callable(value.result)


def _classified(what: str, error: Exception) -> Exception:
    """Refusal where asking again cannot help, Broken for all else."""
    import tinker

    text = f"{what}: {_one_line(error)}"
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for one in chain:
        if isinstance(one, tinker.APIStatusError):
            code = one.status_code
            if code in (401, 403):
                return BackendError(f"The service refuses the API key ({_one_line(one)}); correct TINKER_API_KEY.")
            return Refusal(text) if code < 500 and code not in RETRYABLE_STATUS else Broken(text)
        if isinstance(one, getattr(tinker, "RequestFailedError", ())):
            category = str(getattr(one, "category", getattr(one, "error_category", "")))
            return Refusal(text) if "user" in category.lower() else Broken(text, final=True)
    if type(error).__module__.split(".")[0] == "tinker" or isinstance(error, OSError | TimeoutError):
        return Broken(text)
    if isinstance(error, ValueError | TypeError | AssertionError | NotImplementedError | KeyError):
        return Refusal(text, by_sdk=True)
    return Broken(text)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{text[:400]}" if text else type(error).__name__


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

        self.service, _ = connection.call("opening a session", open_it)

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
                _with_limit("unload_model", lambda client=client: _unload(client), 5.0)

    def models(self) -> dict[str, int | None]:
        """The names that the service reports, each with its context in tokens where that is reported."""
        # Newer SDKs have it in RestClient, older ones only here.
        answer = self.connection.call("get_server_capabilities", lambda: quietly(self.service.get_server_capabilities))
        return {
            str(model.model_name): getattr(model, "max_context_length", None)
            for model in answer.supported_models
            if model.model_name
        }

    def checkpoints(self, trainer: "Trainer") -> int:
        """How many checkpoints the service lists for a training client."""
        rest = quietly(self.service.create_rest_client)
        answer = self.connection.call("list_checkpoints", lambda: rest.list_checkpoints(trainer.client.model_id))
        return len(answer.checkpoints)

    def delete_saved(self) -> None:
        """Delete every checkpoint of this proof; a service that cannot keeps them."""
        with contextlib.suppress(Exception):
            rest = quietly(self.service.create_rest_client)
            while self.connection.saved:
                path = self.connection.saved.pop()
                _with_limit("deleting", lambda path=path: rest.delete_checkpoint_from_tinker_path(path), 5.0)

    def create(self, rank: int, seed: int | None = None, **flags: bool) -> "Trainer":
        """A fresh adapter; flags are train_mlp, train_attn, train_unembed."""
        model = self.connection.model
        options: dict[str, Any] = {"rank": rank, **flags, **({} if seed is None else {"seed": seed})}
        client = self.connection.call(
            "create_lora_training_client", lambda: self.service.create_lora_training_client(model, **options)
        )
        code = ", ".join(["MODEL", *(f"{name}={value}" for name, value in options.items())])
        return self._trainer(client, f"create_lora_training_client({code})")

    def restore(self, path: str, *, optimizer: bool = False) -> "Trainer":
        """An adapter from the state at `path`, with Adam's moments or without."""
        verb = "create_training_client_from_state" + ("_with_optimizer" if optimizer else "")
        client = self.connection.call(verb, lambda: getattr(self.service, verb)(path))
        return self._trainer(client, f"{verb}({PathCode.of(path)})")

    def _trainer(self, client: Any, code: str) -> "Trainer":
        self._trainers.append(client)
        name = self.connection.journal.name("t")
        self.connection.journal.add(f"{name} = wait(service.{code})")
        return Trainer(self, client, name)

    def sampler(self, path: str | None = None) -> "Sampler":
        """A sampler of the weights saved at `path`, or of the base model."""
        arguments = {"base_model": self.connection.model} if path is None else {"model_path": path}
        client = self.connection.call(
            "create_sampling_client", lambda: self.service.create_sampling_client(**arguments, **_no_retries())
        )
        name = self.connection.journal.name("s")
        code = "base_model=MODEL" if path is None else f"model_path={PathCode.of(path)}"
        self.connection.journal.add(f"{name} = wait(service.create_sampling_client({code}))")
        return Sampler(self.connection, client, name)


class PathCode:
    """Which variable of the program holds a saved path: another run's path would be another one."""

    _names: ClassVar[dict[str, str]] = {}

    @classmethod
    def of(cls, path: str) -> str:
        return cls._names.get(path, repr(path))

    @classmethod
    def remember(cls, path: str, name: str) -> None:
        cls._names[path] = name


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
        batch, options = [datum.to_sdk() for datum in data], None if config is None else dict(config)
        self.connection.tokens += sum(len(datum.tokens) for datum in data)
        future = getattr(self.client, verb)(batch, loss, options)
        return future.result

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
        answer = self.connection.call(
            f"{verb} ({loss})",
            lambda: self.start_pass(verb, data, loss, config)(),  # noqa: PLW0108 - in the call's thread
            limit,
        )
        return read_pass(answer, data)

    def custom(self, data: Sequence[Datum], loss: Callable[[Any, Any], Any], code: str) -> Pass:
        """forward_backward_custom; `code` is `loss` as an expression of the program."""
        self.connection.tokens += 2 * sum(len(datum.tokens) for datum in data)
        batch = [datum.to_sdk() for datum in data]
        listed = ", ".join(datum.code() for datum in data)
        self.connection.journal.add(f"wait({self.name}.forward_backward_custom([{listed}], {code}))")
        answer = self.connection.call(
            "forward_backward_custom", lambda: self.client.forward_backward_custom(batch, loss)
        )
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
        answer = self.connection.call(verb, lambda: getattr(self.client, verb)(name))
        path = str(answer.path)
        self.connection.saved.append(path)
        variable = self.connection.journal.name("path")
        self.connection.journal.add(f"{variable} = wait({self.name}.{verb}({name!r})).path")
        PathCode.remember(path, variable)
        return path

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
        answer = self.connection.call(
            "sample",
            lambda: self.start(prompt, count, options, params)(),  # noqa: PLW0108 - in the call's thread
            limit,
        )
        return read_sampled(answer)

    def start(
        self, prompt: Sequence[int], count: int, options: Mapping[str, Any], params: Mapping[str, Any]
    ) -> Callable[[], Any]:
        """Submit without waiting; call the result to wait."""
        from tinker import types

        self.connection.tokens += len(prompt) + count * int(params.get("max_tokens") or 1)
        future = self.client.sample(
            types.ModelInput.from_ints(list(prompt)), count, types.SamplingParams(**params), **options
        )
        return future.result if _is_future(future) else lambda: future

    def logprobs(self, tokens: Sequence[int]) -> Array:
        """compute_logprobs: (L,), NaN where the service has None."""
        from tinker import types

        self.connection.tokens += len(tokens)
        result = self.connection.journal.name("l")
        self.connection.journal.add(
            f"{result} = wait({self.name}.compute_logprobs(types.ModelInput.from_ints({list(tokens)})))"
        )
        answer = self.connection.call(
            "compute_logprobs", lambda: self.client.compute_logprobs(types.ModelInput.from_ints(list(tokens)))
        )
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


def unique_names(prefix: str) -> Iterator[str]:
    """Names for saved states that no earlier run used."""
    stamp = f"{prefix}-{int(time.time() * 1000):x}"
    return (f"{stamp}-{index}" for index in itertools.count(1))


def checked_url(url: str) -> str:
    """`url` without a final slash; BadInputError unless it is http(s) with a host."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise BadInputError(f"--base-url {url!r} is no address; it looks like http://127.0.0.1:8000.")
    return url.rstrip("/")
