"""Sampling sessions: frozen weights under an id, kept within a memory bound, and the requests that use them."""

import os
import secrets
import uuid
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError

from paritygate.server.engine.jobs import SampleJob
from paritygate.server.engine.loop import Engine
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model.lora import BASE, Snapshot
from paritygate.server.sessions.checkpoints import Store
from paritygate.server.sessions.promises import PROTOBUF, Payload, Promise, Promises, digest
from paritygate.server.wire.fields import Fields
from paritygate.server.wire.sampling import (
    check_targets,
    decode_prompt,
    decode_sampling_params,
    decode_scoring,
    encode_sample,
)


@dataclass
class Sampler:
    """One sampling session. `snapshot` is None while its weights are on disk only: in `model_path` or in `spilled`."""

    id: str
    session: str
    model_path: str | None
    version: str
    snapshot: Snapshot | None
    spilled: Path | None = None
    promises: "OrderedDict[int, tuple[Promise, bytes]]" = field(default_factory=OrderedDict[int, tuple[Promise, bytes]])


class Samplers:
    """All sampling sessions of a server; used on its event loop only."""

    def __init__(self, engine: Engine, store: Store, promises: Promises, limits: Limits, model_name: str) -> None:
        self.engine = engine
        self.store = store
        self.promises = promises
        self.limits = limits
        self.model_name = model_name
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()

    def __len__(self) -> int:
        return len(self._samplers)

    def create(self, session: str, body: Fields) -> Sampler:
        """The sampler of a create_sampling_session request; the same request again finds the same one."""
        sampler_id = f"{session}:sample:{body.integer('sampling_session_seq_id', low=0)}"
        existing = self._samplers.get(sampler_id)
        if existing is not None:
            return existing
        path, base_model = body.optional_text("model_path"), body.optional_text("base_model")
        if path is None and base_model is None:
            raise RequestError("one of model_path and base_model must be given")
        if base_model is not None:
            self.check_base(base_model)
        snapshot = BASE if path is None else self._from_path(path)
        return self.add(sampler_id, session, path, snapshot)

    def add(self, sampler_id: str, session: str, path: str | None, snapshot: Snapshot) -> Sampler:
        sampler = Sampler(sampler_id, session, path, snapshot.version, snapshot)
        self._samplers[sampler_id] = sampler
        self._evict()
        return sampler

    def get(self, sampler_id: str) -> Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise RequestError(f"there is no sampling session {sampler_id!r} (its session finished or expired)", 404)
        self._samplers.move_to_end(sampler_id)
        return sampler

    def forget(self, session: str) -> None:
        for sampler in [s for s in self._samplers.values() if s.session == session]:
            del self._samplers[sampler.id]
            if sampler.spilled is not None:
                sampler.spilled.unlink(missing_ok=True)

    def of_session(self, session: str) -> list[str]:
        return [s.id for s in self._samplers.values() if s.session == session]

    def check_base(self, name: str) -> None:
        """RequestError (404) unless `name` is the model that this server has, or the folder that it was loaded from."""
        folder = Path(name).is_absolute() and os.path.realpath(name) == os.path.realpath(self.engine.network.folder)
        if not folder and self.model_name not in (name, name.split(":", maxsplit=1)[0]):
            raise RequestError(f"base_model {name!r} is not served here; this server has {self.model_name!r}", 404)

    def of_model(self, model: str) -> Snapshot:
        """The weights that "NAME", a path of saved sampler weights, or "NAME;PATH" names, held by no session."""
        name, _, path = model.rpartition(";") if "tinker://" in model else (model, "", "")
        if name:
            self.check_base(name)
        if not path:
            return BASE
        checkpoint = self.store.find(path)
        sampler_id = f"openai:{checkpoint.version}"
        sampler = self._samplers.get(sampler_id) or self.add(sampler_id, "", path, self._from_path(path))
        self._samplers.move_to_end(sampler_id)
        return self._snapshot(sampler)

    def sample(self, sampler: Sampler, body: Fields, raw: bytes) -> Promise:
        """Promise samples and scores; the same (sampling session, seq_id) and body finds the same promise."""
        seq = body.optional_integer("seq_id", low=0)
        if seq is not None and seq in sampler.promises:
            promise, before = sampler.promises[seq]
            if before != digest(raw):
                raise RequestError(f"{sampler.id}: seq_id {seq} was used before for another request", 422)
            if not self.promises.gone(promise.id):  # else its client was told to send it again
                return promise
        shape = self.engine.network.shape
        prompt = decode_prompt(body, shape)
        params = decode_sampling_params(body, prompt, shape, secrets.randbits(63))
        scoring = decode_scoring(body, prompt, params, self.limits)
        check_targets(scoring, shape)
        if params.stop_strings and self.engine.decoder is None:
            raise RequestError("this model has no tokenizer, so stop must be token ids")
        number = body.integer("num_samples", 1, low=1, high=self.limits.samples_per_request)
        top_k = body.integer("topk_sample_logprobs", 0, low=0, high=self.limits.top_logprobs)
        if body.flag("record_stability_info", False):
            raise RequestError("record_stability_info is not served, since the loss stable_reinforce is not")
        if self.engine.waiting_jobs >= self.limits.waiting_samples:
            raise RequestError(f"{self.limits.waiting_samples} sample requests are waiting; try again later", 429)
        promise = self.promises.create(sampler.session)
        promise.answer["sample_sequence_ids"] = [f"{promise.id}:{index}" for index in range(number)]
        job = SampleJob(prompt, params, number, self._snapshot(sampler), scoring, top_k, Future())
        promise.cancel = job.cancel
        self.promises.follow(promise, job.future, lambda result: Payload(encode_sample(result, prompt, body), PROTOBUF))
        if seq is not None:
            sampler.promises[seq] = (promise, digest(raw))
            while len(sampler.promises) > self.limits.waiting_samples:
                sampler.promises.popitem(last=False)
        self.engine.submit(job)
        return promise

    def _from_path(self, path: str) -> Snapshot:
        checkpoint = self.store.find(path)
        self.check_base(checkpoint.base_model)
        for sampler in self._samplers.values():  # one copy in memory however many sampling sessions share it
            if sampler.version == checkpoint.version and sampler.snapshot is not None:
                return sampler.snapshot
        return self.store.snapshot(checkpoint, self.engine.network.targets)

    def _snapshot(self, sampler: Sampler) -> Snapshot:
        """The sampler's weights, read back from disk if they were evicted."""
        if sampler.snapshot is None:
            if sampler.spilled is not None:
                sampler.snapshot = self.store.unspill(sampler.spilled, sampler.version)
                sampler.spilled = None
            else:
                assert sampler.model_path is not None
                sampler.snapshot = self._from_path(sampler.model_path)
                if sampler.snapshot.version != sampler.version:
                    sampler.snapshot = None
                    raise RequestError(f"checkpoint {sampler.model_path} was overwritten: create a new sampler from it")
            self._evict()
        return sampler.snapshot

    def _evict(self) -> None:
        """Move the weights that were used longest ago to disk until the rest fits; the newest always stays."""
        sizes = {s.version: s.snapshot.bytes() for s in self._samplers.values() if s.snapshot is not None}
        total = sum(sizes.values())
        for sampler in list(self._samplers.values())[:-1]:
            if total <= self.limits.sampler_bytes:
                return
            if sampler.snapshot is None or not sampler.snapshot.pairs:
                continue
            if sampler.model_path is None:
                try:
                    sampler.spilled = self.store.spill(sampler.snapshot, uuid.uuid4().hex)
                except (OSError, SafetensorError):  # no room on disk either: memory holds what it must
                    return
            sampler.snapshot = None
            if not any(s.version == sampler.version and s.snapshot is not None for s in self._samplers.values()):
                total -= sizes[sampler.version]
