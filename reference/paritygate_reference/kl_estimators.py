"""Estimators of KL(p || q) from the log-probabilities of tokens sampled from p, and their gradients, token by token.

With r = q(a) / p(a) of the sampled token: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. Under p, k1 and k3 have
the expectation KL(p || q), k2 only nearly. As losses they differ in another way: backpropagated through log p at
tokens held fixed, the expected gradient of k1 is 0, of k2 that of KL(p || q), of k3 that of KL(q || p).
Source: J. Schulman, Approximating KL divergence (2020), joschu.net/blog/kl-approx.html.
Obligations: kl_estimators/value, kl_estimators/gradient, kl_estimators/constants, kl_estimators/expected_value,
kl_estimators/expected_gradient, kl_estimators/k3_is_no_reverse_kl, kl_estimators/near_equal, kl_estimators/oracle.
"""

import math

import numpy as np
from numpy.typing import NDArray

from . import _checks
from ._checks import Array, Mask, Row
from ._distributions import exact_sum, exp_excess

ESTIMATORS = ("k1", "k2", "k3")


def k1(logprobs: Row, reference_logprobs: Row, mask: Mask) -> Array:
    """`log p - log q`, (T,) in nats, of either sign; 0 at mask 0, where nothing is read. ValueError as `k3`."""
    p, q, used = _rows("k1", logprobs, reference_logprobs, mask)
    return np.where(used, p - q, 0.0)


def k2(logprobs: Row, reference_logprobs: Row, mask: Mask) -> Array:
    """`(log p - log q)^2 / 2`, (T,) in nats; 0 at mask 0, where nothing is read. ValueError as `k3`."""
    p, q, used = _rows("k2", logprobs, reference_logprobs, mask)
    return np.where(used, (p - q) ** 2 / 2.0, 0.0)


def k3(logprobs: Row, reference_logprobs: Row, mask: Mask) -> Array:
    """`q/p - 1 - log(q/p)`, (T,) in nats, never negative; 0 at mask 0, where nothing is read.

    ValueError: shapes differ, a mask that is not 0 or 1, and at mask 1 a logprob that is not finite.
    """
    p, q, used = _rows("k3", logprobs, reference_logprobs, mask)
    return np.where(used, exp_excess(q - p), 0.0)


def k1_grad(logprobs: Row, reference_logprobs: Row, mask: Mask) -> Array:
    """d k1_t / d logprobs_t, (T,): 1 at mask 1. ValueError as `k3`."""
    _, _, used = _rows("k1", logprobs, reference_logprobs, mask)
    return used.astype(np.float64)


def k2_grad(logprobs: Row, reference_logprobs: Row, mask: Mask) -> Array:
    """d k2_t / d logprobs_t, (T,): `log p - log q`. ValueError as `k3`."""
    return k1(logprobs, reference_logprobs, mask)


def k3_grad(logprobs: Row, reference_logprobs: Row, mask: Mask) -> Array:
    """d k3_t / d logprobs_t, (T,): `1 - q/p`. ValueError as `k3`."""
    p, q, used = _rows("k3", logprobs, reference_logprobs, mask)
    with np.errstate(over="ignore"):  # -inf where float64 has no number as large
        return np.where(used, -np.expm1(q - p), 0.0)


def surrogate(logprobs: Row, reference_logprobs: Row, mask: Mask) -> Array:
    """A value whose gradient is the claim: k3 to look at, k2's gradient to train with, (T,). ValueError as `k3`."""
    return k3(logprobs, reference_logprobs, mask)


def surrogate_grad(logprobs: Row, reference_logprobs: Row, mask: Mask) -> Array:
    """What `surrogate` is differentiated to, (T,): `log p - log q`, whose expectation is the reverse KL's gradient."""
    return k2_grad(logprobs, reference_logprobs, mask)


def mean_kl(logprobs: Row, reference_logprobs: Row, mask: Mask, estimator: str = "k3") -> float:
    """The metric: the mean of the estimator over mask 1, in nats. ValueError as `k3`, and where nothing is read.

    Obligations: kl_estimators/mean.
    """
    _checks.one_of("mean_kl", "estimator", estimator, ESTIMATORS)
    values = {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs, reference_logprobs, mask)
    tokens = int(np.count_nonzero(np.asarray(mask)))
    if tokens == 0:
        raise ValueError("mean_kl: every position is masked; a mean of nothing does not exist")
    return exact_sum(values, tokens)


def _rows(name: str, logprobs: Row, reference_logprobs: Row, mask: Mask) -> tuple[Array, Array, NDArray[np.bool_]]:
    """log p, log q and the mask as booleans, (T,); at mask 0 both are 0."""
    if not len(logprobs) == len(reference_logprobs) == len(mask):
        raise ValueError(
            f"{name}: shapes differ: logprobs {len(logprobs)}, reference_logprobs {len(reference_logprobs)}, "
            f"mask {len(mask)}"
        )
    used = _checks.zero_or_one(name, np.asarray(mask))
    p, q = np.zeros(len(used)), np.zeros(len(used))
    for t in np.flatnonzero(used).tolist():
        for what, values, row in (("logprob", logprobs, p), ("reference logprob", reference_logprobs, q)):
            value = values[t]
            if value is None or not math.isfinite(value):
                raise ValueError(f"{name}: the {what} at position {t} is {value}")
            row[t] = value
    return p, q, used
