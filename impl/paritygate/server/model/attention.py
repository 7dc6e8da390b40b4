"""Causal attention, the same bits whether a token is decoded, prefilled, scored or trained on.

The compiled kernel has them by construction (products.py). Without it, a query at position p attends to the first
ceil((p + 1) / BLOCK) * BLOCK keys, those after p masked: so the shapes of its two products depend on p only, and a
product of `stable_rows` rows or more gives each row the same bits however many rows there are (design/030).
"""

import functools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paritygate.server.model import products
from paritygate.server.model.cache import KEY_BLOCK, Sequence

BLOCK = KEY_BLOCK
_CAUSAL = torch.full((BLOCK, BLOCK), float("-inf")).triu(1)


@dataclass(frozen=True)
class Span:
    """Rows [row, row + count) of a packed batch are tokens [start, start + count) of `sequence`."""

    sequence: Sequence
    row: int
    start: int
    count: int

    @property
    def rows_read(self) -> int:
        """How many of the last tokens' hidden states are read."""
        return min(self.count, max(0, self.start + self.count - self.sequence.read_from))


def cached(spans: list[Span], rows: int) -> "CachedAttention | BlockAttention":
    """Attention of `rows` packed rows that appends to each sequence's keys and values, then attends to all of them."""
    compiled = products.attends(spans[0].sequence.shape.head_dim)
    attention = CachedAttention(spans) if compiled else BlockAttention(spans, rows)
    attention.rows_read = torch.cat([torch.arange(s.row + s.count - s.rows_read, s.row + s.count) for s in spans])
    return attention


class CachedAttention:
    """By the compiled kernel; no gradient."""

    rows_read: Tensor | None

    def __init__(self, spans: list[Span]) -> None:
        self.table = products.spans(
            (kv[0, 0].data_ptr(), kv[0, 1].data_ptr(), kv.stride(2), kv.stride(0), span.row, span.start, span.count)
            for span in spans
            for kv in [span.sequence.kv]
        )
        self.tails = torch.tensor([span.rows_read for span in spans])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return products.attend(q, self.table, k.shape[0], scale, layer=layer, fresh=(k, v))


class BlockAttention:
    """By torch, block by block; no gradient."""

    rows_read: Tensor | None

    def __init__(self, spans: list[Span], rows: int) -> None:
        self.longer = [span for span in spans if span.count > 1]
        self.single = [_Single(span) for span in spans if span.count == 1]
        self.index = torch.tensor([single.row for single in self.single])
        self.rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q = q * scale
        fresh = torch.stack([k, v])
        out = torch.zeros_like(q)
        for span in self.longer:
            keys, values = cache = span.sequence.kv[layer]
            cache[:, :, span.start : span.start + span.count] = fresh[:, :, span.row : span.row + span.count]
            for position, count in blocks(span.start, span.count):
                row = span.row + position - span.start
                weights = block_weights(q[:, row : row + count], keys, position)
                out[:, row : row + count] = mix(weights, values, q.shape[0], count)
        if self.single:
            out[:, self.index] = self._attend_single(layer, q, fresh)
        return out

    def _attend_single(self, layer: int, q: Tensor, fresh: Tensor) -> Tensor:
        """The same products for rows of one token, in as few calls as can be: the inner loop of decoding."""
        heads, _, dim = q.shape
        kv_heads = fresh.shape[1]
        group = heads // kv_heads
        padded = q.new_zeros(self.rows, kv_heads, max(group, stable_rows(dim)), dim)
        padded[:, :, :group] = q.view(kv_heads, group, -1, dim).permute(2, 0, 1, 3)
        queries, entries = padded.unbind(0), fresh.unbind(2)
        mixed: list[Tensor] = []
        for single in self.single:
            single.slots[layer].copy_(entries[single.row])
            scores = torch.baddbmm(single.mask, queries[single.row], single.keys[layer])
            mixed.append(torch.bmm(torch.softmax(scores, -1), single.values[layer]))
        return torch.stack(mixed)[:, :, :group].reshape(len(mixed), heads, dim).transpose(0, 1)


class _Single:
    """A span of one token, its views of every layer's cache taken once for the whole pass."""

    def __init__(self, span: Span) -> None:
        self.row = span.row
        self.mask = row_mask(span.start)
        kv, end = span.sequence.kv, self.mask.shape[-1]
        self.slots = kv[:, :, :, span.start].unbind(0)
        self.keys = kv[:, 0, :, :end].transpose(2, 3).unbind(0)
        self.values = kv[:, 1, :, :end].unbind(0)


class PlainAttention:
    """Differentiable attention of sequences that begin with the same `shared` rows: those first, then what follows
    in each (`rests` rows), laid end to end."""

    rows_read: Tensor | None = None

    def __init__(self, shared: int, rests: Seq[int]) -> None:
        self.lengths = [shared, *rests]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        (first_k, *rest_k), (first_v, *rest_v) = k.split(self.lengths, 1), v.split(self.lengths, 1)
        keys = [first_k, *(torch.cat([first_k, rest], 1) for rest in rest_k)]
        values = [first_v, *(torch.cat([first_v, rest], 1) for rest in rest_v)]
        parts = zip(q.split(self.lengths, 1), keys, values, strict=True)
        return torch.cat([_Causal.apply(qi * scale, ki, vi) for qi, ki, vi in parts if qi.shape[1]], 1)


class _Causal(torch.autograd.Function):
    """The last T of S positions of one sequence: q (H, T, D) already scaled, k and v (K, S, D) -> (H, T, D).

    Weights are recomputed backwards.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start = k.shape[1] - q.shape[1]
        keys, values = _whole_blocks(k), _whole_blocks(v)
        ctx.save_for_backward(q, keys, values)
        ctx.start = start
        if products.attends(q.shape[2]):
            address = (keys.data_ptr(), values.data_ptr(), keys.stride(0), 0)
            return products.attend(q, products.spans([(*address, 0, start, q.shape[1])]), keys.shape[0], 1.0)
        out = torch.empty_like(q)
        for position, count in blocks(start, q.shape[1]):
            row = position - start
            weights = block_weights(q[:, row : row + count], keys, position)
            out[:, row : row + count] = mix(weights, values, q.shape[0], count)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, keys, values = ctx.saved_tensors
        heads, length, dim = q.shape
        kv_heads = keys.shape[0]
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        for position, count in blocks(ctx.start, length):
            end = (position // BLOCK + 1) * BLOCK
            rows = heads // kv_heads * count
            row = position - ctx.start
            queries = q[:, row : row + count].reshape(kv_heads, rows, dim)
            grad_out = grads[0][:, row : row + count].reshape(kv_heads, rows, dim)
            weights = block_weights(q[:, row : row + count], keys, position)[:, :rows]
            grad_weights = torch.bmm(grad_out, values[:, :end].transpose(1, 2))
            grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
            grad_v[:, :end] += torch.bmm(weights.transpose(1, 2), grad_out)
            grad_k[:, :end] += torch.bmm(grad_scores.transpose(1, 2), queries)
            grad_q[:, row : row + count] = torch.bmm(grad_scores, keys[:, :end]).reshape(heads, count, dim)
        end = ctx.start + length
        return grad_q, grad_k[:, :end], grad_v[:, :end]


def blocks(start: int, count: int) -> Iterator[tuple[int, int]]:
    """Split tokens [start, start + count) at multiples of BLOCK: (position, tokens) of each part."""
    end = start + count
    while start < end:
        size = min(end - start, BLOCK - start % BLOCK)
        yield start, size
        start += size


def block_weights(q: Tensor, keys: Tensor, position: int) -> Tensor:
    """q (H, m, D), scaled, at positions [position, position + m) of one block; keys (K, >= end, D) -> (K, R, end).

    R is the queries of one key head, m * H / K, made up to `stable_rows`; fp32.
    """
    heads, m, dim = q.shape
    kv_heads = keys.shape[0]
    end = (position // BLOCK + 1) * BLOCK
    rows = heads // kv_heads * m
    queries = q.reshape(kv_heads, rows, dim)
    minimum = stable_rows(dim)
    if rows < minimum:
        queries = torch.cat([queries, queries.new_zeros(kv_heads, minimum - rows, dim)], 1)
    scores = torch.bmm(queries, keys[:, :end].transpose(1, 2))
    offset = position % BLOCK
    scores[:, :rows].view(kv_heads, heads // kv_heads, m, end)[..., end - BLOCK :] += _CAUSAL[offset : offset + m]
    return torch.softmax(scores, -1)


def mix(weights: Tensor, values: Tensor, heads: int, m: int) -> Tensor:
    """weights (K, R, end) from `block_weights`, values (K, >= end, D) -> (H, m, D)."""
    kv_heads, _, end = weights.shape
    return torch.bmm(weights, values[:, :end])[:, : heads // kv_heads * m].reshape(heads, m, values.shape[-1])


def row_mask(position: int) -> Tensor:
    """(1, 1, end) for the query at `position`: 0 for keys that it may see, -inf for those after it."""
    end = (position // BLOCK + 1) * BLOCK
    masked = torch.zeros(1, 1, end)
    masked[:, :, position + 1 :] = float("-inf")
    return masked


@functools.cache
def stable_rows(dim: int) -> int:
    """The fewest rows from which on this CPU's batched products give a row the same bits whatever the row count.

    Measured on the two products of attention over a few key counts, since math libraries choose their kernels by CPU:
    4 was seen with MKL on an AMD EPYC. Where no count up to 64 is stable, 64: bits may then move with the batch.
    """
    generator = torch.Generator().manual_seed(0)
    cases: list[tuple[Tensor, Tensor]] = []
    for end in (BLOCK, 5 * BLOCK, 17 * BLOCK):
        keys = torch.randn(2, end, dim, generator=generator)
        cases.append((torch.randn(2, 192, dim, generator=generator), keys.transpose(1, 2)))
        cases.append((torch.rand(2, 192, end, generator=generator), keys))
    full = [torch.bmm(a, b) for a, b in cases]

    def stable(rows: int) -> bool:
        return all(
            torch.equal(torch.bmm(a[:, :n].contiguous(), b), whole[:, :n])
            for (a, b), whole in zip(cases, full, strict=True)
            for n in range(rows, 4 * rows)
        )

    return next((rows for rows in (1, 2, 4, 8, 16, 32) if stable(rows)), 64)


def _whole_blocks(k: Tensor) -> Tensor:
    """Zeros up to a whole number of blocks: masked keys enter with weight 0, and must be finite."""
    missing = -k.shape[1] % BLOCK
    return torch.nn.functional.pad(k, (0, 0, 0, missing)).contiguous()
