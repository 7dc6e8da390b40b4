"""What keeps digits: log-softmax, the tail of a truncated vocabulary, KL, mixture and their gradients, in float64.

Parity compares at 1e-12. Written as in the papers these formulas keep fewer digits than that: `1 - sum(p)` of a small
tail, `p log(p/q)` of nearly equal rows, `log(p/q) - KL` between logits of +-65504. Here they are rearranged; the
60-digit oracle, written as in the papers, holds them to what they mean.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

TAIL_CAP = -1e-7  # the log of the kept mass is capped here, as in the official SDPO code at 0e6d5106


def exp(x: Array) -> Array:
    """`e^x`; +inf where float64 has no larger number."""
    with np.errstate(over="ignore"):
        return np.exp(x)


def exact_sum(terms: Array | Sequence[float], count: int = 1) -> float:
    """Their sum over `count`: two terms that cancel leave no residue of a third, and no partial sum is too large.

    A result beyond float64 is infinite. Infinities add as IEEE 754 says.
    """
    values = [float(term) for term in terms]
    if not all(map(math.isfinite, values)):
        return sum(value for value in values if not math.isfinite(value))
    try:
        return math.fsum(values) / count
    except OverflowError:
        exact = sum(map(Fraction, values), Fraction(0)) / count
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def log_softmax(logits: ArrayLike, place: str = "row") -> Array:
    """Log-probabilities of a row of logits (V,), -inf allowed; ValueError naming `place`: NaN, +inf, all -inf."""
    row = np.asarray(logits, dtype=np.float64)
    largest = row.max(initial=-math.inf)  # NaN where there is one
    if not largest < math.inf:
        raise ValueError(f"{place} holds {'NaN' if math.isnan(largest) else '+inf'}")
    if largest == -math.inf:
        raise ValueError(f"{place} is all -inf: it is no distribution")
    top = int(np.argmax(row))
    with np.errstate(over="ignore"):  # 2e308 below the largest is as good as -inf
        shifted = row - largest
    others = np.delete(np.exp(shifted), top).sum()  # without the 1 of the largest, so that a sharp row keeps its digits
    return shifted - np.log1p(others)


class Distribution(NamedTuple):
    """Log-probabilities of the kept entries and, last, of the tail where there is one."""

    log: Array
    excess: float  # how far the probabilities sum above 1: not 0 only where the cap acts
    has_tail: bool
    capped: bool


def bucketed(log_p: Array, kept: NDArray[np.intp], use_tail: bool) -> Distribution:
    """The `kept` entries of log-probabilities (V,), with log(1 - their sum) as a last one where `use_tail`."""
    if not use_tail:
        return Distribution(log_p[kept], 0.0, False, False)
    smallest = -math.expm1(TAIL_CAP)
    rest = float(np.delete(np.exp(log_p), kept).sum())  # not 1 - the kept: a small tail keeps its digits
    return Distribution(
        log=np.append(log_p[kept], math.log(max(rest, smallest))),
        excess=max(smallest - rest, 0.0),
        has_tail=True,
        capped=rest < smallest,
    )


def renormalised(logits: Array, kept: NDArray[np.intp], place: str, whose: str = "student") -> Array:
    """Log-probabilities (V,) of the `kept` entries alone, -inf elsewhere; ValueError naming `place`: they have none."""
    if (logits[kept] == -math.inf).all():
        raise ValueError(f"{place} has no probability among the {whose}'s top_k: it cannot be renormalised")
    inside = np.full_like(logits, -math.inf)
    inside[kept] = log_softmax(logits[kept], place)
    return inside


def kl(a: Distribution, b: Distribution) -> float:
    """`sum_i a_i log(a_i / b_i)`, a capped tail included, which makes a distribution sum to more than 1."""
    return kl_divergence(a.log, b.log) + a.excess - b.excess


def mixture(p: Distribution, q: Distribution, a: float) -> Distribution:
    """`(1 - a) p + a q`."""
    excess = (1.0 - a) * p.excess + a * q.excess
    return Distribution(log_mixture(p.log, q.log, a), excess, p.has_tail, p.capped and q.capped)


def kl_divergence(log_a: Array, log_b: Array) -> float:
    """KL(a || b) in nats of two rows of log-probabilities with equal sums; 0 log 0 is 0, a > 0 against b = 0 is +inf.

    Summed as `a log(a/b) - a + b`, whose terms are not negative, so that nearly equal rows keep their digits.
    """
    a, b = np.exp(log_a), np.exp(log_b)
    support = a > 0.0
    if (log_b[support] == -math.inf).any():
        return math.inf
    d = log_a[support] - log_b[support]
    near = np.abs(d) < 0.5
    terms = np.where(near, a[support] * exp_excess(np.where(near, -d, 0.0)), a[support] * d - a[support] + b[support])
    return float(terms.sum() + b[~support].sum())


def exp_excess(x: Array) -> Array:
    """`e^x - 1 - x`, by its Taylor series where |x| < 0.5: there the difference would cancel; +inf as `exp`."""
    near = np.abs(x) < 0.5
    small = np.where(near, x, 0.0)
    term, series = small * small / 2.0, np.zeros_like(x)
    for n in range(3, 20):
        series += term
        term *= small
        term /= n
    return np.where(near, series, exp(x) - 1.0 - x)


def log_mixture(log_p: Array, log_q: Array, a: float) -> Array:
    """log((1-a) p + a q), written from the larger of the two so that nearly equal rows keep their digits."""
    mixed = np.full_like(log_p, -math.inf)
    p_larger, q_larger = (log_p >= log_q) & (log_p > -math.inf), log_q > log_p
    x, y = log_p[p_larger], log_q[p_larger]
    mixed[p_larger] = x + np.log1p(a * np.expm1(y - x))
    x, y = log_p[q_larger], log_q[q_larger]
    mixed[q_larger] = y + np.log1p((1.0 - a) * np.expm1(x - y))
    return mixed


class Slopes(NamedTuple):
    """dD/dp of a divergence, as `p_i (g_i - shift)` of each kept entry and of the tail, and the number `shift`.

    A number added to every g_i changes no gradient of logits, since the p_i sum to 1: what is large in all is left out.
    """

    weighted: Array
    shift: float


def forward_kl_slopes(p: Distribution, q: Distribution) -> Slopes:
    """KL(q || p): `g_i = -q_i / p_i`."""
    return Slopes(-np.exp(q.log), 0.0)


def reverse_kl_slopes(p: Distribution, q: Distribution, log_ratio: Array) -> Slopes:
    """KL(p || q): `g_i = log(p_i / q_i) + 1`, 0 where p_i is 0.

    `log_ratio` of the kept entries is log(p_i / q_i) less that of the largest p_i kept, from the logits exactly:
    between logits of +-65504 the g_i are large and nearly equal. Where the tail is the largest it is less the tail's.
    """
    if p.has_tail and p.log[-1] > math.log(0.5):
        of_tail = p.log[-1] - q.log[-1]
        with np.errstate(invalid="ignore"):  # -inf - -inf, where the student has no probability
            g = p.log - q.log - of_tail
        return Slopes(_where_positive(np.exp(p.log), g), of_tail + 1.0)
    top = int(np.argmax(p.log[: len(log_ratio)]))
    of_largest = p.log[top] - q.log[top]
    g = np.append(log_ratio, p.log[-1] - q.log[-1] - of_largest) if p.has_tail else log_ratio
    return Slopes(_where_positive(np.exp(p.log), g), of_largest + 1.0)


def jsd_slopes(p: Distribution, q: Distribution, a: float) -> Slopes:
    """(1-a) KL(p || m) + a KL(q || m), m = (1-a) p + a q: `g_i = (1-a) log(p_i / m_i)`, 0 where p_i is 0."""
    with np.errstate(invalid="ignore"):  # -inf - -inf where p_i and m_i are 0
        g = p.log - log_mixture(p.log, q.log, a)
    return Slopes(_where_positive((1.0 - a) * np.exp(p.log), g), 0.0)


def _where_positive(weight: Array, g: Array) -> Array:
    result = np.zeros_like(weight)
    result[weight > 0.0] = weight[weight > 0.0] * g[weight > 0.0]
    return result


def logit_gradient(p: Distribution, student: Array, kept: NDArray[np.intp], slopes: Slopes) -> Array:
    """`dD/dz_j = p_j (g_b(j) - sum_b p_b g_b)` of the student's probabilities (V,), b(j) the kept entry or the tail.

    NaN where the sum is not finite (the teacher excludes what the student does). A capped tail is a constant, g = 0.
    """
    weighted, shift = slopes
    if p.capped:
        weighted[-1] = 0.0
    total = float(weighted.sum())
    if not math.isfinite(total + float(shift)):
        return np.full_like(student, math.nan)
    grad = -student * total
    grad[kept] += weighted[: len(kept)]
    if p.has_tail:
        dropped = np.ones(len(student), dtype=bool)
        dropped[kept] = False
        grad[dropped] += student[dropped] * (weighted[-1] / np.exp(p.log[-1]))
        if p.capped:  # the p_b sum to more than 1: the shift that was left out of every g but the tail's
            rest = student[dropped].sum()
            grad[kept] += student[kept] * shift * rest
            grad[dropped] -= student[dropped] * shift * (1.0 - rest)
    return grad
