"""Logprobs of prompt tokens from final hidden states, without a full log-softmax where only chosen ids are asked."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paritygate.server.engine.sampling import top_logprobs, uniform
from paritygate.server.errors import RequestError
from paritygate.server.model.cache import Sequence
from paritygate.server.model.lora import Snapshot
from paritygate.server.model.network import Network

CHUNK = 128  # rows of logits held at once


@dataclass(frozen=True)
class Scoring:
    """What to score: row i of every list is about prompt token i + 1.

    `prompt_logprobs` asks for the prompt's own tokens from position `first` on, `top_k` for the most likely ids there,
    `targets` for given ids (row -> ids), `alternatives` for that many draws at every position.
    """

    prompt_logprobs: bool
    first: int
    top_k: int = 0
    targets: tuple[tuple[int, ...], ...] | None = None
    alternatives: int = 0
    temperature: float = 1.0
    seed: int = 0

    def rows(self, length: int) -> range:
        """The hidden rows that are needed."""
        starts = [self.first - 1] if self.prompt_logprobs or self.top_k else []
        if self.targets is not None:
            starts.append(next((i for i, ids in enumerate(self.targets) if ids), length - 1))
        if self.alternatives:
            starts.append(0)
        return range(min(starts, default=length - 1), length - 1)


@dataclass
class PromptScores:
    """Logprobs in nats; position 0 has none. `prompt_logprobs[i]` and `top[i]` are token i's, `targets[i]` token
    i + 1's."""

    prompt_logprobs: list[float | None]
    top: list[tuple[list[int], list[float]] | None]
    targets: list[list[float]]
    alternatives: list[tuple[list[int], list[float]]]


def score_prompt(network: Network, sequence: Sequence, snapshot: Snapshot, scoring: Scoring) -> PromptScores:
    """Score a prompt whose hidden states are computed where they are read."""
    tokens = sequence.tokens
    scores = PromptScores([None] * len(tokens), [None] * len(tokens), [], [])
    if scoring.targets is not None:
        scores.targets = [[] for _ in range(len(tokens) - 1)]
    needed = scoring.rows(len(tokens))
    for start in range(needed.start, needed.stop, CHUNK):
        stop = min(start + CHUNK, needed.stop)
        logits, normalizers = network.head(sequence.hidden[start:stop], snapshot)
        for row, logits_V, normalizer in zip(range(start, stop), logits, normalizers, strict=True):
            _score_row(scores, scoring, row, tokens[row + 1], logits_V, normalizer)
    return scores


def _score_row(
    scores: PromptScores, scoring: Scoring, row: int, token: int, logits_V: Tensor, normalizer: Tensor
) -> None:
    if not math.isfinite(normalizer):
        raise RequestError(f"the model's logits at token {row} are {float(normalizer)}: training diverged")
    if scoring.prompt_logprobs and row + 1 >= scoring.first:
        scores.prompt_logprobs[row + 1] = float(logits_V[token].float() - normalizer)
    if scoring.top_k and row + 1 >= scoring.first:
        scores.top[row + 1] = top_logprobs(logits_V, normalizer, scoring.top_k)
    if scoring.targets is not None and scoring.targets[row]:
        ids = torch.tensor(scoring.targets[row])
        scores.targets[row] = (logits_V[ids].float() - normalizer).tolist()
    if scoring.alternatives:
        scores.alternatives.append(_draw_alternatives(scoring, row, logits_V, normalizer))


def _draw_alternatives(
    scoring: Scoring, row: int, logits_V: Tensor, normalizer: Tensor
) -> tuple[list[int], list[float]]:
    if scoring.temperature == 0:
        ids = [int(torch.argmax(logits_V))] * scoring.alternatives
    else:
        scaled = logits_V.double() / scoring.temperature
        total = torch.cumsum(torch.exp(scaled - scaled.max()), 0)
        # A stream apart from the samples' own: their indices are never negative.
        points = [uniform(scoring.seed, -1 - k, row) * float(total[-1]) for k in range(scoring.alternatives)]
        ids = torch.searchsorted(total, torch.tensor(points, dtype=torch.double), right=True)
        ids = ids.clamp(max=logits_V.numel() - 1).tolist()
    return ids, (logits_V[torch.tensor(ids)].float() - normalizer).tolist()
