"""Samples that two seeds share are reported, and are no departure: no page says that they may not be."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from paritygate.service.checks import CHECKS, sampling
from paritygate.service.client import Sample, Sampled
from paritygate.service.outcome import Undecided


@dataclass
class Sampler:
    """Sample i of seed s has the tokens of `stride` * s + i."""

    stride: int

    def sample(self, prompt: Any, count: int, *, seed: int, max_tokens: int, **params: Any) -> Sampled:
        streams = [np.random.default_rng(self.stride * seed + index) for index in range(count)]
        return Sampled(
            [Sample(tuple(r.integers(0, 99, max_tokens).tolist()), None, False) for r in streams], None, None
        )


def measured(stride: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    trained: Any = sampling.Trained(None, Sampler(stride), (1, 2))  # type: ignore[arg-type]
    monkeypatch.setattr(sampling, "trained", lambda lab: trained)
    return CHECKS["sampling/seed_neighbours"](None)  # type: ignore[arg-type]


def test_samples_of_neighbouring_seeds_that_are_shared_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Undecided, match=r"5 of 6 samples of seed 24 are samples of seed 23, too.* num_samples"):
        measured(1, monkeypatch)


def test_those_that_are_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(1000, monkeypatch).figure == 0
