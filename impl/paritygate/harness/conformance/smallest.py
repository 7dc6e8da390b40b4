"""The smallest input that departs in the same way: fewer rows, tokens and entries, then simpler numbers."""

from collections.abc import Callable, Iterator

import numpy as np

from paritygate.harness.conformance.functions import Arrays

SIMPLE = (0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0)


def smallest(arrays: Arrays, axes: dict[str, str], departs: Callable[[Arrays], bool], *, calls: int = 400) -> Arrays:
    """Shrink `arrays` as long as `departs` stays true, with at most `calls` of it.

    axes: the axes of each array by name ("BTV"); an index is taken from all arrays that share the axis.
    """
    left = [calls]

    def accept(candidate: Arrays) -> bool:
        left[0] -= 1
        return left[0] >= 0 and departs(candidate)

    changed = True
    while changed and left[0] > 0:
        changed = False
        for candidates in (shorter, simpler):
            again = True
            while again and left[0] > 0:
                again = False
                for candidate in candidates(arrays, axes):
                    if left[0] > 0 and accept(candidate):
                        arrays, changed, again = candidate, True, True
                        break
    return arrays


def shorter(arrays: Arrays, axes: dict[str, str]) -> Iterator[Arrays]:
    """Each way to take one index from one axis, from all arrays that have it."""
    for axis in dict.fromkeys("".join(axes[name] for name in arrays)):
        size = next(array.shape[axes[name].index(axis)] for name, array in arrays.items() if axis in axes[name])
        for index in reversed(range(size if size > 1 else 0)):
            yield {
                name: np.delete(array, index, axes[name].index(axis)) if axis in axes[name] else array
                for name, array in arrays.items()
            }


def simpler(arrays: Arrays, axes: dict[str, str]) -> Iterator[Arrays]:
    """Each way to make an array, or one number of it, simpler: never one that was simpler already."""
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            for at in np.argwhere(array == 0):
                yield replaced(arrays, name, tuple(at), 1)
            continue
        if (array != 0.0).any():
            yield {**arrays, name: np.zeros_like(array)}
        for at in map(tuple, np.argwhere(np.vectorize(rank, otypes=[float])(array) > 0)):
            for value in (*SIMPLE, *nearby(float(array[at]))):
                if rank(value) < rank(float(array[at])):
                    yield replaced(arrays, name, at, value)


def replaced(arrays: Arrays, name: str, at: tuple[int, ...], value: float) -> Arrays:
    """The same with one other number."""
    array = arrays[name].copy()
    array[at] = value
    return {**arrays, name: array}


def nearby(value: float) -> tuple[float, ...]:
    """The number with fewer digits."""
    return (round(value), round(value, 1), round(value, 2)) if np.isfinite(value) else ()


def rank(value: float) -> float:
    """How far from simple: 0 is the simplest, then SIMPLE in its order, then by digits; NaN and infinities last."""
    if value in SIMPLE:
        return float(SIMPLE.index(value))
    if not np.isfinite(value):
        return 1e6
    return 100.0 + len(repr(value))
