"""C++ kernels of the losses and the embedded server: compiled on the machine that runs them, cached, loaded, recorded.

`load` makes a library of source files, or raises Unavailable where there is no compiler; callers then use torch.
For receipts `build_record` says which compiler, flags and CPU decide the libraries; `bootstrap.LIBRARIES` are in use.
`vector.hpp` and `threads.hpp` are shared by all.
"""

from pathlib import Path

from paritygate.native.libraries import TILES_REFUSED, Unavailable, announce, bfloat16_asked, load
from paritygate.native.record import build_record

VECTOR_HPP, THREADS_HPP = (Path(__file__).with_name(name) for name in ("vector.hpp", "threads.hpp"))

__all__ = [
    "THREADS_HPP",
    "TILES_REFUSED",
    "VECTOR_HPP",
    "Unavailable",
    "announce",
    "bfloat16_asked",
    "build_record",
    "load",
]
