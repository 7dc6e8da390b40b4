"""Training models: one adapter each, their requests run in seq_id order, a request repeated answered once."""

import secrets
import time
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paritygate.server.engine.loop import Engine
from paritygate.server.engine.training import Pass, adam_step
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model.lora import Adapter, LoraSpec
from paritygate.server.sessions.checkpoints import Store
from paritygate.server.sessions.promises import PROTOBUF, Payload, Promise, Promises, digest, json_payload
from paritygate.server.sessions.samplers import Samplers
from paritygate.server.wire.fields import Fields
from paritygate.server.wire.training import (
    decode_adam,
    decode_data,
    encode_forward_backward,
    loss_config,
    parse_forward_backward,
)

REMEMBERED = 256  # finished requests of a model that a repetition still finds


@dataclass
class Model:
    """One trainable adapter and the order of its requests; `held` waits for the seq_ids before it."""

    id: str
    session: str
    spec: LoraSpec
    adapter: Adapter | None = None
    next_seq: int = 1
    promises: dict[int, tuple[Promise, bytes]] = field(default_factory=dict[int, tuple[Promise, bytes]])
    held: dict[int, tuple[float, Callable[[], None]]] = field(
        default_factory=dict[int, tuple[float, Callable[[], None]]]
    )

    def ready(self) -> Adapter:
        if self.adapter is None:
            raise RequestError(f"model {self.id} could not be created, so it cannot be used", 404)
        return self.adapter


class Trainers:
    """All training models of a server; used on its event loop only."""

    def __init__(self, engine: Engine, store: Store, promises: Promises, samplers: Samplers, limits: Limits) -> None:
        self.engine = engine
        self.store = store
        self.promises = promises
        self.samplers = samplers
        self.limits = limits
        self.models: dict[str, Model] = {}

    def get(self, model_id: str) -> Model:
        model = self.models.get(model_id)
        if model is None:
            raise RequestError(f"there is no model {model_id!r} (its session finished or expired)", 404)
        return model

    def forget(self, session: str) -> None:
        for model in [m for m in self.models.values() if m.session == session]:
            del self.models[model.id]

    # ------------------------------------------------------------------ creation

    def create(self, session: str, body: Fields) -> Promise:
        """Promise a fresh adapter, named SESSION:train:N as the SDK expects."""
        model_id = f"{session}:train:{body.integer('model_seq_id', low=0)}"
        if model_id in self.models:
            return self.models[model_id].promises[0][0]
        self.samplers.check_base(body.text("base_model"))
        _check_optimizer(body)
        spec = _lora_spec(body, self.limits)
        model = self._add(model_id, session, body, spec)

        def make() -> dict[str, str]:
            model.adapter = Adapter(spec, self.engine.network.targets)
            return {"model_id": model_id, "type": "create_model"}

        return self._first(model, make)

    def create_from_state(self, session: str, body: Fields) -> Promise:
        """Promise an adapter made from a saved state (the SDK's create_training_client_from_state)."""
        model_id = f"{session}:train:{body.integer('model_seq_id', low=0)}"
        if model_id in self.models:
            return self.models[model_id].promises[0][0]
        base_model = body.optional_text("base_model")
        if base_model is not None:
            self.samplers.check_base(base_model)
        _check_optimizer(body)
        checkpoint = self.store.find(body.text("path"))
        self.samplers.check_base(checkpoint.base_model)
        optimizer = body.flag("optimizer", False)
        model = self._add(model_id, session, body, checkpoint.spec)

        def load() -> dict[str, str]:
            adapter = Adapter(checkpoint.spec, self.engine.network.targets)
            self.store.load_into(adapter, checkpoint, optimizer=optimizer)
            model.adapter = adapter
            return {"path": checkpoint.path, "model_id": model_id, "type": "load_weights"}

        return self._first(model, load)

    def _add(self, model_id: str, session: str, body: Fields, spec: LoraSpec) -> Model:
        if len(self.models) >= self.limits.adapters:
            raise RequestError(
                f"{self.limits.adapters} models are alive, which is this server's limit; finish a session"
            )
        model = Model(model_id, session, spec)
        self.models[model_id] = model
        return model

    def _first(self, model: Model, make: Callable[[], dict[str, str]]) -> Promise:
        promise = self.promises.create(model.session)
        model.promises[0] = (promise, b"")
        self.promises.follow(promise, self.engine.run(iter(()), make), json_payload)
        return promise

    # ------------------------------------------------------------------ requests of one model, in order

    def _enqueue(
        self,
        model: Model,
        seq: int | None,
        body: bytes,
        start: Callable[[], "Future[Any]"],
        encode: Callable[[Any], Payload],
    ) -> Promise:
        promise = self.promises.create(model.session)

        def begin() -> None:
            try:
                self.promises.follow(promise, start(), encode)
            except Exception as error:
                self.promises.fail_with(promise, error)

        if seq is None:
            begin()
            return promise
        model.promises[seq] = (promise, digest(body))
        model.held[seq] = (time.monotonic(), begin)
        self._release(model)
        for old in sorted(model.promises)[1:-REMEMBERED]:
            del model.promises[old]
        return promise

    def _release(self, model: Model) -> None:
        while model.next_seq in model.held:
            _, begin = model.held.pop(model.next_seq)
            model.next_seq += 1
            begin()

    def _repeated(self, model: Model, seq: int | None, body: bytes) -> Promise | None:
        """The promise of the same request sent before; RequestError if its seq_id was another's, or is long over."""
        if seq is None:
            return None
        if seq in model.promises:
            promise, before = model.promises[seq]
            if before != digest(body):
                raise RequestError(f"model {model.id}: seq_id {seq} was used before for another request", 422)
            return promise
        if seq < model.next_seq:
            raise RequestError(f"model {model.id}: seq_id {seq} is over; the next one is {model.next_seq}", 422)
        return None

    @contextmanager
    def _turn(self, model: Model, seq: int | None) -> Generator[None]:
        """A request that is refused has had its turn: those after it must not wait for it."""
        try:
            yield
        except RequestError:
            if seq is not None and seq == model.next_seq:
                model.next_seq += 1
                self._release(model)
            raise

    def fail_overdue(self) -> None:
        """Fail requests that have waited too long for a seq_id that never came."""
        now = time.monotonic()
        for model in self.models.values():
            for seq in sorted(model.held):
                if now - model.held[seq][0] > self.limits.out_of_order_seconds:
                    del model.held[seq]
                    self.promises.fail(
                        model.promises[seq][0],
                        f"seq_id {seq} waited for seq_id {model.next_seq}, which never came",
                        "user",
                    )

    # ------------------------------------------------------------------ the requests

    def forward_backward(self, body: bytes) -> Promise:
        message = parse_forward_backward(body)
        model, seq = self.get(message.model_id), message.seq_id or None
        repeated = self._repeated(model, seq, body)
        if repeated is not None:
            return repeated
        with self._turn(model, seq):
            data = decode_data(message, self.engine.network.shape, self.limits)
        config = loss_config(message)

        def start() -> "Future[Any]":
            network, only = self.engine.network, message.forward_only
            work = Pass(network, model.ready(), data, message.loss_fn, config, forward_only=only)
            return self.engine.run(work.steps(self.limits.train_tokens), lambda: work.outcome)

        return self._enqueue(model, seq, body, start, lambda done: Payload(encode_forward_backward(done), PROTOBUF))

    def optim_step(self, body: Fields, raw: bytes) -> Promise:
        model, seq = self.get(body.text("model_id")), body.optional_integer("seq_id", low=1)
        repeated = self._repeated(model, seq, raw)
        if repeated is not None:
            return repeated
        with self._turn(model, seq):
            params = decode_adam(body)

        def step() -> dict[str, Any]:
            adam_step(model.ready(), params)
            return {"metrics": {}}

        return self._enqueue(model, seq, raw, lambda: self.engine.run(iter(()), step), json_payload)

    def save(self, body: Fields, raw: bytes) -> Promise:
        """Promise a saved state, Adam's moments included."""
        model, seq = self.get(body.text("model_id")), body.optional_integer("seq_id", low=1)
        repeated = self._repeated(model, seq, raw)
        if repeated is not None:
            return repeated
        with self._turn(model, seq):
            write = self.store.writer(body, model.id, "weights", self.samplers.model_name, seq)

        def save() -> dict[str, str]:
            return {"path": write(model.ready()).path, "type": "save_weights"}

        return self._enqueue(model, seq, raw, lambda: self.engine.run(iter(()), save), json_payload)

    def save_for_sampler(self, body: Fields, raw: bytes) -> Promise:
        """Promise sampler weights: saved under a name, or frozen in memory as a new sampling session."""
        model, seq = self.get(body.text("model_id")), body.optional_integer("seq_id", low=1)
        repeated = self._repeated(model, seq, raw)
        if repeated is not None:
            return repeated
        with self._turn(model, seq):
            if body.data.get("kind") not in ("snapshot", None):
                raise RequestError("kind 'inflight' is not served: here the weights of a sampler never move")
            named = body.optional_text("path") is not None
            write = self.store.writer(body, model.id, "sampler_weights", self.samplers.model_name, seq)
            number = body.optional_integer("sampling_session_seq_id", low=0)
            if not named and number is None:
                raise RequestError("save_weights_for_sampler needs a path or a sampling_session_seq_id")

        def save() -> Any:
            if named:
                return {"path": write(model.ready()).path, "type": "save_weights_for_sampler"}
            return model.ready().freeze(f"{model.id}#{uuid.uuid4().hex}", self.engine.network.dtype)

        def encode(done: Any) -> Payload:
            if named:
                return json_payload(done)
            sampler = self.samplers.add(f"{model.session}:sample:{number}", model.session, None, done)
            return json_payload({"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"})

        return self._enqueue(model, seq, raw, lambda: self.engine.run(iter(()), save), encode)

    def load(self, body: Fields, raw: bytes) -> Promise:
        """Promise to set a model to a saved state."""
        model, seq = self.get(body.text("model_id")), body.optional_integer("seq_id", low=1)
        repeated = self._repeated(model, seq, raw)
        if repeated is not None:
            return repeated
        with self._turn(model, seq):
            path, optimizer = body.text("path"), body.flag("optimizer", False)
            self.store.parse(path)

        def load() -> dict[str, str]:
            self.store.load_into(model.ready(), self.store.find(path), optimizer=optimizer)
            return {"path": path, "model_id": model.id, "type": "load_weights"}

        return self._enqueue(model, seq, raw, lambda: self.engine.run(iter(()), load), json_payload)


def _lora_spec(body: Fields, limits: Limits) -> LoraSpec:
    config = body.child("lora_config") if body.data.get("lora_config") is not None else Fields({}, "body.lora_config")
    seed = config.optional_integer("seed", low=-(2**63), high=2**64 - 1)
    spec = LoraSpec(
        rank=config.integer("rank", 32, low=1, high=limits.lora_rank),
        seed=secrets.randbits(63) if seed is None else seed,
        attn=config.flag("train_attn", True),
        mlp=config.flag("train_mlp", True),
        unembed=config.flag("train_unembed", True),
    )
    if not (spec.attn or spec.mlp or spec.unembed):
        raise RequestError("lora_config: at least one of train_attn, train_mlp and train_unembed must be true")
    return spec


def _check_optimizer(body: Fields) -> None:
    config = body.data.get("optimizer_config")
    if isinstance(config, dict) and config.get("type", "adamw") != "adamw":
        raise RequestError(f"optimizer {config.get('type')!r} is not served: only adamw is")
