"""Rows that lie more than 2^31 entries apart, in memory of which only they are touched."""

import mmap

import pytest
import torch
from torch import Tensor

STRIDE = (1 << 30) + 64  # entries: the third row begins beyond 2^31


def far_apart(rows: Tensor) -> Tensor:
    """The same three rows (3, V) of a 2-byte dtype, STRIDE entries from each to the next: 4 GiB, three pages used."""
    assert rows.shape[0] == 3
    size = (2 * STRIDE + rows.shape[1]) * rows.itemsize
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    except OSError as error:
        pytest.skip(f"no address space for {size} bytes here: {error}")
    view = torch.frombuffer(pages, dtype=rows.dtype).as_strided(rows.shape, (STRIDE, 1))
    return view.copy_(rows)
