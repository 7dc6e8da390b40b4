"""The chi-square of drawn tokens: right draws pass, and temperature, a cut tail, a wrong token do not."""

from collections import Counter

import numpy as np
import pytest

from paritygate.service.checks.chi_square import chi_square
from paritygate.service.outcome import Undecided

VOCABULARY = 400


def drawn(
    logits: np.ndarray, count: int, seed: int, top_k: int = VOCABULARY
) -> tuple[dict[int, int], dict[int, float]]:
    """Counts of `count` draws from the `top_k` likeliest tokens, and the logprobs of the whole distribution."""
    logprobs = logits - np.log(np.exp(logits).sum())
    p = np.exp(logprobs)
    p[np.argsort(-p)[top_k:]] = 0
    tokens = np.random.default_rng(seed).choice(VOCABULARY, count, p=p / p.sum())
    counts = Counter(int(token) for token in tokens)
    return dict(counts), {token: float(logprobs[token]) for token in counts}


def logits(seed: int, spread: float = 1.0) -> np.ndarray:
    return np.random.default_rng(1000 + seed).normal(size=VOCABULARY) * spread


@pytest.mark.parametrize(("count", "spread"), [(1024, 1.0), (2048, 0.3), (2048, 1.0), (4096, 3.0)])
def test_right_draws_pass(count: int, spread: float) -> None:
    """In 60 runs each, at the three temperatures that are checked."""
    for seed in range(60):
        try:
            assert chi_square(*drawn(logits(seed, spread), count, seed), 1.0, rest="all") < 1
            for temperature in (0.5, 2.0):
                counts, tempered = drawn(logits(seed, spread) / temperature, count, seed)
                model = logits(seed, spread)
                logprobs = {token: float(model[token] - np.log(np.exp(model).sum())) for token in tempered}
                assert chi_square(counts, logprobs, temperature, rest="none") < 1
        except Undecided:
            continue


@pytest.mark.parametrize("seed", range(10))
def test_wrong_draws_do_not(seed: int) -> None:
    right = logits(seed)
    assert chi_square(*drawn(right, 1024, seed), 0.5, rest="seen") > 4  # another temperature
    counts, cold = drawn(right / 0.5, 1024, seed)
    logprobs = {token: float(right[token] - np.log(np.exp(right).sum())) for token in cold}
    assert chi_square(counts, logprobs, 1.0, rest="all") > 4
    assert chi_square(*drawn(right, 1024, seed, top_k=50), 1.0, rest="all") > 4  # a hidden top-k
    counts, logprobs = drawn(right, 2048, seed)
    token = max(counts, key=counts.__getitem__)
    counts[token] *= 3
    assert chi_square(counts, logprobs, 1.0, rest="all") > 1


def test_a_certain_token_decides_nothing() -> None:
    with pytest.raises(Undecided):
        chi_square({3: 512}, {3: -1e-9}, 1.0, rest="all")
