"""How far two judges agree on the same trajectories."""

import math
from collections.abc import Sequence

from paritygate.agent.judge.judgement import Judgement
from paritygate.spec.protocol import DIMENSIONS


def agreement(
    first: Sequence[Judgement | None], second: Sequence[Judgement | None]
) -> dict[str, dict[str, float | None]]:
    """Per dimension and for the composite, over the trajectories that both judged: n, mean |difference|, correlation.

    correlation is Pearson's, None when it is undefined (fewer than two pairs, or a judge that never varies). Raises
    ValueError when the two lists differ in length.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    return {
        name: _compare([(float(getattr(a, name)), float(getattr(b, name))) for a, b in pairs])
        for name in (*DIMENSIONS, "composite")
    }


def _compare(pairs: list[tuple[float, float]]) -> dict[str, float | None]:
    n = len(pairs)
    difference = math.fsum(abs(a - b) for a, b in pairs) / n if n else None
    return {"n": float(n), "mean_abs_difference": difference, "correlation": _pearson(pairs)}


def _pearson(pairs: list[tuple[float, float]]) -> float | None:
    if len(pairs) < 2:
        return None
    means = [math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True)]
    xs, ys = ([value - mean for value in column] for column, mean in zip(zip(*pairs, strict=True), means, strict=True))
    scale = math.sqrt(math.fsum(x * x for x in xs) * math.fsum(y * y for y in ys))
    return math.fsum(x * y for x, y in zip(xs, ys, strict=True)) / scale if scale > 0 else None
