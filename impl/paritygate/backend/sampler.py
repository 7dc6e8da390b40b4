"""Sampling and scoring with one fixed set of weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paritygate.backend.guard import Guard
from paritygate.errors import BackendError

if TYPE_CHECKING:
    import tinker


@dataclass(frozen=True)
class Sample:
    """One sampled continuation: token ids, their logprobs in nats, and whether a stop token or the limit ended it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]


class Sampler:
    """Samples from, and scores with, weights that do not move; `path` names the snapshot, None for a base model."""

    def __init__(self, client: "tinker.SamplingClient", guard: Guard, tokenizer: Any, path: str | None) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.base_model: str = client.get_base_model()
        self._client = client
        self._guard = guard

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
        """Continue `tokens` num_samples times; an empty `stop` keeps the model's end token, temperature 0 is greedy.

        The stop token, when one ends a sample, is its last token. Raises BackendError after retries, and when the
        service returns another number of samples or of logprobs than it should.
        """
        import tinker

        params = tinker.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop=list(stop) if stop else None,
            top_p=top_p,
        )
        prompt = tinker.ModelInput.from_ints(list(tokens))
        response = await self._guard.repeatable("Sampling", lambda: self._client.sample(prompt, num_samples, params))
        if len(response.sequences) != num_samples:
            raise BackendError(f"Sampling returned {len(response.sequences)} samples, not {num_samples}.")
        return [_sample(sequence) for sequence in response.sequences]

    async def score(self, tokens: Sequence[int], last: int | None = None) -> list[float | None]:
        """The log-probability in nats of each token given those before it: length L, None first.

        last: how many positions at the end are wanted; those before them may be None, where the service can leave them
        out. Raises BackendError after retries, and when the service returns another length or no number where one is
        wanted.
        """
        wanted = len(tokens) - 1 if last is None else last
        logprobs = await self._scored(tokens, None if wanted == len(tokens) - 1 else wanted)
        if len(logprobs) != len(tokens):
            raise BackendError(f"Scoring returned {len(logprobs)} logprobs for {len(tokens)} tokens.")
        if logprobs and logprobs[0] is not None:
            raise BackendError("Scoring returned a logprob for token 0, which nothing predicts: the list is shifted.")
        missing = [index for index in range(len(tokens) - wanted, len(tokens)) if logprobs[index] is None]
        if tokens and missing:
            raise BackendError(f"Scoring returned no logprob for token {missing[0]}.")
        return logprobs

    async def _scored(self, tokens: Sequence[int], last: int | None) -> list[float | None]:
        """Of the last positions only, unless the service has shown that it does not know that field."""
        import tinker

        prompt = tinker.ModelInput.from_ints(list(tokens))
        if last is not None and self._guard.scores_the_end:
            try:
                return await self._guard.repeatable("Scoring", lambda: self._client.compute_logprobs(prompt, last))
            except BackendError as error:
                # The SDK finds everything scored; a stricter service refuses a field that it does not know.
                refused = isinstance(error.__cause__, tinker.BadRequestError | tinker.UnprocessableEntityError)
                if not refused and type(error.__cause__) is not RuntimeError:
                    raise
            self._guard.scores_the_end = False
        return await self._guard.repeatable("Scoring", lambda: self._client.compute_logprobs(prompt))

    async def topk(self, tokens: Sequence[int], k: int) -> list[list[tuple[int, float]] | None]:
        """The k likeliest (token id, logprob in nats) at each position given those before it: length L, None first."""
        import tinker

        prompt, params = tinker.ModelInput.from_ints(list(tokens)), tinker.SamplingParams(max_tokens=1)
        response = await self._guard.repeatable(
            "Top-k scoring", lambda: self._client.sample(prompt, 1, params, True, topk_prompt_logprobs=k)
        )
        rows = response.topk_prompt_logprobs
        if rows is None or len(rows) != len(tokens):
            raise BackendError(f"Top-k scoring returned {len(rows or [])} rows for {len(tokens)} tokens.")
        return rows

    async def score_targets(self, tokens: Sequence[int], target_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs in nats of K given ids at each position, L x K; row 0 is not scored (NaN), nor is an id of -1.

        Raises BackendError after retries, and when the service returns another shape.
        """
        import numpy as np
        import tinker

        ids = np.asarray(target_ids[1:], np.int64)
        prompt, params = tinker.ModelInput.from_ints(list(tokens)), tinker.SamplingParams(max_tokens=1)
        targets = tinker.TensorData.from_numpy(ids)
        response = await self._guard.repeatable(
            "Scoring targets", lambda: self._client.sample(prompt, 1, params, target_prompt_logprobs=targets)
        )
        scored = response.target_prompt_logprobs
        rows = None if scored is None else scored.to_numpy()
        if rows is None or rows.shape != ids.shape:
            raise BackendError(f"Scoring targets returned shape {getattr(rows, 'shape', None)}, not {ids.shape}.")
        return [[float("nan")] * ids.shape[1], *rows.tolist()]


def _sample(sequence: "tinker.SampledSequence") -> Sample:
    tokens, logprobs = tuple(sequence.tokens), tuple(sequence.logprobs or ())
    if len(tokens) != len(logprobs):
        raise BackendError(f"Sampling returned {len(logprobs)} logprobs for {len(tokens)} tokens.")
    return Sample(tokens, logprobs, "length" if sequence.stop_reason == "length" else "stop")
