"""Keys, values and final hidden states of sequences, and the prefix cache that sequences of one weights version share."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paritygate.server.limits import Shape

PAGE = 16  # tokens a cached page
ROOM = 64  # capacities are multiples of this, the attention's block of keys


class Sequence:
    """One sequence in the making: keys and values (L, 2, K, capacity, D), hidden states, and how many are computed."""

    def __init__(self, shape: Shape, dtype: torch.dtype, tokens: list[int], capacity: int) -> None:
        self.capacity = -(-capacity // ROOM) * ROOM
        # Zeros, not empty: masked keys still enter a product with weight 0, and 0 * NaN is NaN.
        self.kv = torch.zeros(shape.layers, 2, shape.kv_heads, self.capacity, shape.head_dim, dtype=dtype)
        self.hidden = torch.zeros(self.capacity, shape.hidden, dtype=dtype)
        self.tokens = list(tokens)
        self.done = 0

    def bytes(self) -> int:
        return self.kv.nbytes + self.hidden.nbytes

    def fork(self, shape: Shape, dtype: torch.dtype, capacity: int) -> "Sequence":
        """A copy with its own memory that may grow to `capacity` tokens."""
        copy = Sequence(shape, dtype, self.tokens, capacity)
        copy.kv[:, :, :, : self.done] = self.kv[:, :, :, : self.done]
        copy.hidden[: self.done] = self.hidden[: self.done]
        copy.done = self.done
        return copy


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

    def keys(self, version: str, tokens: list[int], count: int) -> list[bytes]:
        """The keys of the first `count` whole pages of `tokens`."""
        digest = hashlib.blake2b(version.encode() + b"\0", digest_size=16)
        data = np.asarray(tokens[: count * PAGE], dtype=np.int32).tobytes()
        keys: list[bytes] = []
        for page in range(count):
            digest.update(data[page * PAGE * 4 : (page + 1) * PAGE * 4])
            keys.append(digest.copy().digest())
        return keys

    def fill(self, sequence: Sequence, version: str) -> int:
        """Copy the longest cached prefix into a fresh sequence; return its length in tokens."""
        for key in self.keys(version, sequence.tokens, len(sequence.tokens) // PAGE):
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

    def next_page(self, tokens: list[int], done: int, version: str) -> bytes | None:
        """The key of the first whole page from token `done` on that is not cached, None if there is no such page."""
        keys = self.keys(version, tokens, len(tokens) // PAGE)[done // PAGE :]
        return next((key for key in keys if key not in self._pages), None)

    def store(self, sequence: Sequence, version: str) -> None:
        """Keep every whole computed page of `sequence`."""
        for index, key in enumerate(self.keys(version, sequence.tokens, sequence.done // PAGE)):
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
