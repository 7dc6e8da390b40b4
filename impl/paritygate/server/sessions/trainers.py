"""Training models: one adapter each, their requests run in seq_id order, a request repeated answered once."""

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paritygate.server.engine.loop import Engine
from paritygate.server.engine.training import Pass, adam_step
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model.lora import Adapter, LoraSpec, Snapshot
from paritygate.server.sessions.checkpoints import Checkpoint, Kind, Store
from paritygate.server.sessions.peft import check_exportable, write_adapter
from paritygate.server.sessions.promises import PROTOBUF, Payload, Promise, Promises, digest, json_payload
from paritygate.server.sessions.samplers import Samplers
from paritygate.server.wire.fields import Fields
from paritygate.server.wire.training import (
    check_optimizer,
    decode_adam,
    decode_data,
    decode_lora,
    encode_forward_backward,
    loss_config,
    parse_forward_backward,
)

GRADIENT_NORM = (
    "unclipped_grad_l2:mean"  # the hosted service's name (tinker-cookbook #331); it reports it with clipping
)
REMEMBERED = 256  # finished requests of a model that a repetition still finds
AHEAD = 10_000  # requests that may be under way: a seq_id beyond is a mistake, and nothing waits for those between


Steps = tuple[Iterator[None], Callable[[], Any]]


@dataclass(frozen=True)
class Work:
    """What a request does in its turn: `begin` gives its steps and their result, `encode` makes an answer of that."""

    begin: Callable[[], Steps]
    encode: Callable[[Any], Payload] = json_payload

    @staticmethod
    def at_once(function: Callable[[], Any], encode: Callable[[Any], Payload] = json_payload) -> "Work":
        """Work of one piece."""
        return Work(lambda: (iter(()), function), encode)


@dataclass
class Model:
    """One trainable adapter and the order of its requests; `waiting` are those that came before their turn."""

    id: str
    session: str
    spec: LoraSpec
    user_metadata: dict[str, str] | None = None
    last_request: float = field(default_factory=time.time)
    adapter: Adapter | None = None
    next_seq: int = 1
    promises: dict[int, tuple[Promise, bytes]] = field(default_factory=dict[int, tuple[Promise, bytes]])
    waiting: dict[int, tuple[float, Callable[[], None]]] = field(
        default_factory=dict[int, tuple[float, Callable[[], None]]]
    )

    def ready(self) -> Adapter:
        if self.adapter is None:
            raise RequestError(f"model {self.id} could not be created, so it cannot be used", 404)
        return self.adapter


class Trainers:
    """All training models of a server; used on its event loop only."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        promises: Promises,
        samplers: Samplers,
        limits: Limits,
        make_way: Callable[[], object],
    ) -> None:
        """`make_way` ends sessions whose clients have gone silent; it is called when every slot is taken."""
        self.engine = engine
        self.store = store
        self.promises = promises
        self.samplers = samplers
        self.limits = limits
        self.make_way = make_way
        self.models: dict[str, Model] = {}

    def get(self, model_id: str) -> Model:
        model = self.models.get(model_id)
        if model is None:
            raise RequestError(f"there is no model {model_id!r} (its session finished or expired)", 404)
        model.last_request = time.time()
        return model

    def unload(self, body: Fields, raw: bytes) -> Promise:
        """Promise that one model is gone: SDKs before 0.26 cannot finish a session. What it saved stays."""
        model = self.get(body.text("model_id"))
        self.models.pop(model.id)
        promise = self.promises.create(model.session)
        self.promises.fulfil(promise, json_payload({"model_id": model.id, "type": "unload_model"}))
        return promise

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
        check_optimizer(body)
        spec = decode_lora(body, self.limits)
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
        check_optimizer(body)
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
            self.make_way()
        if len(self.models) >= self.limits.adapters:
            raise RequestError(
                f"{self.limits.adapters} models are alive, which is this server's limit; finish a session"
            )
        model = Model(model_id, session, spec, body.strings("user_metadata"))
        self.models[model_id] = model
        return model

    def _first(self, model: Model, make: Callable[[], dict[str, str]]) -> Promise:
        promise = self.promises.create(model.session)
        model.promises[0] = (promise, b"")
        self.promises.follow(promise, self.engine.run(iter(()), make), json_payload)
        return promise

    # ------------------------------------------------------------------ requests of one model, in order

    def _in_turn(self, model: Model, seq: int | None, raw: bytes, prepare: Callable[[], Work]) -> Promise:
        """Check a request with `prepare` and queue its work in seq_id order; a repetition gets the first one's promise.

        A request that `prepare` refuses has had its turn: those after it must not wait for it. Raises RequestError if
        its seq_id was another request's, is long over or far ahead.
        """
        if seq is not None and seq in model.promises:
            promise, before = model.promises[seq]
            if before != digest(raw):
                raise RequestError(f"model {model.id}: seq_id {seq} was used before for another request", 422)
            return promise
        if seq is not None and seq < model.next_seq:
            raise RequestError(f"model {model.id}: seq_id {seq} is over; the next one is {model.next_seq}", 422)
        if seq is not None and seq > model.next_seq + AHEAD:
            raise RequestError(f"model {model.id}: seq_id {seq} is far ahead of the next one, {model.next_seq}", 422)
        try:
            work = prepare()
        except RequestError:
            if seq is not None:
                model.waiting[seq] = (time.monotonic(), lambda: None)
                self._release(model)
            raise
        return self._enqueue(model, seq, raw, work)

    def _enqueue(self, model: Model, seq: int | None, raw: bytes, work: Work) -> Promise:
        promise = self.promises.create(model.session)

        def begin() -> None:
            try:
                self.promises.follow(promise, self.engine.run(*work.begin()), work.encode)
            except Exception as error:
                self.promises.fail_with(promise, error)

        if seq is None:
            begin()
            return promise
        model.promises[seq] = (promise, digest(raw))
        model.waiting[seq] = (time.monotonic(), begin)
        self._release(model)
        for old in sorted(model.promises)[1:-REMEMBERED]:
            del model.promises[old]
        return promise

    def _release(self, model: Model) -> None:
        while model.next_seq in model.waiting:
            _, begin = model.waiting.pop(model.next_seq)
            model.next_seq += 1
            begin()

    def fail_overdue(self) -> None:
        """Fail what has waited too long for a seq_id that never came, with all that waits behind it; then go on.

        The requests that fail would have been computed on a state that lacks the missing one. The next seq_id is the
        first that was never seen, so the model serves its client again.
        """
        now = time.monotonic()
        for model in self.models.values():
            oldest = min((since for since, _ in model.waiting.values()), default=now)
            if now - oldest <= self.limits.out_of_order_seconds:
                continue
            missing = model.next_seq
            model.next_seq = max(model.waiting) + 1
            for seq in sorted(model.waiting.keys() & model.promises.keys()):
                message = f"seq_id {seq} waited for seq_id {missing}, which never came; the next is {model.next_seq}"
                self.promises.fail(model.promises[seq][0], message, "user")
            model.waiting.clear()

    # ------------------------------------------------------------------ the requests

    def forward_backward(self, body: bytes) -> Promise:
        message = parse_forward_backward(body)
        model = self.get(message.model_id)

        def prepare() -> Work:
            data, config = decode_data(message, self.engine.network.shape, self.limits), loss_config(message)

            def begin() -> Steps:
                network, only = self.engine.network, message.forward_only
                work = Pass(network, model.ready(), data, message.loss_fn, config, forward_only=only)
                return work.steps(self.limits.train_tokens), lambda: work.outcome

            return Work(begin, lambda done: Payload(encode_forward_backward(done), PROTOBUF))

        return self._in_turn(model, message.seq_id or None, body, prepare)

    def optim_step(self, body: Fields, raw: bytes) -> Promise:
        def prepare(model: Model, seq: int | None) -> Work:
            params = decode_adam(body)

            def step() -> dict[str, Any]:
                return {"metrics": {GRADIENT_NORM: adam_step(model.ready(), params)}}

            return Work.at_once(step)

        return self._json(body, raw, prepare)

    def save(self, body: Fields, raw: bytes) -> Promise:
        """Promise a saved state, Adam's moments included."""

        def prepare(model: Model, seq: int | None) -> Work:
            write = self._writer(body, model, "weights", seq)
            return Work.at_once(lambda: {"path": write(model.ready()).path, "type": "save_weights"})

        return self._json(body, raw, prepare)

    def save_external(self, body: Fields, raw: bytes) -> Promise:
        """Promise the files of a PEFT adapter, to be fetched by URL."""

        def prepare(model: Model, seq: int | None) -> Work:
            if body.data.get("age_encryption_recipients"):
                raise RequestError("age_encryption_recipients is not served: the files are written unencrypted")
            body.text("path")
            network = self.engine.network
            write = self._writer(body, model, "external_weights", seq, lambda f, a: write_adapter(f, a, network))

            def save() -> dict[str, Any]:
                check_exportable(model.ready(), network)
                saved = write(model.ready())
                return {"path": saved.path, "size_bytes": saved.size_bytes, "type": "save_weights_external"}

            return Work.at_once(save)

        return self._json(body, raw, prepare)

    def _writer(
        self,
        body: Fields,
        model: Model,
        kind: Kind,
        seq: int | None,
        export: Callable[[Path, Adapter], None] | None = None,
    ) -> Callable[[Adapter], Checkpoint]:
        base_model, metadata = self.samplers.model_name, model.user_metadata
        return self.store.writer(body, model.id, kind, base_model, seq, run_metadata=metadata, export=export)

    def save_for_sampler(self, body: Fields, raw: bytes) -> Promise:
        """Promise sampler weights: saved under a name, or frozen in memory as a new sampling session."""

        def prepare(model: Model, seq: int | None) -> Work:
            if body.data.get("kind") not in ("snapshot", None):
                raise RequestError("kind 'inflight' is not served: here the weights of a sampler never move")
            write = self._writer(body, model, "sampler_weights", seq)
            number = body.optional_integer("sampling_session_seq_id", low=0)
            if body.optional_text("path") is not None:
                return Work.at_once(lambda: {"path": write(model.ready()).path, "type": "save_weights_for_sampler"})
            if number is None:
                raise RequestError("save_weights_for_sampler needs a path or a sampling_session_seq_id")

            def freeze() -> Snapshot:
                return model.ready().freeze(f"{model.id}#{uuid.uuid4().hex}")

            def encode(snapshot: Snapshot) -> Payload:
                sampler = self.samplers.add(f"{model.session}:sample:{number}", model.session, None, snapshot)
                return json_payload({"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"})

            return Work.at_once(freeze, encode)

        return self._json(body, raw, prepare)

    def load(self, body: Fields, raw: bytes) -> Promise:
        """Promise to set a model to a saved state."""

        def prepare(model: Model, seq: int | None) -> Work:
            if (seq or model.next_seq) != 1:  # as the hosted service answers, design/032
                raise RequestError(
                    f"LoadWeights is not permitted with seq_id {seq or model.next_seq}: a state is loaded by a model's "
                    "first request only; create a new training client from the state"
                )
            path, optimizer = body.text("path"), body.flag("optimizer", False)
            self.store.parse(path)

            def load() -> dict[str, str]:
                self.store.load_into(model.ready(), self.store.find(path), optimizer=optimizer)
                return {"path": path, "model_id": model.id, "type": "load_weights"}

            return Work.at_once(load)

        return self._json(body, raw, prepare)

    def _json(self, body: Fields, raw: bytes, prepare: Callable[[Model, int | None], Work]) -> Promise:
        model, seq = self.get(body.text("model_id")), body.optional_integer("seq_id", low=1)
        return self._in_turn(model, seq, raw, lambda: prepare(model, seq))
