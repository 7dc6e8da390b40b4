"""The importance-sampling policy-gradient loss of the Tinker service, and its gradient."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Row = Sequence[float] | NDArray[np.floating]


def _row(values: Row, name: str) -> NDArray[np.float64]:
    row = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    if row.ndim != 1:
        raise ValueError(f"importance_sampling_loss: {name} have shape {row.shape}; one row of shape (T,) is expected")
    return row


def _checked(
    logprobs: Row, sampler_logprobs: Row, advantages: Row
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    new, old, weight = (
        _row(logprobs, "logprobs"),
        _row(sampler_logprobs, "sampler_logprobs"),
        _row(advantages, "advantages"),
    )
    if not new.shape == old.shape == weight.shape:
        raise ValueError(
            f"importance_sampling_loss: shapes differ: logprobs {new.shape}, sampler_logprobs {old.shape}, "
            f"advantages {weight.shape}"
        )
    for t in range(len(weight)):
        if weight[t] == 0.0:
            continue
        if not math.isfinite(weight[t]):
            raise ValueError(f"importance_sampling_loss: the advantage at position {t} is {weight[t]}")
        if math.isnan(new[t]) or new[t] == math.inf:
            raise ValueError(f"importance_sampling_loss: the logprob at position {t} is {new[t]}")
        if not math.isfinite(old[t]):
            raise ValueError(f"importance_sampling_loss: the sampler logprob at position {t} is {old[t]}")
    return new, old, weight


def importance_sampling_loss(logprobs: Row, sampler_logprobs: Row, advantages: Row) -> float:
    """`-sum_t exp(logprobs_t - sampler_logprobs_t) * advantages_t` of one sequence (T,), in nats, a sum and no mean.

    A position with advantage exactly 0 is not read (NaN and None may stand there).
    ValueError: shapes differ, or a value that is read is NaN, +inf, or a sampler logprob of -inf.
    Source: the documented `importance_sampling` loss of the Tinker service.
    """
    new, old, weight = _checked(logprobs, sampler_logprobs, advantages)
    terms = [float(weight[t] * _ratio(new[t] - old[t])) for t in range(len(weight)) if weight[t] != 0.0]
    return -(math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)) + 0.0


def importance_sampling_grad(logprobs: Row, sampler_logprobs: Row, advantages: Row) -> NDArray[np.float64]:
    """d `importance_sampling_loss` / d logprobs (T,): `-exp(logprobs_t - sampler_logprobs_t) * advantages_t`.

    Exactly 0 where the advantage is 0. ValueError as `importance_sampling_loss`.
    """
    new, old, weight = _checked(logprobs, sampler_logprobs, advantages)
    grad = np.zeros(len(weight), dtype=np.float64)
    for t in range(len(weight)):
        if weight[t] != 0.0:
            grad[t] = -_ratio(new[t] - old[t]) * weight[t]
    return grad


def _ratio(log_ratio: float) -> float:
    return float(np.exp(np.minimum(log_ratio, 709.0))) if log_ratio <= 709.0 else math.inf
