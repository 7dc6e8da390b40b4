"""Somebody else's service: the scripted models behind HTTP as the SDK 0.38 speaks it, with the faults of services.

It shares no code with the embedded server. Noise, slow models, refused and lost requests, a health route that fails
while work goes on: `Faults` says which; what a client did is kept in `requests`, `saves` and `deleted`.
"""

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import uvicorn
import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as pb

from paritygate.backend import Datum
from tests.scripted_service import (
    JUDGE,
    POLICY,
    USER,
    Script,
    ScriptedSampler,
    ScriptedService,
    ScriptedTrainer,
    digest,
)

KEY = "tml-foreign"
PROTOBUF = "application/x-protobuf"
_DTYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}


@dataclasses.dataclass
class Faults:
    """What goes wrong. Kinds of request: the last part of the path; a score is `score`, and the wait for an answer is
    `result:` and the kind that promised it. `status(kind, n)` answers the n-th request of a kind, None lets it through.
    """

    status: Callable[[str, int], int | None] = lambda kind, n: None
    seconds: Callable[[str], float] = lambda model: 0.0  # how long a sample or score of a model takes
    unhealthy: tuple[float, float] = (0.0, 0.0)  # the health route answers 503 between these seconds of its life
    models: dict[str, dict[str, Any]] = dataclasses.field(
        default_factory=lambda: {
            POLICY: {"max_context_length": 32768, "trainable": True, "sampleable": True},
            USER: {"max_context_length": 32768, "trainable": False, "sampleable": True},
            JUDGE: {"max_context_length": 131072, "trainable": False, "sampleable": True},
        }
    )
    detail: str = "injected"  # what an injected refusal says
    headers: dict[str, str] = dataclasses.field(default_factory=dict)  # of an injected refusal
    takes_limits: bool = True  # knows ttl_seconds; a service that does not refuses it with `status_of_limits`
    status_of_limits: int = 422
    scores_the_end: bool = True  # knows prompt_logprobs_last_n; an older service scores everything without a word
    poll: float = 5.0  # seconds that the wait for an answer is held open before it says 408


class ForeignService:
    """Serves on 127.0.0.1 in a thread of its own, as a context manager; `url` and KEY are its address and key."""

    def __init__(self, script: Script | None = None, faults: Faults | None = None) -> None:
        self.scripted = ScriptedService(script)
        self.faults = faults or Faults()
        self.requests: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.saves: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.trainers: dict[str, ScriptedTrainer] = {}
        self.samplers: dict[str, ScriptedSampler] = {}
        self.ranks: dict[str, int] = {}
        self._promises: dict[str, tuple[str, asyncio.Task[tuple[bytes, str]]]] = {}
        self._sent: dict[tuple[str, int], str] = {}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> "ForeignService":
        self._started = time.monotonic()
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)

    # ------------------------------------------------------------------ routes

    def _app(self) -> Starlette:
        prefix = "/api/v1/"
        config = {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False}
        answers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "client/config": lambda body: config,
            "client/dynamic_config": lambda body: {},
            "create_session": lambda body: {"type": "create_session", "session_id": uuid.uuid4().hex},
            "session_heartbeat": lambda body: {"type": "session_heartbeat"},
            "telemetry": lambda body: {"status": "accepted"},
            "get_info": self._info,
            "create_sampling_session": self._sampling_session,
            "create_model": self._create_model,
            "load_weights": self._load,
            "optim_step": self._optim_step,
            "save_weights": lambda body: self._save(body, "weights"),
            "save_weights_for_sampler": lambda body: self._save(body, "sampler_weights"),
            "asample": self._asample,
            "cancel_future": lambda body: {},
            "weights_info": lambda body: {"base_model": POLICY, "is_lora": True, "lora_rank": 32},
        }
        routes = [Route(prefix + path, self._post(path, answer), methods=["POST"]) for path, answer in answers.items()]
        routes += [
            Route(prefix + "healthz", self._healthz),
            Route(prefix + "get_server_capabilities", self._capabilities),
            Route(prefix + "samplers/{id}", self._get_sampler),
            Route(prefix + "sessions/{id}/finish", self._finish, methods=["POST"]),
            Route(prefix + "forward_backward", self._forward_backward, methods=["POST"]),
            Route(prefix + "retrieve_future", self._retrieve, methods=["POST"]),
            Route(prefix + "training_runs/{run}/checkpoints", self._list),
            Route(prefix + "training_runs/{run}/checkpoints/{kind}/{name}", self._delete, methods=["DELETE"]),
        ]
        return Starlette(routes=routes)

    def _post(self, path: str, answer: Callable[[dict[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            body = await request.json() if await request.body() else {}
            kind = "score" if path == "asample" and body.get("prompt_logprobs") else path.rsplit("/", 1)[-1]
            return self._refusal(request, kind) or self._no_limit(body) or JSONResponse(answer(body))

        return handler

    def _refusal(self, request: Request, kind: str) -> Response | None:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"detail": "who are you?"}, 401)
        number, self.requests[kind] = self.requests[kind], self.requests[kind] + 1
        status = self.faults.status(kind, number)
        if status is None:
            return None
        self.refused[f"{kind} {status}"] += 1
        return JSONResponse({"detail": self.faults.detail}, status, self.faults.headers)

    def _no_limit(self, body: dict[str, Any]) -> Response | None:
        if self.faults.takes_limits or body.get("ttl_seconds") is None:
            return None
        self.refused[f"limit {self.faults.status_of_limits}"] += 1
        return JSONResponse({"detail": "unknown field ttl_seconds"}, self.faults.status_of_limits)

    async def _healthz(self, request: Request) -> Response:
        begin, end = self.faults.unhealthy
        if begin <= time.monotonic() - self._started < end:
            self.refused["healthz 503"] += 1
            return JSONResponse({"detail": "draining"}, 503)
        return self._refusal(request, "healthz") or JSONResponse({"status": "ok"})

    async def _capabilities(self, request: Request) -> Response:
        models = [{"model_name": name, **facts} for name, facts in self.faults.models.items()]
        return self._refusal(request, "capabilities") or JSONResponse({"supported_models": models})

    async def _get_sampler(self, request: Request) -> Response:
        sampler = self.samplers[request.path_params["id"]]
        identity = {"sampler_id": request.path_params["id"], "base_model": sampler.model, "model_path": sampler.path}
        return self._refusal(request, "samplers") or JSONResponse(identity)

    async def _finish(self, request: Request) -> Response:
        return self._refusal(request, "finish") or Response(status_code=204)

    async def _list(self, request: Request) -> Response:
        trainer = self.trainers.get(request.path_params["run"])
        paths = [] if trainer is None else await self.scripted.checkpoints(trainer.model_id)
        listed = [
            {
                "checkpoint_id": path.split("/", 3)[3],
                "checkpoint_type": "sampler" if "/sampler_weights/" in path else "training",
                "time": "2026-12-01T00:00:00Z",
                "tinker_path": path,
            }
            for path in paths
        ]
        return self._refusal(request, "list") or JSONResponse({"checkpoints": listed})

    async def _delete(self, request: Request) -> Response:
        where = request.path_params
        refusal = self._refusal(request, "delete")
        if refusal is not None:
            return refusal
        path = f"tinker://{where['run']}/{where['kind']}/{where['name']}"
        if self.scripted.saved.pop(path, None) is None:
            return JSONResponse({"detail": f"there is no {path}"}, 404)
        self.deleted.append(path)
        return Response(status_code=204)

    # ------------------------------------------------------------------ promises

    def _promise(self, kind: str, work: Awaitable[tuple[bytes, str]], sent: tuple[str, int] | None = None) -> Any:
        """The same request sent again, as after a lost answer, is the same work."""
        if sent is not None and sent in self._sent:
            asyncio.ensure_future(work).cancel()
            return {"request_id": self._sent[sent]}
        name = uuid.uuid4().hex
        self._promises[name] = (kind, asyncio.ensure_future(work))
        if sent is not None:
            self._sent[sent] = name
        return {"request_id": name}

    async def _retrieve(self, request: Request) -> Response:
        kind, task = self._promises[(await request.json())["request_id"]]
        refusal = self._refusal(request, f"result:{kind}")
        if refusal is not None:
            return refusal
        await asyncio.wait({task}, timeout=self.faults.poll)
        if not task.done():
            return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
        error = task.exception()
        if error is not None:
            return JSONResponse({"error": f"{type(error).__name__}: {error}", "category": "server"})
        body, media_type = task.result()
        return Response(body, media_type=media_type)

    # ------------------------------------------------------------------ training

    def _create_model(self, body: dict[str, Any]) -> Any:
        async def work() -> tuple[bytes, str]:
            lora = body.get("lora_config") or {}
            trainer = await self.scripted.training(body["base_model"], lora.get("rank", 32), lora.get("seed") or 0)
            return self._add(body, trainer, lora.get("rank", 32), "create_model")

        return self._promise("create_model", work())

    def _add(self, body: dict[str, Any], trainer: ScriptedTrainer, rank: int, kind: str) -> tuple[bytes, str]:
        name = f"{body['session_id']}:train:{body['model_seq_id']}"
        self.trainers[name], self.ranks[name] = trainer, rank
        return _json({"model_id": name, "type": kind, "path": body.get("path")})

    def _load(self, body: dict[str, Any]) -> Any:
        async def work() -> tuple[bytes, str]:
            if body.get("model_id") is None:
                trainer = await self.scripted.restored(body["path"], optimizer=bool(body.get("optimizer")))
                return self._add(body, trainer, 32, "load_weights")
            await self.trainers[body["model_id"]].load(body["path"])
            return _json({"path": body["path"], "model_id": body["model_id"], "type": "load_weights"})

        return self._promise("load_weights", work())

    def _info(self, body: dict[str, Any]) -> Any:
        model = self.trainers[body["model_id"]].base_model
        data = {"arch": "foreign", "model_name": model, "tokenizer_id": None}
        rank = self.ranks[body["model_id"]]
        return {
            "type": "get_info",
            "model_id": body["model_id"],
            "model_data": data,
            "is_lora": True,
            "lora_rank": rank,
        }

    async def _forward_backward(self, request: Request) -> Response:
        refusal = self._refusal(request, "forward_backward")
        if refusal is not None:
            return refusal
        raw = await request.body()
        if request.headers.get("content-encoding") == "zstd":
            raw = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
        message = pb.ForwardBackwardRequest.FromString(raw)
        data = [_datum(datum) for datum in message.data]

        async def work() -> tuple[bytes, str]:
            trainer = self.trainers[message.model_id]
            run = trainer.forward if message.forward_only else trainer.forward_backward
            passed = await run(data, message.loss_fn)
            out = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
            out.metrics["loss:sum"] = passed.loss
            rows = [np.asarray(row, "<f4").tobytes() for row in passed.logprobs]
            record = out.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
            offsets = np.cumsum([0, *map(len, rows)]).astype("<i8").tobytes()
            record.fields["logprobs"].CopyFrom(
                pb.BatchedTensor(data=b"".join(rows), offsets=offsets, dtype=pb.DTYPE_FLOAT32, trailing_shape=[])
            )
            return out.SerializeToString(), PROTOBUF

        sent = (message.model_id, message.seq_id)
        return JSONResponse(self._promise("forward_backward", work(), sent))

    def _optim_step(self, body: dict[str, Any]) -> Any:
        async def work() -> tuple[bytes, str]:
            adam = body["adam_params"]
            numbers = (float(adam[name]) for name in ("learning_rate", "beta1", "beta2", "eps"))
            return _json({"metrics": await self.trainers[body["model_id"]].optim_step(*numbers)})

        return self._promise("optim_step", work(), (body["model_id"], body["seq_id"]))

    def _save(self, body: dict[str, Any], kind: str) -> Any:
        async def work() -> tuple[bytes, str]:
            trainer = self.trainers[body["model_id"]]
            path = await trainer.save(f"{kind}/{body['path']}")
            self.saves.append({"path": path, "kind": kind, "ttl_seconds": body.get("ttl_seconds")})
            return _json({"path": path, "type": "save_weights" + ("_for_sampler" if kind != "weights" else "")})

        return self._promise("save", work(), (body["model_id"], body["seq_id"]))

    # ------------------------------------------------------------------ sampling

    def _sampling_session(self, body: dict[str, Any]) -> Any:
        name, path = uuid.uuid4().hex, body.get("model_path")
        weights = self.scripted.saved[path] if path else digest(body["base_model"])
        self.samplers[name] = ScriptedSampler(self.scripted, POLICY if path else body["base_model"], weights, path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _asample(self, body: dict[str, Any]) -> Any:
        sampler = self.samplers[body["sampling_session_id"]]
        tokens = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        params = body["sampling_params"]
        scoring = bool(body.get("prompt_logprobs"))
        context = self.faults.models[sampler.model]["max_context_length"]

        async def work() -> tuple[bytes, str]:
            await asyncio.sleep(self.faults.seconds(sampler.model))
            if len(tokens) + params.get("max_tokens", 1) > context + scoring:
                raise ValueError(f"{len(tokens)} tokens and {params.get('max_tokens')} more are over {context}")
            message = pb.SampleResponse()
            if scoring:
                last = body.get("prompt_logprobs_last_n") if self.faults.scores_the_end else None
                scored = [np.nan if value is None else value for value in await sampler.score(tokens, last)]
                message.prompt_logprobs = np.asarray(scored, "<f4").tobytes()
                message.sequences.add(tokens=np.zeros(1, "<i4").tobytes(), logprobs=np.zeros(1, "<f4").tobytes())
                return message.SerializeToString(), PROTOBUF
            asked = {name: params[name] for name in ("max_tokens", "temperature", "seed", "stop", "top_p")}
            for sample in await sampler.sample(tokens, num_samples=body["num_samples"], **asked):
                message.sequences.add(
                    stop_reason=pb.STOP_REASON_STOP if sample.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
                    tokens=np.asarray(sample.tokens, "<i4").tobytes(),
                    logprobs=np.asarray(sample.logprobs, "<f4").tobytes(),
                )
            return message.SerializeToString(), PROTOBUF

        promise = self._promise("score" if scoring else "asample", work())
        return promise | {"sample_sequence_ids": [uuid.uuid4().hex for _ in range(body["num_samples"])]}


def _json(value: Any) -> tuple[bytes, str]:
    return JSONResponse(value).body, "application/json"


def _datum(message: "pb.Datum") -> Datum:
    """The full sequence and its shifted inputs, from the wire."""
    tokens = [int(t) for chunk in message.model_input for t in np.frombuffer(chunk.encoded_text.tokens, "<i4")]
    inputs = {name: _tensor(tensor) for name, tensor in message.loss_fn_inputs.items()}
    return Datum((*tokens, int(np.ravel(inputs["target_tokens"])[-1])), inputs)


def _tensor(message: "pb.Tensor") -> Any:
    shape = tuple(message.shape)
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        out = np.zeros(shape, _DTYPES[message.dtype])
        rows = np.repeat(np.arange(shape[0]), np.diff(np.frombuffer(csr.crow_indices, "<i8")))
        out[rows, np.frombuffer(csr.col_indices, "<i8")] = np.frombuffer(csr.values, _DTYPES[message.dtype])
        return out.tolist()
    return np.frombuffer(message.dense, _DTYPES[message.dtype]).reshape(shape or -1).tolist()


@contextlib.contextmanager
def serving(script: Script | None = None, **faults: Any) -> Any:
    """A foreign service with these faults, for a `with`."""
    with ForeignService(script, Faults(**faults)) as service:
        yield service
