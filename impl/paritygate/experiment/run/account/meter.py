"""Counts what is asked of a service: a backend that adds up tokens and notes saved states as it passes them on."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from paritygate.experiment.run.account.saved_states import SavedStates
from paritygate.service.connection import Usage as ProofUsage

if TYPE_CHECKING:
    from paritygate.backend import Backend, Datum, FwdBwd, Sample, Sampler, Trainer

ROLES = ("policy", "proof", "user", "judge")  # proof: of the service, on the policy's model
KINDS = ("prefill", "sampled", "trained")
SAVED = "saved_states"
TTL_SECONDS = 14 * 24 * 3600
"""After which the service deletes what is not a result, should the run not have come to it: --resume has that long."""

Usage = Counter[str]
"""Tokens by `role/kind`, and the number of states saved."""


def key(role: str, kind: str) -> str:
    """The name of a count of tokens."""
    return f"{role}/{kind}"


class MeteredSampler:
    """A sampler whose tokens are counted: every prompt whole, each time, whatever a service has cached of it."""

    def __init__(self, sampler: "Sampler", usage: Usage, role: str) -> None:
        self._sampler = sampler
        self._usage = usage
        self._role = role

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    async def sample(self, tokens: Sequence[int], **options: Any) -> "list[Sample]":
        """As the sampler's."""
        samples = await self._sampler.sample(tokens, **options)
        self._usage[key(self._role, "prefill")] += len(tokens)
        self._usage[key(self._role, "sampled")] += sum(len(sample.tokens) for sample in samples)
        return samples

    async def score(self, tokens: Sequence[int], last: int | None = None) -> list[float | None]:
        """As the sampler's."""
        return await self._scored(len(tokens), self._sampler.score(tokens, last))

    async def topk(self, tokens: Sequence[int], k: int) -> Any:
        """As the sampler's."""
        return await self._scored(len(tokens), self._sampler.topk(tokens, k))

    async def score_targets(self, tokens: Sequence[int], target_ids: Sequence[Sequence[int]]) -> Any:
        """As the sampler's."""
        return await self._scored(len(tokens), self._sampler.score_targets(tokens, target_ids))

    async def _scored(self, count: int, call: Any) -> Any:
        scores = await call
        self._usage[key(self._role, "prefill")] += count
        return scores


def metered(sampler: "Sampler", usage: Usage, role: str) -> "Sampler":
    """The sampler with its tokens counted as those of `role`."""
    return cast("Sampler", MeteredSampler(sampler, usage, role))


class MeteredProof(ProofUsage):
    """Counts what the proof of a service uses as the run's own, and lists the states that it saves."""

    def __init__(self, usage: Usage, states: SavedStates) -> None:
        super().__init__()
        self._usage = usage
        self._states = states

    def count(self, kind: str, tokens: int) -> None:
        """As Usage's."""
        super().count(kind, tokens)
        with self._lock:
            self._usage[key("proof", kind)] += tokens

    def saving(self, run: str, name: str) -> None:
        """As Usage's."""
        self._states.intend(run, name)

    def saved(self, run: str, name: str, path: str) -> None:
        """As Usage's."""
        self._usage[SAVED] += 1
        self._states.add(run, name, path)

    def deleted(self, path: str) -> None:
        """As Usage's."""
        self._states.drop(path)


class MeteredTrainer:
    """A training client whose tokens are counted, and whose saves are listed in `states`, before and after each."""

    def __init__(self, trainer: "Trainer", usage: Usage, states: SavedStates) -> None:
        self._trainer = trainer
        self._usage = usage
        self._states = states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def forward_backward(self, data: "Sequence[Datum]", *arguments: Any) -> "FwdBwd":
        """As the trainer's."""
        passed = await self._trainer.forward_backward(data, *arguments)
        self._usage[key("policy", "trained")] += sum(len(datum.tokens) - 1 for datum in data)
        return passed

    async def forward(self, data: "Sequence[Datum]", *arguments: Any) -> "FwdBwd":
        """As the trainer's."""
        passed = await self._trainer.forward(data, *arguments)
        self._usage[key("policy", "prefill")] += sum(len(datum.tokens) - 1 for datum in data)
        return passed

    async def snapshot(self, name: str, ttl_seconds: int | None = TTL_SECONDS) -> "Sampler":
        """As the trainer's; without another limit the service deletes it after TTL_SECONDS. None is for results."""
        self._states.intend(self._trainer.model_id, name)
        sampler = await self._trainer.snapshot(name, ttl_seconds)
        self._saved(name, str(sampler.path))
        return metered(sampler, self._usage, "policy")

    async def save(self, name: str, ttl_seconds: int | None = TTL_SECONDS) -> str:
        """As the trainer's, with the same limit."""
        self._states.intend(self._trainer.model_id, name)
        path = await self._trainer.save(name, ttl_seconds)
        self._saved(name, path)
        return path

    def _saved(self, name: str, path: str) -> None:
        self._usage[SAVED] += 1
        self._states.add(self._trainer.model_id, name, path)


class MeteredBackend:
    """A session whose training clients, and samplers of what they saved, are metered."""

    def __init__(self, backend: "Backend", usage: Usage, states: SavedStates) -> None:
        self._backend = backend
        self._usage = usage
        self._states = states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def training(self, *arguments: Any, **options: Any) -> "Trainer":
        """As the backend's."""
        return self._metered(await self._backend.training(*arguments, **options))

    async def restored(self, *arguments: Any, **options: Any) -> "Trainer":
        """As the backend's."""
        return self._metered(await self._backend.restored(*arguments, **options))

    async def sampling(self, base_model: str | None = None, model_path: str | None = None) -> "Sampler":
        """As the backend's; a base model's sampler is left for `metered`, since only its user knows its role."""
        sampler = await self._backend.sampling(base_model=base_model, model_path=model_path)
        return sampler if model_path is None else metered(sampler, self._usage, "policy")

    def _metered(self, trainer: "Trainer") -> "Trainer":
        return cast("Trainer", MeteredTrainer(trainer, self._usage, self._states))
