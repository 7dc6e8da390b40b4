"""From logits to a token: deterministic draws, keyed by (seed, sample, position) and by nothing else."""

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How to sample: `stop_tokens` end a sample when drawn, `stop_strings` when the decoded text holds one."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on its three arguments only."""
    digest = hashlib.blake2b(f"{seed}:{sample}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits_V: Tensor, params: SamplingParams, sample: int, position: int) -> int:
    """Choose one token id: the first largest at temperature 0, else the inverse of the cumulative distribution.

    top_k keeps the k most likely tokens, then top_p the smallest set that reaches it; ties go to the lower id.
    """
    if params.temperature == 0:
        return int(torch.argmax(logits_V))
    scaled = logits_V.double() / params.temperature
    mass = torch.exp(scaled - scaled.max())
    if 0 < params.top_k < mass.numel() or params.top_p < 1:
        mass = _truncate(mass, params)
    total = torch.cumsum(mass, 0)
    point = uniform(params.seed, sample, position) * float(total[-1])
    return min(int(torch.searchsorted(total, point, right=True)), mass.numel() - 1)


def _truncate(mass_V: Tensor, params: SamplingParams) -> Tensor:
    order = torch.sort(mass_V, descending=True, stable=True).indices
    if 0 < params.top_k < order.numel():
        order = order[: params.top_k]
    if params.top_p < 1:
        ranked = mass_V[order]
        before = torch.cumsum(ranked, 0) - ranked
        order = order[before < params.top_p * float(ranked.sum())]
    truncated = torch.zeros_like(mass_V)
    truncated[order] = mass_V[order]
    return truncated


def top_logprobs(logits_V: Tensor, normalizer: Tensor, k: int) -> tuple[list[int], list[float]]:
    """The k most likely tokens (ties: lower id first) and their logprobs in nats, most likely first."""
    values, ids = torch.sort(logits_V.float(), descending=True, stable=True)
    return ids[:k].tolist(), (values[:k] - normalizer).tolist()


class Decoder(Protocol):
    """What stop strings need of a tokenizer."""

    def decode(self, token_ids: Seq[int]) -> str: ...


@dataclass
class StopCheck:
    """Decides after each token whether a sample has ended by itself."""

    params: SamplingParams
    decoder: Decoder | None
    tokens: list[int] = field(default_factory=list[int])

    def ended_by(self, token: int) -> bool:
        """Record `token`; True if it, or the text that it completes, is a stop."""
        self.tokens.append(token)
        if token in self.params.stop_tokens:
            return True
        if not self.params.stop_strings or self.decoder is None:
            return False
        # A stop string can only have been completed now: look at its length in tokens, at least a byte a token,
        # and a few tokens more, since the first of them may decode to the tail of a multi-byte character.
        window = max(len(s.encode()) for s in self.params.stop_strings) + 8
        text = self.decoder.decode(self.tokens[-window:])
        return any(s in text for s in self.params.stop_strings)
