"""Whether counted tokens follow a distribution: Pearson's chi-square, cells of few expected counts put together."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paritygate.service.outcome import Undecided

EXPECTED = 8.0  # a token has a bin of its own where so many draws are expected
CHI_P = 5.2  # standard normal deviate of p = 1e-7
LIMIT = 6.0  # deviations of a mean or a share, on either side: more, since neither is quite normal

Array = NDArray[np.float64]


def chi_square(
    counts: Mapping[int, float],
    logprobs: Mapping[int, float],
    temperature: float,
    *,
    rest: Literal["all", "seen", "none"],
) -> float:
    """Chi-square of drawn tokens over its critical value at p = 1e-7, the largest of some statistics.

    A bin for each token that is expected often enough sees a single wrong token; some 16 bins of tokens in the order
    of their probability see a wrong temperature in fewer draws. Rarer tokens were chosen by being drawn, so they are
    one bin together: with "all" others, where the probability of the frequent ones is known (temperature 1); with what
    was "seen" alone, which is a little less than all; or with "none". The mean logprob of the frequent tokens sees a
    wrong temperature in fewer draws still. With "none", below temperature 1, so does the share of the others: tempering
    favours none of them more than the rarest of the frequent ones.
    """
    total = sum(counts.values())
    order = sorted(counts, key=lambda token: -logprobs[token])
    p = np.exp(np.array([logprobs[token] for token in order]) / temperature)
    p = p if rest == "all" else p / p.sum()
    often = p * total >= EXPECTED
    seen = np.array([counts[token] for token in order], float)[often]
    expected = p[often] / p[often].sum() * seen.sum() if rest == "none" else p[often] * total
    others = [] if rest == "none" else [(total - float(expected.sum()), total - float(seen.sum()))]
    pairs = list(zip(expected.tolist(), seen.tolist(), strict=True))
    statistics = [_statistic(pairs, others, least) for least in (EXPECTED, total / 16)]
    if len(seen) > 2:
        values = np.array([logprobs[token] for token in order])
        statistics.append(_mean_statistic(values[often], seen, temperature))
        if rest == "none" and temperature < 1:
            statistics.append(_others_statistic(values, often, total, float(seen.sum()), temperature))
    decided = [statistic for statistic in statistics if statistic is not None]
    if not decided:
        raise Undecided(f"of {total} draws too few tokens are expected {EXPECTED:g} times")
    return max(decided)


def _mean_statistic(logprobs: Array, seen: Array, temperature: float) -> float | None:
    """How far the mean logprob of `seen` draws is from that of the tempered distribution, in LIMIT deviations."""
    p = np.exp((logprobs - logprobs.max()) / temperature)
    p /= p.sum()
    mean, draws = float(p @ logprobs), float(seen.sum())
    deviation = np.sqrt(float(p @ (logprobs - mean) ** 2) / draws)
    if draws < 100 or deviation < 1e-3:
        return None
    return abs(float(seen @ logprobs) / draws - mean) / deviation / LIMIT


def _others_statistic(
    logprobs: Array, often: NDArray[np.bool_], total: float, seen: float, temperature: float
) -> float:
    """Draws of rare tokens over the most that is plausible, in LIMIT deviations.

    Those that were not drawn have what is left at temperature 1, times exp(logprob (1 / temperature - 1)) at most.
    """
    tempered = np.exp(logprobs / temperature)
    left = max(1 - float(np.exp(logprobs).sum()), 0.0) * float(np.exp(logprobs[often].min() * (1 / temperature - 1)))
    rare = float(tempered[~often].sum()) + left
    share = rare / (float(tempered[often].sum()) + rare)
    return (total - seen) / (total * share + LIMIT * np.sqrt(total * share * (1 - share)) + LIMIT)


def _statistic(tokens: list[tuple[float, float]], rest: list[tuple[float, float]], least: float) -> float | None:
    """Chi-square over its critical value (Wilson and Hilferty) of (expected, seen), neighbours joined to `least`."""
    bins: list[list[float]] = []
    for expected, seen in tokens:
        if bins and bins[-1][0] < least:
            bins[-1] = [bins[-1][0] + expected, bins[-1][1] + seen]
        else:
            bins.append([expected, seen])
    # Where nothing is left for the others, one draw of them is unlikely, and not impossible: logprobs are rounded.
    bins += [[expected + max(2.0 - expected, 0.0), seen + max(2.0 - expected, 0.0)] for expected, seen in rest]
    free = len(bins) - 1
    if free < 2:
        return None
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in bins)
    return statistic / (free * (1 - 2 / (9 * free) + CHI_P * np.sqrt(2 / (9 * free))) ** 3)
