"""What computes rows of logits: C++ on the CPU, Triton on a GPU, elsewhere torch. Parity judges them all; README.md."""

import functools
import importlib.util
from typing import Literal, overload

import torch
from torch import Tensor

from . import cpp, float32, float64
from .base import DivergenceEngine, RowEngine

__all__ = ["DivergenceEngine", "RowEngine", "choose", "cpp", "float32", "float64"]

ROWS: tuple[RowEngine, ...] = (cpp, float32, float64)
DIVERGENCES: tuple[DivergenceEngine, ...] = (cpp, float64)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; CUDA builds of torch bring it."""
    return importlib.util.find_spec("triton") is not None


@overload
def choose(task: Literal["rows"], student: Tensor, teacher: Tensor) -> RowEngine: ...


@overload
def choose(task: Literal["divergences"], student: Tensor, teacher: Tensor) -> DivergenceEngine: ...


def choose(task: Literal["rows", "divergences"], student: Tensor, teacher: Tensor) -> RowEngine | DivergenceEngine:
    """The engine for SPOD's `rows` or SDPO's `divergences` of these (N, V) logits: the first that serves them.

    float64 serves all of them. So it does a divergence in a graph that torch compiles; rows are opaque operators there.
    """
    if task == "divergences" and torch.compiler.is_compiling():
        return float64
    candidates = ROWS if task == "rows" else DIVERGENCES
    if student.is_cuda and has_triton():
        from .triton import divergence, rows

        candidates = (rows if task == "rows" else divergence, *candidates)
    return next(engine for engine in candidates if engine.serves(student, teacher))
