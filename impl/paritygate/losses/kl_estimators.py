"""Estimators of KL(p || q) from log-probabilities of tokens sampled from p: k1, k2, k3, as losses and as a metric.

Values (..., T) in nats, differentiable in `logprobs` alone, 0 at mask 0, where nothing is read; `mask` None reads all.
With r = q/p of the sampled token k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. The expectation under p of k1 and
k3 is KL(p || q). The expected gradient is 0 for k1, that of KL(p || q) for k2 and that of KL(q || p) for k3: k3 used as
a loss is no reverse KL; `surrogate` is. Source: J. Schulman, Approximating KL divergence (2020).
Obligations: kl_estimators/value, kl_estimators/gradient, kl_estimators/constants, kl_estimators/expected_value,
kl_estimators/expected_gradient, kl_estimators/k3_is_no_reverse_kl, kl_estimators/near_equal.
"""

from typing import Any, cast

import torch
from torch import Tensor

from .checks import as_float, as_mask, refuse_where, result_dtype, same_shape
from .numerics import total

SERIES = 0.02  # below this log ratio exp(d) - 1 - d is taken from its series


def k1(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor | None = None, *, validate: bool = True) -> Tensor:
    """`log p - log q`, (..., T) nats, of either sign. ValueError as `k3`."""
    log_r, used, dtype = _log_ratio("k1", logprobs, reference_logprobs, mask, validate)
    return torch.where(used, -log_r, 0.0).to(dtype)


def k2(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor | None = None, *, validate: bool = True) -> Tensor:
    """`(log p - log q)^2 / 2`, (..., T) nats. ValueError as `k3`."""
    log_r, used, dtype = _log_ratio("k2", logprobs, reference_logprobs, mask, validate)
    return torch.where(used, log_r / 2.0 * log_r, 0.0).to(dtype)


def k3(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor | None = None, *, validate: bool = True) -> Tensor:
    """`q/p - 1 - log(q/p)`, (..., T) nats, never negative.

    ValueError: shapes differ; with `validate`, a mask that is not 0 or 1 and a logprob that is read and not finite.
    """
    log_r, used, dtype = _log_ratio("k3", logprobs, reference_logprobs, mask, validate)
    return torch.where(used, _excess(log_r), 0.0).to(dtype)


def surrogate(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor | None = None, *, validate: bool = True
) -> Tensor:
    """k3's value with k2's gradient, (..., T): its expected gradient is that of KL(p || q). ValueError as `k3`."""
    log_r, used, dtype = _log_ratio("surrogate", logprobs, reference_logprobs, mask, validate)
    return torch.where(used, cast("Tensor", _Surrogate.apply(log_r)), 0.0).to(dtype)


def mean_kl(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, estimator: str = "k3", *, validate: bool = True
) -> Tensor:
    """The metric: the mean of k1, k2 or k3 over mask 1 of the whole batch, () nats, a constant.

    ValueError as `k3`, another estimator, and with `validate` a batch in which nothing is read.
    Obligations: kl_estimators/mean.
    """
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"mean_kl: estimator is {estimator!r}; it is one of k1, k2, k3")
    log_r, used, dtype = _log_ratio("mean_kl", logprobs.detach(), reference_logprobs, mask, validate)
    if validate and not bool(used.any()):
        raise ValueError("mean_kl: every position is masked; a mean of nothing does not exist")
    values = {"k1": -log_r, "k2": log_r / 2.0 * log_r, "k3": _excess(log_r)}[estimator]
    return total(torch.where(used, values, 0.0), over=used.sum()).to(dtype)


class _Surrogate(torch.autograd.Function):
    """k3 of a log ratio, whose backward is k2's: no value of k2 is made, which may be infinite."""

    @staticmethod
    def forward(ctx: Any, log_r: Tensor) -> Tensor:
        ctx.save_for_backward(log_r)
        return _excess(log_r)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (log_r,) = ctx.saved_tensors
        return log_r * upstream[0]


def _excess(d: Tensor) -> Tensor:
    """`exp(d) - 1 - d`, which cancels near 0: there by its series."""
    near = d.abs() < SERIES
    e = torch.where(near, d, 0.0)  # where it is not used, a series that overflows has a gradient of NaN
    series = e * e / 2 * (1 + e / 3 * (1 + e / 4 * (1 + e / 5 * (1 + e / 6 * (1 + e / 7)))))
    return torch.where(near, series, torch.expm1(d) - d)


def _log_ratio(
    name: str, logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor | None, validate: bool
) -> tuple[Tensor, Tensor, torch.dtype]:
    """log(q/p) in float64, 0 where it is not read; what is read; the dtype of the result."""
    p = as_float(logprobs, "logprobs")
    q = as_float(reference_logprobs, "reference_logprobs").detach()
    same_shape(name, logprobs=p, reference_logprobs=q)
    used = torch.ones_like(p, dtype=torch.bool) if mask is None else as_mask(mask, p, name, validate=validate)
    same_shape(name, logprobs=p, mask=used)
    if validate:
        refuse_where(used & ~torch.isfinite(p), p, f"{name}: the logprob")
        refuse_where(used & ~torch.isfinite(q), q, f"{name}: the reference logprob")
    return torch.where(used, q.double() - p.double(), 0.0), used, result_dtype(p)
