"""Causal attention in blocks of keys, the same bits whether a token is decoded, prefilled, scored or trained on.

A query at position p attends to the first ceil((p + 1) / BLOCK) * BLOCK keys, those after p masked. So the shapes of
its two products depend on p only, and a product of ATTENTION_ROWS rows or more gives each row the same bits however
many rows there are (design/030).
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paritygate.server.cache import ROOM, Sequence

BLOCK = ROOM
ATTENTION_ROWS = 8
_CAUSAL = torch.full((BLOCK, BLOCK), float("-inf")).triu(1)


@dataclass(frozen=True)
class Span:
    """Rows [row, row + count) of a packed batch are tokens [start, start + count) of `sequence`."""

    sequence: Sequence
    row: int
    start: int
    count: int


class CachedAttention:
    """Attention that appends to each sequence's keys and values, then attends to all of them; no gradient."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = torch.zeros_like(q)
        q = q * scale
        for span in self.spans:
            keys, values = span.sequence.kv[layer, 0], span.sequence.kv[layer, 1]
            keys[:, span.start : span.start + span.count] = k[:, span.row : span.row + span.count]
            values[:, span.start : span.start + span.count] = v[:, span.row : span.row + span.count]
            for position, count in blocks(span.start, span.count):
                row = span.row + position - span.start
                weights = block_weights(q[:, row : row + count], keys, position)
                out[:, row : row + count] = mix(weights, values, q.shape[0], count)
        return out


class PlainAttention:
    """Differentiable attention of whole sequences laid end to end; `lengths` sum to the number of rows."""

    def __init__(self, lengths: Seq[int]) -> None:
        self.lengths = list(lengths)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return torch.cat(
            [
                _Causal.apply(qi * scale, ki, vi)
                for qi, ki, vi in zip(
                    q.split(self.lengths, 1), k.split(self.lengths, 1), v.split(self.lengths, 1), strict=True
                )
            ],
            1,
        )


class _Causal(torch.autograd.Function):
    """One sequence: q (H, T, D) already scaled, k and v (K, T, D) -> (H, T, D). Weights are recomputed backwards."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = _whole_blocks(k), _whole_blocks(v)
        ctx.save_for_backward(q, keys, values)
        out = torch.empty_like(q)
        for position, count in blocks(0, q.shape[1]):
            weights = block_weights(q[:, position : position + count], keys, position)
            out[:, position : position + count] = mix(weights, values, q.shape[0], count)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, keys, values = ctx.saved_tensors
        heads, length, dim = q.shape
        kv_heads = keys.shape[0]
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        for position, count in blocks(0, length):
            end = (position // BLOCK + 1) * BLOCK
            rows = heads // kv_heads * count
            queries = q[:, position : position + count].reshape(kv_heads, rows, dim)
            into = grads[0][:, position : position + count].reshape(kv_heads, rows, dim)
            weights = block_weights(q[:, position : position + count], keys, position)[:, :rows]
            into_weights = torch.matmul(into, values[:, :end].transpose(1, 2)).float()
            probabilities = weights.float()
            into_scores = probabilities * (into_weights - (into_weights * probabilities).sum(-1, keepdim=True))
            into_scores = into_scores.to(q.dtype)
            grad_v[:, :end] += torch.matmul(weights.transpose(1, 2), into)
            grad_k[:, :end] += torch.matmul(into_scores.transpose(1, 2), queries)
            grad_q[:, position : position + count] = torch.matmul(into_scores, keys[:, :end]).reshape(heads, count, dim)
        return grad_q, grad_k[:, :length], grad_v[:, :length]


def blocks(start: int, count: int) -> Iterator[tuple[int, int]]:
    """Split tokens [start, start + count) at multiples of BLOCK: (position, tokens) of each part."""
    end = start + count
    while start < end:
        size = min(end - start, BLOCK - start % BLOCK)
        yield start, size
        start += size


def block_weights(q: Tensor, keys: Tensor, position: int) -> Tensor:
    """q (H, m, D), scaled, at positions [position, position + m) of one block; keys (K, >= end, D) -> (K, R, end).

    R is the queries of one key head, m * H / K, made up to ATTENTION_ROWS; softmax in fp32, then q's dtype.
    """
    heads, m, dim = q.shape
    kv_heads = keys.shape[0]
    end = (position // BLOCK + 1) * BLOCK
    rows = heads // kv_heads * m
    queries = q.reshape(kv_heads, rows, dim)
    if rows < ATTENTION_ROWS:
        queries = torch.cat([queries, queries.new_zeros(kv_heads, ATTENTION_ROWS - rows, dim)], 1)
    scores = torch.matmul(queries, keys[:, :end].transpose(1, 2)).float()
    if m == 1:
        scores[:, :, position + 1 :] = float("-inf")
    else:
        offset = position % BLOCK
        scores[:, :rows].view(kv_heads, heads // kv_heads, m, end)[..., end - BLOCK :] += _CAUSAL[offset : offset + m]
    return torch.softmax(scores, -1).to(q.dtype)


def mix(weights: Tensor, values: Tensor, heads: int, m: int) -> Tensor:
    """weights (K, R, end) from `block_weights`, values (K, >= end, D) -> (H, m, D)."""
    kv_heads, _, end = weights.shape
    return torch.matmul(weights, values[:, :end])[:, : heads // kv_heads * m].reshape(heads, m, values.shape[-1])


def _whole_blocks(k: Tensor) -> Tensor:
    """Zeros up to a whole number of blocks: masked keys enter with weight 0, and must be finite."""
    missing = -k.shape[1] % BLOCK
    return torch.nn.functional.pad(k, (0, 0, 0, missing)) if missing else k
