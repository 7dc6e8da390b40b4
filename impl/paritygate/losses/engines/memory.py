"""Memory for gradients and tiles on the CPU: pages that cost nothing until written, and those of results that died.

Fresh memory costs a page fault every few KiB: more than the arithmetic of a gradient over the vocabulary.
"""

import math
import mmap
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT = 3  # memories that wait for the next evaluation: two tiles and the gradient of a head, or gradients of logits
LARGEST = 1 << 30  # bytes; larger memory goes back when its tensor dies


def zeros(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros on the device of `like`, on the CPU in pages that cost nothing until written."""
    pages = _pages(shape, like, dtype)
    return torch.zeros(shape, dtype=dtype, device=like.device) if pages is None else _tensor(pages, shape, dtype)


def buffer(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory with anything in it, to be written whole; on the CPU that of a tensor from here that died.

    It is used again only where nothing refers to it: no tensor, view, array or graph. What is kept is what the last
    evaluation needed: a request that finds nothing of its size (to twice of it) lets go of everything that is free.
    """
    size = math.prod(shape) * dtype.itemsize
    mapped = like.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE") and not torch.compiler.is_compiling()
    if not (mapped and 2 * mmap.PAGESIZE <= size <= LARGEST):
        return torch.empty(shape, dtype=dtype, device=like.device)
    with _taking:
        counts = _references(_kept)
        free = [pages for pages, count in zip(_kept, counts, strict=True) if count == _UNUSED]
        used = [pages for pages, count in zip(_kept, counts, strict=True) if count != _UNUSED]
        match = min((pages for pages in reversed(free) if size <= len(pages) <= 2 * size), key=len, default=None)
        others = [pages for pages in free if pages is not match][: KEPT - 1] if match is not None else []
        if match is None:
            match = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            match.madvise(mmap.MADV_HUGEPAGE)
        _kept[:] = [*used, *others, match]
        return _tensor(match, shape, dtype)


def _references(things: Sequence[object]) -> list[int]:
    return [sys.getrefcount(thing) for thing in things]


_UNUSED = _references([object()])[0]  # of what only a list holds
_kept: list[mmap.mmap] = []
_taking = threading.Lock()


def _pages(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> mmap.mmap | None:
    """Pages of zeros that are not there until written, or None where torch should see to it."""
    size = math.prod(shape) * dtype.itemsize
    if like.device.type != "cpu" or size < 2 * mmap.PAGESIZE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _tensor(pages: mmap.mmap, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor over the first of `pages`; its storage holds them for as long as it lives."""
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)
