"""Keys, values and hidden states of sequences, and the prefix cache that those of one weights version share."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paritygate.server.model.shape import Shape

PAGE = 16  # tokens a cached page
KEY_BLOCK = 64  # capacities are multiples of this, the attention's block of keys


class Sequence:
    """One sequence in the making: keys and values (L, 2, K, capacity, D), hidden states, how many are computed.

    Memory grows as tokens come; `reserved` counts what it may grow to. Hidden states before `read_from` are not asked
    for; where they are there is in `has_hidden`.
    """

    def __init__(self, shape: Shape, tokens: list[int], capacity: int) -> None:
        self.shape = shape
        self.capacity = _whole(capacity)
        self.tokens = list(tokens)
        self.done = 0
        self.read_from = 0
        self.has_hidden = np.zeros(self.capacity, dtype=bool)
        self.kv, self.hidden = self._buffers(min(self.capacity, _whole(len(tokens) + KEY_BLOCK)))

    @property
    def reserved(self) -> int:
        """Bytes at full capacity."""
        return self.capacity * (self.kv[:, :, :, :1].nbytes + self.hidden[:1].nbytes)

    def grow(self, length: int) -> None:
        """See to memory for `length` tokens."""
        allocated = self.hidden.shape[0]
        if length <= allocated:
            return
        kv, hidden = self.kv, self.hidden
        self.kv, self.hidden = self._buffers(min(self.capacity, _whole(max(length, allocated * 3 // 2))))
        self._copy(kv, hidden)

    def fork(self) -> "Sequence":
        """A copy with its own memory."""
        copy = Sequence(self.shape, self.tokens, self.capacity)
        copy.done = self.done
        copy.has_hidden[:] = self.has_hidden
        copy._copy(self.kv, self.hidden)
        return copy

    def _buffers(self, length: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        # Zeros, not empty: masked keys still enter a product with weight 0, and 0 * NaN is NaN.
        return (
            torch.zeros(shape.layers, 2, shape.kv_heads, length, shape.head_dim),
            torch.zeros(length, shape.hidden),
        )

    def _copy(self, kv: Tensor, hidden: Tensor) -> None:
        self.kv[:, :, :, : self.done] = kv[:, :, :, : self.done]
        self.hidden[: self.done] = hidden[: self.done]


def _whole(tokens: int) -> int:
    return -(-tokens // KEY_BLOCK) * KEY_BLOCK


@dataclass(frozen=True)
class _Page:
    kv: Tensor
    hidden: Tensor
    first: int  # of the tokens from which on all hidden states are known; PAGE, and no memory for them, where none is

    def bytes(self) -> int:
        return self.kv.nbytes + self.hidden.nbytes


class PrefixCache:
    """Pages of PAGE tokens, keyed by weights version and everything before them; least recently used go first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.hits = 0
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()

    def keys(self, version: str, tokens: list[int]) -> list[bytes]:
        """The keys of the whole pages of `tokens`."""
        digest = hashlib.blake2b(version.encode() + b"\0", digest_size=16)
        data = np.asarray(tokens, dtype=np.int32).tobytes()
        keys: list[bytes] = []
        for page in range(len(tokens) // PAGE):
            digest.update(data[page * PAGE * 4 : (page + 1) * PAGE * 4])
            keys.append(digest.copy().digest())
        return keys

    def fill(self, sequence: Sequence, version: str) -> int:
        """Copy the longest cached prefix whose hidden states are known where they are read; return its length."""
        for key in self.keys(version, sequence.tokens):
            page = self._pages.get(key)
            start, end = sequence.done, sequence.done + PAGE
            if page is None or start + page.first > max(start, sequence.read_from):
                break
            self._pages.move_to_end(key)
            sequence.kv[:, :, :, start:end] = page.kv
            sequence.hidden[start + page.first : end] = page.hidden
            sequence.has_hidden[start + page.first : end] = True
            sequence.done = end
        self.hits += sequence.done
        return sequence.done

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def store(self, sequence: Sequence, version: str) -> None:
        """Keep every whole computed page of `sequence`."""
        for index, key in enumerate(self.keys(version, sequence.tokens[: sequence.done])):
            start, end = index * PAGE, (index + 1) * PAGE
            unknown = np.flatnonzero(~sequence.has_hidden[start:end])
            first = int(unknown[-1]) + 1 if len(unknown) else 0
            old = self._pages.get(key)
            if old is not None and old.first <= first:
                self._pages.move_to_end(key)
                continue
            page = _Page(sequence.kv[:, :, :, start:end].clone(), sequence.hidden[start + first : end].clone(), first)
            self._pages[key] = page
            self._pages.move_to_end(key)
            self.bytes += page.bytes() - (old.bytes() if old is not None else 0)
        while self.bytes > self.limit_bytes and self._pages:
            self.bytes -= self._pages.popitem(last=False)[1].bytes()

    def clear(self) -> None:
        self._pages.clear()
        self.bytes = 0
