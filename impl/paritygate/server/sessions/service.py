"""Everything behind the routes: sessions, training models, sampling sessions and promises, tied together."""

from datetime import UTC, datetime
from typing import Any

from paritygate.server.engine.loop import Engine
from paritygate.server.errors import RequestError
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
        self.trainers = Trainers(engine, store, self.promises, self.samplers, limits, self.end_silent)

    # ------------------------------------------------------------------ sessions

    def create_session(self, body: Fields) -> dict[str, Any]:
        if self.sessions.full:
            self.end_silent()
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
        for session_id in self.sessions.silent(self.limits.silent_seconds):
            self.promises.drop_samples(session_id)
        self.promises.expire(self.limits.session_seconds)
        self.trainers.fail_overdue()
        self.store.sweep()

    def end_silent(self) -> None:
        """Free what clients hold that have missed three heartbeats: somebody else needs it now."""
        for session_id in self.sessions.silent(self.limits.silent_seconds):
            self._forget(session_id)

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

    def all_checkpoints(self, limit: int, offset: int) -> dict[str, Any]:
        """Those of every run, newest first."""
        listed = self.store.listed()[::-1]
        page = [_describe(checkpoint) for checkpoint in listed[offset : offset + limit]]
        return {"checkpoints": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(listed)}}

    # ------------------------------------------------------------------ training runs

    def training_runs(self, limit: int, offset: int) -> dict[str, Any]:
        """The models that are alive and those that left checkpoints, the last used first."""
        by_run: dict[str, list[Checkpoint]] = {run: [] for run in self.trainers.models}
        for checkpoint in self.store.listed():
            by_run.setdefault(checkpoint.run, []).append(checkpoint)
        runs = sorted((self._run(*item) for item in by_run.items()), key=lambda r: r["last_request_time"], reverse=True)
        page = runs[offset : offset + limit]
        return {"training_runs": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)}}

    def training_run(self, run: str) -> dict[str, Any]:
        listed = self.store.listed(run)
        if not listed and run not in self.trainers.models:
            raise RequestError(f"there is no training run {run!r}: none is alive or has left a checkpoint", 404)
        return self._run(run, listed)

    def _run(self, run: str, checkpoints: list[Checkpoint]) -> dict[str, Any]:
        model, last = self.trainers.models.get(run), checkpoints[-1] if checkpoints else None
        used = [c.created for c in checkpoints] + ([] if model is None else [model.last_request])
        metadata = model.user_metadata if model is not None else last.run_metadata if last is not None else None
        rank = model.spec.rank if model is not None else last.rank if last is not None else None

        def newest(kind: str) -> dict[str, Any] | None:
            return next((_describe(c) for c in reversed(checkpoints) if c.kind == kind), None)

        return {
            "training_run_id": run,
            "base_model": self.model_name if last is None else last.base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": rank,
            "last_request_time": _stamp(max(used)),
            "last_checkpoint": newest("weights"),
            "last_sampler_checkpoint": newest("sampler_weights"),
            "user_metadata": metadata,
        }


_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": _stamp(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires is None else _stamp(checkpoint.expires),
    }
