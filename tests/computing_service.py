"""The scripted foreign service, in front of a model that computes: short token ids are the tiny model's, with noise.

The scripted models answer what the protocol sends (Qwen3.5's control tokens lie far above), and the embedded server's
tiny model what a proof of the service sends: ids below its vocabulary, to the policy. Losses, gradients, Adam, states
and draws are then real ones, behind the same HTTP, faults and noise.
"""

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker.proto import tinker_public_pb2 as pb

from paritygate import server
from paritygate.server.limits import Limits
from tests.foreign_service import PROTOBUF, Faults, ForeignService
from tests.scripted_service import POLICY, Script, ScriptedSampler

VOCABULARY = 480  # of the tiny model


class Computed(bytes):
    """An answer of the tiny model, with its tokens by kind."""

    counts: dict[str, int]

    def __new__(cls, body: bytes, counts: dict[str, int]) -> "Computed":
        made = super().__new__(cls, body)
        made.counts = counts
        return made


class ComputingService(ForeignService):
    """As ForeignService; `computed` are the tokens of what the tiny model answered and a client got, by kind."""

    def __init__(self, script: Script | None = None, faults: Faults | None = None) -> None:
        super().__init__(script, faults)
        self.computed: Counter[str] = Counter()
        self._made: dict[str, tuple[str, dict[str, Any]]] = {}  # how each training client was asked for
        self._computes: dict[str, bool] = {}  # whether its first pass was for the tiny model
        self._clients: dict[str, asyncio.Task[str]] = {}
        self._sampling: dict[str, dict[str, Any]] = {}
        self._sessions: dict[str, asyncio.Task[str]] = {}
        self._paths: dict[str, str] = {}  # of states that the tiny model's server has, by their path here
        self._loop: asyncio.AbstractEventLoop | None = None  # of the thread that serves
        self._rng = np.random.default_rng(1)

    def __enter__(self) -> "ComputingService":
        limits = Limits(adapters=64, sessions=1000, session_seconds=1e6, silent_seconds=1e6)
        self._tiny = server.start("tiny", limits=limits)
        headers = {"X-API-Key": self._tiny.api_key}
        base = f"{self._tiny.base_url}/api/v1/"
        self._http = httpx.AsyncClient(base_url=base, headers=headers, timeout=60, trust_env=False)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result(timeout=10)
        super().__exit__(*error)
        self._tiny.stop()

    # ------------------------------------------------------------------ the tiny model's server

    async def _ask(self, path: str, body: dict[str, Any] | bytes) -> bytes:
        """Its answer, waited for where it is promised."""
        self._loop = asyncio.get_running_loop()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        media = PROTOBUF if isinstance(body, bytes) else "application/json"
        response = await self._http.post(path, content=raw, headers={"content-type": media})
        while response.status_code == 408 or (
            response.headers.get("content-type") == "application/json" and "request_id" in response.json()
        ):
            promise = response.json()["request_id"]
            response = await self._http.post("retrieve_future", json={"request_id": promise})
        if response.status_code != 200 or (
            response.headers.get("content-type") == "application/json" and "error" in response.json()
        ):
            raise ValueError(response.text)
        return response.content

    async def _session(self, name: str) -> str:
        """The session there that stands for one here."""
        if name not in self._sessions:
            opened = self._ask("create_session", {"tags": [], "sdk_version": "0.38.0", "type": "create_session"})
            self._sessions[name] = asyncio.ensure_future(_member(opened, "session_id"))
        return await asyncio.shield(self._sessions[name])

    async def _client(self, name: str) -> str:
        """The training client there that stands for one here, made when it is first needed."""
        if name not in self._clients:
            self._clients[name] = asyncio.ensure_future(self._make(name))
        return await asyncio.shield(self._clients[name])

    async def _make(self, name: str) -> str:
        path, body = self._made[name]
        body = body | {"session_id": await self._session(body["session_id"])}
        if path == "create_model":
            body |= {"base_model": self._tiny.model_name}
        else:
            body |= {"path": self._paths[body["path"]]}
        return await _member(self._ask(path, body), "model_id")

    async def _finish(self, request: Request) -> Response:
        opened = self._sessions.pop(request.path_params["id"], None)
        if opened is not None:
            await self._http.post(f"sessions/{await opened}/finish")
        return await super()._finish(request)

    async def _retrieve(self, request: Request) -> Response:
        _, task = self._promises[(await request.json())["request_id"]]
        response = await super()._retrieve(request)
        if response.status_code == 200 and task.exception() is None:
            self.computed.update(getattr(task.result()[0], "counts", {}))
        return response

    # ------------------------------------------------------------------ training

    def _create_model(self, body: dict[str, Any]) -> Any:
        self._made[f"{body['session_id']}:train:{body['model_seq_id']}"] = ("create_model", body)
        return super()._create_model(body)

    def _load(self, body: dict[str, Any]) -> Any:
        if body.get("model_id") is None:
            self._made[f"{body['session_id']}:train:{body['model_seq_id']}"] = ("load_weights", body)
        return super()._load(body)

    async def _forward_backward(self, request: Request) -> Response:
        message = pb.ForwardBackwardRequest.FromString(await request.body())
        chunks = [chunk.encoded_text.tokens for datum in message.data for chunk in datum.model_input]
        tokens = [int(token) for chunk in chunks for token in np.frombuffer(chunk, "<i4")]
        name = message.model_id
        if not self._computes.setdefault(name, max(tokens) < VOCABULARY):
            return await super()._forward_backward(request)
        refusal = self._refusal(request, "forward_backward")
        if refusal is not None:
            return refusal
        sent = (name, message.seq_id)

        async def work() -> tuple[bytes, str]:
            message.model_id = await self._client(name)
            out = pb.ForwardBackwardOutput.FromString(await self._ask("forward_backward", message.SerializeToString()))
            for record in out.loss_fn_outputs:
                record.fields["logprobs"].data = self._noisy(record.fields["logprobs"].data)
            kind = "prefill" if message.forward_only else "trained"
            return Computed(out.SerializeToString(), {kind: len(tokens)}), PROTOBUF

        return JSONResponse(self._promise("forward_backward", work(), sent))

    def _noisy(self, floats: bytes) -> bytes:
        values = np.frombuffer(floats, "<f4")
        return (values + self.scripted.script.noise * self._rng.standard_normal(len(values))).astype("<f4").tobytes()

    def _optim_step(self, body: dict[str, Any]) -> Any:
        if not self._computes.get(body["model_id"], False):
            return super()._optim_step(body)

        async def work() -> tuple[bytes, str]:
            sent = body | {"model_id": await self._client(body["model_id"])}
            return await self._ask("optim_step", sent), "application/json"

        return self._promise("optim_step", work(), (body["model_id"], body["seq_id"]))

    def _save(self, body: dict[str, Any], kind: str) -> Any:
        name = body["model_id"]
        path, origin = self._made[name]
        scripted = path == "load_weights" and origin["path"] not in self._paths
        if self._computes.get(name, not scripted) is False:
            return super()._save(body, kind)
        route = "save_weights" if kind == "weights" else "save_weights_for_sampler"

        async def work() -> tuple[bytes, str]:
            if body.get("path") is None:
                return await self._unnamed(body)
            path = await self.trainers[name].save(f"{kind}/{body['path']}")
            saved = await self._ask(route, body | {"model_id": await self._client(name)})
            self._paths[path] = json.loads(saved)["path"]
            self.saves.append({"path": path, "kind": kind, "ttl_seconds": body.get("ttl_seconds")})
            return json.dumps(json.loads(saved) | {"path": path}).encode(), "application/json"

        return self._promise("save", work(), (name, body["seq_id"]))

    async def _unnamed(self, body: dict[str, Any]) -> tuple[bytes, str]:
        """Weights for a sampler that have no path, only the sampling session that is opened with them."""
        saved = json.loads(
            await self._ask("save_weights_for_sampler", body | {"model_id": await self._client(body["model_id"])})
        )
        here = f"{body['model_id']}:sampler:{body['seq_id']}"
        there: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        there.set_result(saved["sampling_session_id"])
        self._sampling[here] = {"there": there}
        self.samplers[here] = ScriptedSampler(self.scripted, POLICY, 0, None)
        return json.dumps(saved | {"sampling_session_id": here}).encode(), "application/json"

    # ------------------------------------------------------------------ sampling

    def _sampling_session(self, body: dict[str, Any]) -> Any:
        made = super()._sampling_session(body)
        self._sampling[made["sampling_session_id"]] = body
        return made

    def _asample(self, body: dict[str, Any]) -> Any:
        here = body["sampling_session_id"]
        tokens = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        path = self._sampling[here].get("model_path")
        computes = self.samplers[here].model == POLICY and (path is None or path in self._paths)
        if not computes or max(tokens) >= VOCABULARY:
            return super()._asample(body)
        scoring = bool(body.get("prompt_logprobs"))

        async def work() -> tuple[bytes, str]:
            raw = await self._ask("asample", body | {"sampling_session_id": await self._sampler(here)})
            message = pb.SampleResponse.FromString(raw)
            for sequence in message.sequences:
                sequence.logprobs = self._noisy(sequence.logprobs)
            if message.prompt_logprobs:
                message.prompt_logprobs = self._noisy(message.prompt_logprobs)
            counts = {"prefill": len(tokens)}
            if not scoring:
                counts["sampled"] = sum(len(sequence.tokens) // 4 for sequence in message.sequences)
            return Computed(message.SerializeToString(), counts), PROTOBUF

        return self._promise("score" if scoring else "asample", work()) | {
            "sample_sequence_ids": [f"{here}-{number}" for number in range(body["num_samples"])]
        }

    async def _sampler(self, here: str) -> str:
        """The sampling session there that stands for one here."""
        body = self._sampling[here]
        if "there" not in body:
            path = body.get("model_path")
            of = {"base_model": self._tiny.model_name} if path is None else {"model_path": self._paths[path]}
            asked = {**body, "session_id": await self._session(body["session_id"])} | of
            body["there"] = asyncio.ensure_future(
                _member(self._ask("create_sampling_session", asked), "sampling_session_id")
            )
        return await asyncio.shield(body["there"])


async def _member(answer: Any, name: str) -> str:
    return str(json.loads(await answer)[name])
