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

    Memory grows as tokens come; `reserved` counts what it may grow to.
    """

    def __init__(self, shape: Shape, tokens: list[int], capacity: int) -> None:
        self.shape = shape
        self.capacity = _whole(capacity)
        self.tokens = list(tokens)
        self.done = 0
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
        """Copy the longest cached prefix into a fresh sequence; return its length in tokens."""
        for key in self.keys(version, sequence.tokens):
            page = self._pages.get(key)
            if page is None:
                break
            self._pages.move_to_end(key)
            start, end = sequence.done, sequence.done + PAGE
            sequence.kv[:, :, :, start:end] = page.kv
            sequence.hidden[start:end] = page.hidden
            sequence.done = end
        self.hits += sequence.done
        return sequence.done

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def store(self, sequence: Sequence, version: str) -> None:
        """Keep every whole computed page of `sequence`."""
        for index, key in enumerate(self.keys(version, sequence.tokens[: sequence.done])):
            if key in self._pages:
                self._pages.move_to_end(key)
                continue
            start, end = index * PAGE, (index + 1) * PAGE
            page = _Page(sequence.kv[:, :, :, start:end].clone(), sequence.hidden[start:end].clone())
            self._pages[key] = page
            self.bytes += page.bytes()
        while self.bytes > self.limit_bytes and self._pages:
            self.bytes -= self._pages.popitem(last=False)[1].bytes()

    def clear(self) -> None:
        self._pages.clear()
        self.bytes = 0
