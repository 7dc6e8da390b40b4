"""Slopes at several eps: those of g / (|g| + eps) are explained whatever the gradients are, a floor's are not."""

import numpy as np
import pytest

from paritygate.service.checks.eps import SPREAD, explained, floors, sums

VALUES = np.geomspace(SPREAD[0] * 1e-4, SPREAD[-1] * 1e4, 160)


def gradients(seed: int, spread: float) -> np.ndarray:
    """Products of two normal numbers, as of an outer product, times a log-normal one of standard deviation `spread`."""
    rng = np.random.default_rng(seed)
    outer = rng.normal(size=(40, 1)) * rng.normal(size=(1, 50))
    return np.abs(outer * np.exp(spread * rng.normal(size=outer.shape)))


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_sum_is_explained_whatever_the_gradients_are(seed: int, spread: float) -> None:
    g = gradients(seed, spread)
    gap, entries = explained(sums(g.ravel(), SPREAD) @ g.ravel(), sums(VALUES, SPREAD))
    assert gap < 1e-3
    assert entries.min() >= 0
    noisy = (sums(g.ravel(), SPREAD) @ g.ravel()) * (1 + 0.002 * np.random.default_rng(seed).normal(size=len(SPREAD)))
    assert explained(noisy, sums(VALUES, SPREAD))[0] < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_a_floor_is_not_and_how_far_it_is_follows_from_a_sum(seed: int) -> None:
    g = gradients(seed, 0.3)
    gap, _ = explained(floors(g.ravel(), SPREAD) @ g.ravel(), sums(VALUES, SPREAD))
    assert gap > 0.08  # four bounds
    _, entries = explained(sums(g.ravel(), SPREAD) @ g.ravel(), sums(VALUES, SPREAD))
    predicted, _ = explained(floors(VALUES, SPREAD) @ entries, sums(VALUES, SPREAD))
    assert predicted == pytest.approx(gap, rel=0.5)
