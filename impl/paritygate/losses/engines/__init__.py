"""What computes the rows: C++ on the CPU, Triton on a GPU, else torch in float32 or float64. Parity judges them all."""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; CUDA builds of torch bring it."""
    return importlib.util.find_spec("triton") is not None
