"""Rows of log-probabilities: softmax, buckets of a truncated vocabulary, KL and mixture, with their digits kept."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

TAIL_CAP = -1e-7  # the log of the kept mass is capped here, as in the official SDPO code at 0e6d5106


def log_softmax(logits: ArrayLike, place: str = "row") -> Array:
    """Log-probabilities of a row of logits (V,), -inf allowed; ValueError naming `place`: NaN, +inf, all -inf."""
    row = np.asarray(logits, dtype=np.float64)
    if np.isnan(row).any() or (row == math.inf).any():
        raise ValueError(f"{place} holds {'NaN' if np.isnan(row).any() else '+inf'}")
    if row.size == 0 or (row == -math.inf).all():
        raise ValueError(f"{place} is all -inf: it is no distribution")
    top = int(np.argmax(row))
    shifted = row - row[top]
    others = np.delete(np.exp(shifted), top).sum()  # without the 1 of the largest, so that a sharp row keeps its digits
    return shifted - np.log1p(others)


class Buckets(NamedTuple):
    """A distribution over the kept entries and, last, the tail where there is one."""

    log: Array
    excess: float  # how far the probabilities sum above 1: not 0 only where the cap acts
    has_tail: bool
    capped: bool


def bucketed(log_p: Array, kept: NDArray[np.intp], use_tail: bool) -> Buckets:
    """The `kept` entries of log-probabilities (V,), with log(1 - their sum) as a last one where `use_tail`."""
    if not use_tail:
        return Buckets(log_p[kept], 0.0, False, False)
    smallest = -math.expm1(TAIL_CAP)
    rest = float(np.delete(np.exp(log_p), kept).sum())  # not 1 - the kept: a small tail keeps its digits
    return Buckets(
        log=np.append(log_p[kept], math.log(max(rest, smallest))),
        excess=max(smallest - rest, 0.0),
        has_tail=True,
        capped=rest < smallest,
    )


def renormalised(logits: Array, kept: NDArray[np.intp], place: str) -> Array:
    """Log-probabilities (V,) of the `kept` entries alone, -inf elsewhere; ValueError naming `place`: they have none."""
    if (logits[kept] == -math.inf).all():
        raise ValueError(f"{place} has no probability among the student's top_k: it cannot be renormalised")
    inside = np.full_like(logits, -math.inf)
    inside[kept] = log_softmax(logits[kept], place)
    return inside


def kl_divergence(log_a: Array, log_b: Array) -> float:
    """KL(a || b) in nats of two rows of log-probabilities with equal sums; 0 log 0 is 0, a > 0 against b = 0 is +inf.

    Summed as `a log(a/b) - a + b`, whose terms are not negative, so that nearly equal rows keep their digits.
    """
    a, b = np.exp(log_a), np.exp(log_b)
    read = a > 0.0
    if (log_b[read] == -math.inf).any():
        return math.inf
    d = log_a[read] - log_b[read]
    near = np.abs(d) < 0.5
    terms = np.where(near, a[read] * _exp_excess(np.where(near, -d, 0.0)), a[read] * d - a[read] + b[read])
    return float(terms.sum() + b[~read].sum())


def _exp_excess(x: Array) -> Array:
    """`exp(x) - 1 - x` without cancellation, for |x| < 0.5, by its Taylor series."""
    term, total = x * x / 2.0, np.zeros_like(x)
    for n in range(3, 20):
        total = total + term
        term = term * x / n
    return total


def log_mixture(log_p: Array, log_q: Array, a: float) -> Array:
    """log((1-a) p + a q), written from the larger of the two so that nearly equal rows keep their digits."""
    mixed = np.full_like(log_p, -math.inf)
    p_larger, q_larger = (log_p >= log_q) & (log_p > -math.inf), log_q > log_p
    x, y = log_p[p_larger], log_q[p_larger]
    mixed[p_larger] = x + np.log1p(a * np.expm1(y - x))
    x, y = log_p[q_larger], log_q[q_larger]
    mixed[q_larger] = y + np.log1p((1.0 - a) * np.expm1(x - y))
    return mixed
