"""Everything behind the routes: sessions, training models, sampling sessions and promises, tied together."""

from datetime import UTC, datetime
from typing import Any

from paritygate.server.engine.loop import Engine
from paritygate.server.limits import Limits
from paritygate.server.sessions.checkpoints import Checkpoint, Store
from paritygate.server.sessions.promises import Promise, Promises
from paritygate.server.sessions.samplers import Sampler, Samplers
from paritygate.server.sessions.session import Sessions
from paritygate.server.sessions.trainers import Model, Trainers
from paritygate.server.wire.fields import Fields


class Service:
    """The state of one server; every method runs on its event loop."""

    def __init__(self, engine: Engine, store: Store, limits: Limits, model_name: str) -> None:
        self.engine = engine
        self.store = store
        self.limits = limits
        self.model_name = model_name
        self.routes: list[tuple[str, str]] = []
        self.promises = Promises(limits)
        self.sessions = Sessions(limits.sessions)
        self.samplers = Samplers(engine, store, self.promises, limits, model_name)
        self.trainers = Trainers(engine, store, self.promises, self.samplers, limits)

    # ------------------------------------------------------------------ sessions

    def create_session(self, body: Fields) -> dict[str, Any]:
        session = self.sessions.create(body.strings("user_metadata"))
        return {"type": "create_session", "session_id": session.id}

    def heartbeat(self, body: Fields) -> dict[str, Any]:
        self.sessions.get(body.text("session_id"))
        return {"type": "session_heartbeat"}

    def finish_session(self, session_id: str) -> None:
        """End a session and free what it owns; again for a finished one does nothing."""
        if session_id not in self.sessions.finished:
            self.sessions.get(session_id)
            self._forget(session_id)

    def get_session(self, session_id: str) -> dict[str, Any]:
        session = self.sessions.get(session_id)
        return {
            "training_run_ids": [m.id for m in self.trainers.models.values() if m.session == session_id],
            "sampler_ids": self.samplers.of_session(session_id),
            "user_metadata": session.user_metadata,
        }

    def reap(self) -> None:
        """Free what vanished clients left: silent sessions, old answers, requests that wait for one that never came."""
        for session_id in self.sessions.silent(self.limits.session_seconds):
            self._forget(session_id)
        self.promises.expire(self.limits.session_seconds)
        self.trainers.fail_overdue()
        self.store.sweep()

    def _forget(self, session_id: str) -> None:
        self.promises.drop_session(session_id)
        self.trainers.forget(session_id)
        self.samplers.forget(session_id)
        self.sessions.end(session_id)

    # ------------------------------------------------------------------ models and samplers, through their session

    def model(self, body: Fields) -> Model:
        model = self.trainers.get(body.text("model_id"))
        self.sessions.get(model.session)
        return model

    def sampler(self, sampler_id: str) -> Sampler:
        sampler = self.samplers.get(sampler_id)
        self.sessions.get(sampler.session)
        return sampler

    def get_info(self, body: Fields) -> dict[str, Any]:
        model, network = self.model(body), self.engine.network
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {
                "arch": network.arch,
                "model_name": self.model_name,
                "tokenizer_id": str(network.folder),
            },
            "is_lora": True,
            "lora_rank": model.spec.rank,
            "model_name": self.model_name,
        }

    def create_model(self, body: Fields, raw: bytes) -> Promise:
        return self.trainers.create(self.sessions.get(body.text("session_id")).id, body)

    def load_weights(self, body: Fields, raw: bytes) -> Promise:
        if body.data.get("model_id") is None:
            return self.trainers.create_from_state(self.sessions.get(body.text("session_id")).id, body)
        return self.trainers.load(body, raw)

    def create_sampling_session(self, body: Fields) -> dict[str, Any]:
        sampler = self.samplers.create(self.sessions.get(body.text("session_id")).id, body)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def sample(self, body: Fields, raw: bytes) -> Promise:
        return self.samplers.sample(self.sampler(body.text("sampling_session_id")), body, raw)

    # ------------------------------------------------------------------ checkpoints

    def weights_info(self, body: Fields) -> dict[str, Any]:
        checkpoint = self.store.find(body.text("tinker_path"))
        return {
            "base_model": checkpoint.base_model,
            "is_lora": True,
            "lora_rank": checkpoint.rank,
            "train_attn": checkpoint.attn,
            "train_mlp": checkpoint.mlp,
            "train_unembed": checkpoint.unembed,
        }

    def checkpoints(self, run: str) -> dict[str, Any]:
        return {"checkpoints": [_describe(checkpoint) for checkpoint in self.store.listed(run)]}


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    def stamp(seconds: float | None) -> str | None:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()

    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": "training" if checkpoint.kind == "weights" else "sampler",
        "time": stamp(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": stamp(checkpoint.expires),
    }
