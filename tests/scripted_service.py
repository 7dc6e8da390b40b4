"""A service that answers as Tinker does, with instant models: every logprob is a hash of weights, prefix and token.

Its weights are one integer that an optimiser step replaces by a digest of what was sent, so that equal histories give
equal weights and equal logprobs, bit for bit, and any difference shows. Everything that is sent to it is remembered.
It stands where a Backend would; foreign_service.py puts HTTP before it, for the real SDK.
"""

import dataclasses
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from paritygate.backend import BackendError, Datum, FwdBwd, Sample, ServiceDown
from paritygate.backend.vocabulary import offline
from tests.harmony_bytes import Bytes

POLICY, USER, JUDGE = "Qwen/Qwen3.5-4B", "Qwen/Qwen3-8B", "openai/gpt-oss-120b"
CALL = "<tool_call>\n<function=think>\n<parameter=thought>\nhm\n</parameter>\n</function>\n</tool_call>"


def mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64, elementwise on uint64."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def logprobs_of(weights: int, tokens: Sequence[int], scale: float = 1.0) -> list[float]:
    """A logprob (nats) a token that depends on the weights, the token and all before it; `scale` is its spread."""
    ids = np.asarray(tokens, np.uint64)
    with np.errstate(over="ignore"):
        places = mixed(ids * np.uint64(1_000_003) + np.arange(len(ids), dtype=np.uint64))
        prefix = np.cumsum(places, dtype=np.uint64)
    uniform = mixed(prefix ^ np.uint64(weights)).astype(np.float64) / 2.0**64
    return (-1.0 - scale * uniform).astype(np.float32).astype(float).tolist()


def digest(*parts: Any) -> int:
    """63 bits of a hash of anything that has a repr."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


@dataclasses.dataclass
class Script:
    """How the scripted models behave; a test changes one of these to make a gate fail."""

    gap: float = 1.0  # spread of logprobs: how far a teacher's context moves them
    frozen_gap: float | None = None  # the same for a sampler of a lane's initial weights
    scores: Callable[[int, int], list[float]] = lambda seed, length: [(seed >> k) % 3 / 2 for k in (0, 8, 16)]
    judge_says: Callable[[int], str | None] = lambda seed: None  # an answer instead of scores
    talkative: bool = False  # the user never stops
    user_fails: Callable[[int], bool] = lambda seed: False  # says not a word
    executed_model: str = POLICY
    executed_from: int = 0  # the number of the training client from which on the service reports `executed_model`
    context_length: int = 32768
    fails_at: int | None = None  # number of the call, of any kind, that fails
    fails_after: bool = False  # after its effect, as when the answer is lost
    nan_at: tuple[int, int] | None = None  # (forward_backward call, datum): the logprob that comes back as NaN
    noise: float = 0.0  # nats: two calls for the same logprobs differ by this times a standard normal
    judge_thinks: Callable[[int], int] = lambda seed: 0  # tokens of thought before the answer, bounded by max_tokens
    harmony: bool = False  # the judge has gpt-oss's tokens and channels, over bytes; else it is written to in Qwen's
    words: dict[str, Any] = dataclasses.field(default_factory=dict)  # model -> tokenizer, where not Qwen3.5's


class ScriptedService:
    """Stands where `connect()` would give a Backend; one object holds what a server would, over sessions and runs."""

    endpoint = "http://scripted"
    api_key = None
    embedded = False

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.models = (POLICY, USER, JUDGE)
        self.context_lengths = {POLICY: self.script.context_length}
        self.saved: dict[str, int] = {}
        self.ever_saved: dict[str, int] = {}  # the same, with what was deleted since
        self.limits: dict[str, int | None] = {}  # the ttl_seconds of each save
        self.deleted: list[str] = []
        self.samples: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.forwarded = 0  # tokens of passes without gradients
        self.clients = 0
        self.passes = 0
        self.calls = 0
        self._noise = np.random.default_rng(0)

    def observed(self, logprobs: Sequence[float]) -> list[float]:
        """What a call for these logprobs returns: with the script's noise, other numbers each time."""
        if not self.script.noise:
            return list(logprobs)
        noisy = np.asarray(logprobs) + self.script.noise * self._noise.standard_normal(len(logprobs))
        return np.minimum(noisy, 0.0).astype(np.float32).astype(float).tolist()

    def tokenizer(self, model: str) -> Any:
        """The tokenizer of a model: bytes for a harmony judge, else Qwen3.5's or what the script names."""
        if model == JUDGE and self.script.harmony:
            return Bytes()
        return self.script.words.get(model) or offline(POLICY)

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[None]:
        """Around every call of the models: the one that the script names fails, before or after its effect."""
        number, self.calls = self.calls, self.calls + 1
        fails = number == self.script.fails_at
        if fails and not self.script.fails_after:
            raise ServiceDown("a planned failure")
        yield
        if fails:
            raise ServiceDown("a planned failure")

    @asynccontextmanager
    async def connect(self, **_: Any) -> AsyncGenerator["ScriptedService"]:
        """What replaces paritygate.backend.connect."""
        yield self

    def session(self) -> Any:
        """A session is the service itself."""
        return self.connect()

    async def delete(self, path: str) -> None:
        """As Backend.delete: what is gone already is no error."""
        async with self.call():
            self.deleted.append(path)
            self.saved.pop(path, None)

    async def checkpoints(self, client: str) -> list[str]:
        """As Backend.checkpoints."""
        async with self.call():
            return [path for path in self.saved if path.startswith(f"tinker://{client}/")]

    async def training(self, base_model: str, rank: int = 32, seed: int = 0) -> "ScriptedTrainer":
        return ScriptedTrainer(self, digest(base_model, rank, seed))

    async def restored(self, path: str, *, optimizer: bool = True) -> "ScriptedTrainer":
        return ScriptedTrainer(self, self.saved[path] if optimizer else digest("fresh", self.saved[path]))

    async def sampling(self, base_model: str | None = None, model_path: str | None = None) -> "ScriptedSampler":
        if model_path is not None:
            return ScriptedSampler(self, POLICY, self.saved[model_path], model_path)
        return ScriptedSampler(self, str(base_model), digest(base_model), None)


class ScriptedTrainer:
    """A training client: weights are an integer, gradients a digest."""

    def __init__(self, service: ScriptedService, weights: int) -> None:
        self.service = service
        self.weights = weights
        self.pending = 0
        self.update: dict[str, Any] = {}  # the last pass with gradients
        service.clients += 1
        self.client = service.clients

    rank: int | None = None  # as the service reports it; None where it does not

    @property
    def model_id(self) -> str:
        return str(self.client)

    @property
    def base_model(self) -> str:
        script = self.service.script
        return script.executed_model if self.client > script.executed_from else POLICY

    async def forward(self, data: Sequence[Datum], loss_fn: str = "importance_sampling") -> FwdBwd:
        del loss_fn
        self.service.forwarded += sum(len(datum.tokens) - 1 for datum in data)
        return self._passed(data)

    def _passed(self, data: Sequence[Datum]) -> FwdBwd:
        scale = self.service.script.gap
        rows = [tuple(self.service.observed(logprobs_of(self.weights, datum.tokens, scale)[1:])) for datum in data]
        loss = 0.0
        for datum, row in zip(data, rows, strict=True):
            weights = datum.inputs.get("advantages") or datum.inputs["weights"]
            loss -= sum(float(w) for w in np.asarray(weights, np.float64).reshape(len(row), -1).sum(1))
        return FwdBwd(loss, tuple(rows), {})

    async def forward_backward(self, data: Sequence[Datum], loss_fn: str = "importance_sampling") -> FwdBwd:
        async with self.service.call():
            return await self._forward_backward(data, loss_fn)

    async def _forward_backward(self, data: Sequence[Datum], loss_fn: str) -> FwdBwd:
        passed = self._passed(data)
        self.pending = digest(self.pending, [(d.tokens, sorted(d.inputs.items())) for d in data], loss_fn)
        self.update = {"client": self.client, "data": list(data), "loss_fn": loss_fn}
        self.service.updates.append(self.update)
        self.service.passes += 1
        if self.service.script.nan_at is not None and self.service.script.nan_at[0] == self.service.passes:
            return self._poisoned(passed, data, self.service.script.nan_at[1])
        return passed

    def _poisoned(self, passed: FwdBwd, data: Sequence[Datum], index: int) -> FwdBwd:
        """The same with NaN at the first position of datum `index` that trains."""
        trained = next(t for t, a in enumerate(data[index].inputs["advantages"]) if a)
        rows = [list(row) for row in passed.logprobs]
        rows[index][trained] = float("nan")
        return FwdBwd(float("nan"), tuple(map(tuple, rows)), {})

    async def optim_step(self, learning_rate: float, beta1: float, beta2: float, eps: float) -> dict[str, float]:
        async with self.service.call():
            self.weights = digest(self.weights, self.pending, learning_rate, beta1, beta2, eps)
            self.pending = 0
            self.update["adam"] = (learning_rate, beta1, beta2, eps)  # of this client: arms train at the same time
        return {}

    async def snapshot(self, name: str, ttl_seconds: int | None = None) -> "ScriptedSampler":
        path = await self.save(f"sampler_weights/{name}", ttl_seconds)
        return ScriptedSampler(self.service, POLICY, self.weights, path)

    async def save(self, name: str, ttl_seconds: int | None = None) -> str:
        path = f"tinker://{self.client}/{name}"
        async with self.service.call():
            self.service.saved[path] = self.service.ever_saved[path] = self.weights
            self.service.limits[path] = ttl_seconds
        return path

    async def load(self, path: str) -> None:
        async with self.service.call():
            self.weights = self.service.saved[path]


class ScriptedSampler:
    """A policy that calls a tool and then talks, a user who asks and then stops, a judge who scores by its seed."""

    def __init__(self, service: ScriptedService, model: str, weights: int, path: str | None) -> None:
        self.service = service
        self.model = model
        self.weights = weights
        self.path = path
        self.tokenizer = service.tokenizer(model)

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
        stop: Sequence[int] = (),
        num_samples: int = 1,
        top_p: float = 1.0,
    ) -> list[Sample]:
        if num_samples != 1 or top_p != 1.0 or not stop:
            raise BackendError("the protocol samples one completion over the full vocabulary, to a stop token")
        self._fits(len(tokens) + max_tokens)
        async with self.service.call():
            chosen = self._chosen(list(tokens), int(seed or 0))[:max_tokens]
        entry = {"model": self.model, "path": self.path, "seed": seed, "temperature": temperature}
        lengths = {"max_tokens": max_tokens, "prompt": len(tokens), "sampled": len(chosen)}
        self.service.samples.append(entry | lengths)
        scored = logprobs_of(self.weights, [*tokens, *chosen], self._scale())
        ended = "stop" if chosen and chosen[-1] in stop else "length"
        return [Sample(tuple(chosen), tuple(self.service.observed(scored[len(tokens) :])), ended)]

    async def score(self, tokens: Sequence[int], last: int | None = None) -> list[float | None]:
        self.service.scores.append({"model": self.model, "path": self.path, "tokens": list(tokens), "last": last})
        self._fits(len(tokens) + 1)  # a scoring samples a token as well
        async with self.service.call():
            scored = [None, *self.service.observed(logprobs_of(self.weights, tokens, self._scale())[1:])]
        left_out = 0 if last is None else len(tokens) - last
        return [None] * left_out + scored[left_out:]

    def _fits(self, tokens: int) -> None:
        context = self.service.script.context_length
        if self.model == POLICY and tokens > context:
            raise BackendError(f"{tokens} tokens are over the context of {context}")

    def _scale(self) -> float:
        script = self.service.script
        frozen = script.frozen_gap is not None and "-initial-" in str(self.path)
        return float(script.frozen_gap or 0.0) if frozen else script.gap

    def _chosen(self, prompt: list[int], seed: int) -> list[int]:
        if self.model == JUDGE and self.service.script.harmony:
            return self._harmony(prompt, seed)
        encode, token = self.tokenizer.encode, self.tokenizer.convert_tokens_to_ids
        start, end = (int(token(name)) for name in ("<|im_start|>", "<|im_end|>"))
        messages = prompt.count(start)
        script = self.service.script
        if self.model == POLICY:
            text = CALL if messages == 3 else f"All right, this is answer {seed % 97}."
        elif self.model == USER:
            # Of the customer's own conversation: system, then two messages a turn, then the header to answer.
            if script.user_fails(seed):
                return [end]
            stops = messages > 5 and not script.talkative
            text = "###STOP###" if stops else f"I need help with my order, part {messages}."
        else:
            text = self._answer(prompt, seed)
        return [*encode(text, add_special_tokens=False), end]

    def _answer(self, prompt: list[int], seed: int) -> str:
        judgement = self.service.script.judge_says(seed)
        return self._scores(prompt, seed) if judgement is None else judgement

    def _harmony(self, prompt: list[int], seed: int) -> list[int]:
        """The analysis that the prompt has opened, then the final channel."""
        start, end, channel, message, final = (
            self.tokenizer.convert_tokens_to_ids(name)
            for name in ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>")
        )
        encode = self.tokenizer.encode
        thought = encode("h" * self.service.script.judge_thinks(seed))
        answer = encode(self._answer(prompt, seed))
        return [*thought, end, start, *encode("assistant"), channel, *encode("final"), message, *answer, final]

    def _scores(self, prompt: list[int], seed: int) -> str:
        names = ("invalid_tool_use", "ungrounded_claims", "upfront_clarification")
        scores = dict(zip(names, self.service.script.scores(seed, len(prompt)), strict=True))
        return json.dumps({**scores, "rationale": {name: f"{name} was seen {seed % 7} times." for name in names}})
