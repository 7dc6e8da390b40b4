"""The state behind the routes: sessions, models, samplers; every method runs on the event loop."""

import json
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from paritygate.server import wire_sampling, wire_training
from paritygate.server.engine import Engine, SampleJob
from paritygate.server.fields import Fields
from paritygate.server.limits import Limits, RequestError
from paritygate.server.lora import BASE, Adapter, LoraSpec, Snapshot
from paritygate.server.promises import Payload, Promise, Promises
from paritygate.server.store import Store
from paritygate.server.training import Pass, adam_step

PROTOBUF = "application/x-protobuf"


@dataclass
class Session:
    """A client's session; `seen` is the monotonic time of its last request."""

    id: str
    seen: float
    user_metadata: dict[str, Any] | None = None
    finished: bool = False


@dataclass
class Model:
    """One trainable adapter and the order of its requests."""

    id: str
    session: str
    user_metadata: dict[str, Any] | None
    spec: LoraSpec
    adapter: Adapter | None = None
    next_seq: int = 1
    promises: dict[int, tuple[Promise, bytes]] = field(default_factory=dict[int, tuple[Promise, bytes]])
    held: dict[int, tuple[float, Callable[[], None], Promise]] = field(
        default_factory=dict[int, tuple[float, Callable[[], None], Promise]]
    )
    touched: float = 0.0

    def ready(self) -> Adapter:
        if self.adapter is None:
            raise RequestError(f"model {self.id} was not created", 404)
        return self.adapter


@dataclass
class Sampler:
    """A sampling session: frozen weights under an id."""

    id: str
    session: str
    model_path: str | None
    snapshot: Snapshot
    promises: "OrderedDict[int, tuple[Promise, bytes]]" = field(default_factory=OrderedDict[int, tuple[Promise, bytes]])


class Service:
    """Everything that a server knows."""

    def __init__(self, engine: Engine, store: Store, limits: Limits, model_name: str) -> None:
        self.engine = engine
        self.store = store
        self.limits = limits
        self.model_name = model_name
        self.network = engine.network
        self.promises = Promises(limits)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: OrderedDict[str, Sampler] = OrderedDict()
        self.closing = False

    # ------------------------------------------------------------------ sessions

    def create_session(self, body: Fields) -> dict[str, Any]:
        if len(self.sessions) >= self.limits.sessions:
            raise RequestError(f"{self.limits.sessions} sessions are open; finish some", 429)
        metadata = body.data.get("user_metadata")
        session = Session(str(uuid.uuid4()), time.monotonic(), metadata if isinstance(metadata, dict) else None)
        self.sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id}

    def session(self, session_id: str) -> Session:
        """The live session of that id, marked as seen; 404 if unknown, 410 if finished."""
        session = self.sessions.get(session_id)
        if session is None:
            raise RequestError(f"there is no session {session_id!r} (finished, expired, or of another server)", 404)
        if session.finished:
            raise RequestError(f"session {session_id} has finished", 410)
        session.seen = time.monotonic()
        return session

    def finish_session(self, session_id: str) -> None:
        session = self.sessions.get(session_id)
        if session is None:
            raise RequestError(f"there is no session {session_id!r}", 404)
        session.finished = True
        self._forget(session_id)

    def _forget(self, session_id: str) -> None:
        """Cancel and free everything that belongs to a session."""
        self.promises.drop_session(session_id)
        for model in [m for m in self.models.values() if m.session == session_id]:
            del self.models[model.id]
        for sampler in [s for s in self.samplers.values() if s.session == session_id]:
            del self.samplers[sampler.id]

    def reap(self) -> None:
        """Free what vanished clients left: silent sessions, old answers, requests held for one that never came."""
        now = time.monotonic()
        for session in list(self.sessions.values()):
            if now - session.seen > self.limits.session_seconds:
                self._forget(session.id)
                del self.sessions[session.id]
        self.promises.expire(self.limits.session_seconds)
        for model in self.models.values():
            self._release_held(model, now)

    # ------------------------------------------------------------------ models

    def create_model(self, body: Fields) -> Promise:
        """Promise a fresh adapter, named SESSION:train:N as the SDK expects."""
        session = self.session(body.text("session_id"))
        model_id = f"{session.id}:train:{body.integer('model_seq_id', low=0)}"
        if model_id in self.models:
            return self.models[model_id].promises[0][0]
        self._check_base(body.text("base_model"))
        config = body.object("lora_config") if body.data.get("lora_config") is not None else Fields({}, "lora_config")
        optimizer = body.data.get("optimizer_config")
        if isinstance(optimizer, dict) and optimizer.get("type", "adamw") != "adamw":
            raise RequestError(f"optimizer {optimizer.get('type')!r} is not served: only adamw is documented here")
        seed = config.optional_integer("seed", low=-(2**63), high=2**64 - 1)
        spec = LoraSpec(
            rank=config.integer("rank", 32, low=1, high=self.limits.lora_rank),
            seed=secrets.randbits(63) if seed is None else seed,
            attn=config.flag("train_attn", True),
            mlp=config.flag("train_mlp", True),
            unembed=config.flag("train_unembed", True),
        )
        if not (spec.attn or spec.mlp or spec.unembed):
            raise RequestError("lora_config: at least one of train_attn, train_mlp and train_unembed must be true")
        model = self._new_model(model_id, session.id, body, spec)

        def create() -> dict[str, str]:
            model.adapter = Adapter(spec, self.network.targets)
            return {"model_id": model_id, "type": "create_model"}

        return self._first(model, create)

    def load_new_model(self, body: Fields) -> Promise:
        """Promise an adapter made from a saved state (the SDK's create_training_client_from_state)."""
        session = self.session(body.text("session_id"))
        model_id = f"{session.id}:train:{body.integer('model_seq_id', low=0)}"
        if model_id in self.models:
            return self.models[model_id].promises[0][0]
        base = body.optional_text("base_model")
        if base is not None:
            self._check_base(base)
        checkpoint = self.store.find(body.text("path"))
        self._check_base(checkpoint.base_model)
        optimizer = body.flag("optimizer", False)
        model = self._new_model(model_id, session.id, body, checkpoint.spec)

        def load() -> dict[str, str]:
            adapter = Adapter(checkpoint.spec, self.network.targets)
            self.store.load_into(adapter, checkpoint, optimizer=optimizer)
            model.adapter = adapter
            return {"path": checkpoint.path, "model_id": model_id, "type": "load_weights"}

        return self._first(model, load)

    def _new_model(self, model_id: str, session: str, body: Fields, spec: LoraSpec) -> Model:
        if len(self.models) >= self.limits.adapters:
            raise RequestError(
                f"{self.limits.adapters} models are alive, which is this server's limit; finish a session first", 429
            )
        metadata = body.data.get("user_metadata")
        model = Model(model_id, session, metadata if isinstance(metadata, dict) else None, spec)
        self.models[model_id] = model
        return model

    def _first(self, model: Model, make: Callable[[], dict[str, str]]) -> Promise:
        promise = self.promises.create(model.session)
        model.promises[0] = (promise, b"")
        future = self.engine.run(iter(()), make)
        self.promises.follow(promise, future, _json)
        return promise

    def model(self, model_id: str) -> Model:
        model = self.models.get(model_id)
        if model is None:
            raise RequestError(f"there is no model {model_id!r} (its session finished or expired)", 404)
        self.session(model.session)
        return model

    def _check_base(self, name: str) -> None:
        if name.split(":", maxsplit=1)[0] != self.model_name:
            raise RequestError(f"base_model {name!r} is not served here; this server has {self.model_name!r}", 404)

    # ------------------------------------------------------------------ a model's requests, in seq_id order

    def enqueue(
        self,
        model: Model,
        seq: int | None,
        body: bytes,
        start: Callable[[], "Future[Any]"],
        encode: Callable[[Any], Payload],
    ) -> Promise:
        """Run `start` in its turn; the same seq_id and body again returns the same promise."""
        if seq is not None and seq in model.promises:
            promise, before = model.promises[seq]
            if before != body:
                raise RequestError(f"model {model.id}: seq_id {seq} was used before for another request", 409 + 13)
            return promise
        if seq is not None and seq < model.next_seq:
            raise RequestError(f"model {model.id}: seq_id {seq} is over; the next one is {model.next_seq}")
        promise = self.promises.create(model.session)

        def begin() -> None:
            try:
                self.promises.follow(promise, start(), encode)
            except Exception as error:
                self.promises.fail_with(promise, error)

        if seq is None:
            begin()
            return promise
        model.promises[seq] = (promise, body)
        model.held[seq] = (time.monotonic(), begin, promise)
        self._release_held(model, None)
        for old in sorted(model.promises)[:-256]:
            if old:
                del model.promises[old]
        return promise

    def skip(self, model_id: str, seq: int | None) -> None:
        """A request that was refused has still had its turn."""
        model = self.models.get(model_id)
        if model is not None and seq is not None and seq == model.next_seq:
            model.next_seq += 1
            self._release_held(model, None)

    def _release_held(self, model: Model, now: float | None) -> None:
        while model.next_seq in model.held:
            _, begin, _ = model.held.pop(model.next_seq)
            model.next_seq += 1
            begin()
        if now is None or not model.held:
            return
        seq = min(model.held)
        since, _, promise = model.held[seq]
        if now - since > self.limits.out_of_order_seconds:
            del model.held[seq]
            self.promises.fail(promise, f"seq_id {seq} waited for seq_id {model.next_seq}, which never came", "user")

    # ------------------------------------------------------------------ training

    def forward_backward(self, body: bytes) -> Promise:
        message = wire_training.parse_forward_backward(body)
        model = self.model(message.model_id)
        seq = message.seq_id or None
        try:
            message, data = wire_training.decode_forward_backward(body, self.network.shape, self.limits)
        except RequestError:
            self.skip(message.model_id, seq)
            raise
        config = wire_training.loss_config(message)

        def start() -> "Future[Any]":
            work = Pass(self.network, model.ready(), data, message.loss_fn, config, forward_only=message.forward_only)
            return self.engine.run(work.steps(self.limits.train_tokens), lambda: work.outcome)

        return self.enqueue(
            model, seq, body, start, lambda outcome: Payload(wire_training.encode_forward_backward(outcome), PROTOBUF)
        )

    def optim_step(self, body: Fields, raw: bytes) -> Promise:
        model = self.model(body.text("model_id"))
        seq = body.optional_integer("seq_id", low=1)
        try:
            params = wire_training.decode_adam(body)
        except RequestError:
            self.skip(model.id, seq)
            raise

        def step() -> dict[str, Any]:
            adam_step(model.ready(), params)
            return {"metrics": {}}

        return self.enqueue(model, seq, raw, lambda: self.engine.run(iter(()), step), _json)

    def save_weights(self, body: Fields, raw: bytes) -> Promise:
        return self._save(body, raw, sampler=False)

    def save_weights_for_sampler(self, body: Fields, raw: bytes) -> Promise:
        if body.data.get("kind", "snapshot") not in ("snapshot", None):
            model, seq = body.text("model_id"), body.optional_integer("seq_id", low=1)
            self.skip(model, seq)
            raise RequestError(
                "save_weights_for_sampler: kind 'inflight' is not served: here a sampler's weights never move"
            )
        return self._save(body, raw, sampler=True)

    def _save(self, body: Fields, raw: bytes, *, sampler: bool) -> Promise:
        model = self.model(body.text("model_id"))
        seq = body.optional_integer("seq_id", low=1)
        try:
            name = body.optional_text("path")
            ttl = body.optional_integer("ttl_seconds", low=1, high=315_576_000)
            overwrite = body.flag("overwrite", False)
            metadata = body.data.get("user_metadata")
            metadata = metadata if isinstance(metadata, dict) else None
            number = body.optional_integer("sampling_session_seq_id", low=0)
        except RequestError:
            self.skip(model.id, seq)
            raise

        def write() -> dict[str, Any]:
            adapter = model.ready()
            if sampler and name is None:
                version = f"{model.id}#{uuid.uuid4().hex}"
                return {"snapshot": adapter.freeze(version, self.network.dtype)}
            checkpoint = self.store.save(
                adapter,
                model.id,
                "sampler_weights" if sampler else "weights",
                name if name is not None else f"{seq or adapter.steps:06d}",
                self.model_name,
                ttl_seconds=ttl,
                overwrite=overwrite or sampler,
                user_metadata=metadata,
            )
            kind = "save_weights_for_sampler" if sampler else "save_weights"
            return {"path": checkpoint.path, "type": kind}

        def encode(outcome: dict[str, Any]) -> Payload:
            if "snapshot" in outcome:
                sampler_id = f"{model.session}:sample:{len(self.samplers) if number is None else number}"
                self._add_sampler(Sampler(sampler_id, model.session, None, outcome["snapshot"]))
                return _json({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})
            return _json(outcome)

        return self.enqueue(model, seq, raw, lambda: self.engine.run(iter(()), write), encode)

    def load_weights(self, body: Fields, raw: bytes) -> Promise:
        if body.data.get("model_id") is None:
            return self.load_new_model(body)
        model = self.model(body.text("model_id"))
        seq = body.optional_integer("seq_id", low=1)
        try:
            path, optimizer = body.text("path"), body.flag("optimizer", False)
            self.store.parse(path)
        except RequestError:
            self.skip(model.id, seq)
            raise

        def load() -> dict[str, str]:
            checkpoint = self.store.find(path)
            self.store.load_into(model.ready(), checkpoint, optimizer=optimizer)
            return {"path": checkpoint.path, "model_id": model.id, "type": "load_weights"}

        return self.enqueue(model, seq, raw, lambda: self.engine.run(iter(()), load), _json)

    # ------------------------------------------------------------------ sampling

    def create_sampling_session(self, body: Fields) -> dict[str, Any]:
        session = self.session(body.text("session_id"))
        sampler_id = f"{session.id}:sample:{body.integer('sampling_session_seq_id', low=0)}"
        if sampler_id not in self.samplers:
            path = body.optional_text("model_path")
            self._add_sampler(
                Sampler(sampler_id, session.id, path, self._weights(path, body.optional_text("base_model")))
            )
        return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}

    def _weights(self, path: str | None, base_model: str | None) -> Snapshot:
        if path is None:
            if base_model is None:
                raise RequestError("one of model_path and base_model must be given")
            self._check_base(base_model)
            return BASE
        checkpoint = self.store.find(path)
        self._check_base(checkpoint.base_model)
        version = f"{checkpoint.path}@{checkpoint.created!r}"
        for sampler in self.samplers.values():
            if sampler.snapshot.version == version:
                return sampler.snapshot
        return self.store.snapshot(checkpoint, self.network.targets, self.network.dtype)

    def _add_sampler(self, sampler: Sampler) -> None:
        self.samplers[sampler.id] = sampler
        while len(self.samplers) > self.limits.samplers:
            self.samplers.popitem(last=False)

    def sampler(self, sampler_id: str) -> Sampler:
        sampler = self.samplers.get(sampler_id)
        if sampler is None:
            raise RequestError(f"there is no sampling session {sampler_id!r} (evicted, or its session finished)", 404)
        self.session(sampler.session)
        self.samplers.move_to_end(sampler_id)
        return sampler

    def sample(self, body: Fields, raw: bytes) -> Promise:
        """Promise samples and scores; the same (sampling session, seq_id) and body returns the same promise."""
        sampler = self.sampler(body.text("sampling_session_id"))
        seq = body.optional_integer("seq_id", low=0)
        if seq is not None and seq in sampler.promises:
            promise, before = sampler.promises[seq]
            if before != raw:
                raise RequestError(f"{sampler.id}: seq_id {seq} was used before for another request", 422)
            return promise
        shape = self.network.shape
        prompt = wire_sampling.decode_prompt(body, shape)
        params = wire_sampling.decode_sampling_params(body, prompt, shape, secrets.randbits(63))
        scoring = wire_sampling.decode_scoring(body, prompt, params, self.limits)
        wire_sampling.check_targets(scoring, shape)
        number = body.integer("num_samples", 1, low=1, high=self.limits.samples_per_request)
        top_k = body.integer("topk_sample_logprobs", 0, low=0, high=self.limits.top_logprobs)
        promise = self.promises.create(sampler.session)
        promise.answer["sample_sequence_ids"] = [f"{promise.id}:{index}" for index in range(number)]
        job = SampleJob(prompt, params, number, sampler.snapshot, scoring, top_k, Future())

        def cancel() -> None:
            job.cancelled = True

        promise.cancel = cancel
        self.promises.follow(
            promise, job.future, lambda result: Payload(wire_sampling.encode_sample(result, prompt, body), PROTOBUF)
        )
        if seq is not None:
            sampler.promises[seq] = (promise, raw)
            while len(sampler.promises) > self.limits.waiting_samples:
                sampler.promises.popitem(last=False)
        self.engine.submit(job)
        return promise


def _json(value: Any) -> Payload:
    return Payload(json.dumps(value).encode(), "application/json")
