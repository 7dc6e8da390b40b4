"""The logit level on a service that knows only cross-entropy: weights with the gradient of the divergence."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..buckets import DIVERGENCES, TAIL_CAP
from ..checks import refuse_where, rows_are_distributions
from ..numerics import log_mixture

SMALLEST_TAIL = 1e-6  # below it the cap of the tail is near, and the tail is dropped


class ServiceWeights(NamedTuple):
    """Weights (N, K) float64 for a service's `cross_entropy`, and where (N,) the tail was too small to use."""

    weights: Tensor
    tail_dropped: Tensor


def cross_entropy_weights(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    divergence: str = "reverse_kl",
    mixture: float = 0.5,
    tail: bool = True,
) -> ServiceWeights:
    """Weights w (N, K) float64 with which `-sum w log p(x)` has, on policy, the gradient of the bucketed divergence.

    (N, K) log-probabilities of the same K distinct tokens under student and teacher, each of the full vocabulary, in
    nats. With `tail` the rest is one bucket, except where the student's is below 1e-6; without it, and there, both are
    renormalised over the K. Summed, not averaged: multiply a row by its weight in the batch. ValueError: shapes,
    options, and a row (named) with NaN, +inf, no finite entry, or a teacher of -inf where the divergence would be +inf.
    Obligations: sdpo/service_weights, sdpo/service_gradient.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"cross_entropy_weights: divergence is {divergence!r}; it is one of {', '.join(DIVERGENCES)}")
    if divergence == "jsd" and not 0.0 < mixture < 1.0:
        raise ValueError(f"cross_entropy_weights: mixture is {mixture}; it lies strictly inside (0, 1)")
    p, q = student_logprobs.detach().double(), teacher_logprobs.detach().double()
    if p.ndim != 2 or p.shape != q.shape or p.shape[1] == 0:
        raise ValueError(
            f"cross_entropy_weights: shapes are {tuple(p.shape)} and {tuple(q.shape)}; (N, K) twice is expected"
        )
    rows_are_distributions(p, "cross_entropy_weights: student")
    rows_are_distributions(q, "cross_entropy_weights: teacher")
    if divergence == "reverse_kl":
        refuse_where(
            (q == -math.inf) & (p > -math.inf), q, "cross_entropy_weights: the teacher logprob", "; KL is +inf"
        )
    inside = _renormalised_weights(p, q, divergence, mixture)
    mass = p.logsumexp(-1, keepdim=True)
    dropped = -torch.expm1(mass) < SMALLEST_TAIL
    if not tail:
        return ServiceWeights(inside, torch.zeros_like(dropped[:, 0]))
    weights = torch.where(dropped, inside, _tail_weights(p, q, divergence, mixture))
    return ServiceWeights(weights, dropped[:, 0])


def _tail_weights(log_p: Tensor, log_q: Tensor, divergence: str, mixture: float) -> Tensor:
    p_tail, q_tail = (
        torch.log(-torch.expm1(row.logsumexp(-1, keepdim=True).clamp(max=TAIL_CAP))) for row in (log_p, log_q)
    )
    p = log_p.exp()
    if divergence == "forward_kl":
        return log_q.exp() - (q_tail - p_tail).exp() * p
    if divergence == "reverse_kl":
        return torch.where(p > 0, -p * (log_p - log_q - (p_tail - q_tail)), 0.0)
    of_tail = p_tail - log_mixture(p_tail, q_tail, mixture)
    return torch.where(p > 0, -(1.0 - mixture) * p * (log_p - log_mixture(log_p, log_q, mixture) - of_tail), 0.0)


def _renormalised_weights(log_p: Tensor, log_q: Tensor, divergence: str, mixture: float) -> Tensor:
    log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    p = log_p.exp()
    if divergence == "forward_kl":
        return log_q.exp() - p
    other = log_q if divergence == "reverse_kl" else log_mixture(log_p, log_q, mixture)
    ratio = torch.where(p > 0, log_p - other, 0.0)
    scale = 1.0 if divergence == "reverse_kl" else 1.0 - mixture
    return -scale * p * (ratio - (p * ratio).sum(-1, keepdim=True))
