"""The divergences of SDPO over buckets: the entries that are kept and, where there is one, the tail of all others."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .numerics import kl_divergence, log_mixture

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
TAIL_CAP = -1e-7  # the log of the kept mass is capped here, as in the official SDPO code at 0e6d5106
SMALLEST_TAIL = -math.expm1(TAIL_CAP)


class Options(NamedTuple):
    """Which divergence, over which part of the vocabulary: all of it, or the top_k of one of the two and a tail."""

    divergence: str
    mixture: float = 0.5
    top_k: int | None = None
    tail: bool = True
    top_k_of: str = "student"


class Buckets(NamedTuple):
    """One side of each row over the entries kept and, last, their tail."""

    log: Tensor  # (n, K) log-probabilities, the tail last where there is one
    excess: Tensor | float  # (n,) how far the probabilities sum above 1: not 0 only where the cap acts
    capped: Tensor | None  # (n,)


def with_tail(selected: Tensor, rest: Tensor) -> Buckets:
    """Log-probabilities (n, k) and the probability of everything else (n,), which is capped."""
    capped = rest < SMALLEST_TAIL
    log_tail = rest.clamp(min=SMALLEST_TAIL).log()
    excess = torch.where(capped, SMALLEST_TAIL - rest, 0.0)
    return Buckets(torch.cat([selected, log_tail[:, None]], dim=1), excess, capped)


def divergence_of(p: Buckets, q: Buckets, options: Options) -> Tensor:
    """The divergence of each row (n,) from its buckets.

    Obligations: sdpo/logit_loss.
    """
    if options.divergence == "forward_kl":
        return kl_divergence(q.log, p.log) + (q.excess - p.excess)
    if options.divergence == "reverse_kl":
        return kl_divergence(p.log, q.log) + (p.excess - q.excess)
    a = options.mixture
    mixed = log_mixture(p.log, q.log, a)
    mixed_excess = (1.0 - a) * p.excess + a * q.excess
    student_part = kl_divergence(p.log, mixed) + (p.excess - mixed_excess)
    teacher_part = kl_divergence(q.log, mixed) + (q.excess - mixed_excess)
    return (1.0 - a) * student_part + a * teacher_part


def bucket_slopes(p: Buckets, q: Buckets, options: Options) -> tuple[Tensor, Tensor]:
    """`p_b g_b` of each bucket (n, K), 0 for a capped tail, and their sum (n, 1)."""
    weighted = _bucket_gradients(p, q, options)
    if p.capped is not None:
        weighted = torch.cat([weighted[:, :-1], torch.where(p.capped[:, None], 0.0, weighted[:, -1:])], dim=1)
    return weighted, weighted.sum(-1, keepdim=True)


def _bucket_gradients(p: Buckets, q: Buckets, options: Options) -> Tensor:
    """`p_b dD/dp_b` of each bucket; 0 where p_b is 0 and the divergence does not read it.

    A number taken from every slope changes no gradient as long as no bucket is a constant. The reverse KL's own is that
    of the student's largest bucket: a student who is sure would be left the rounding of a difference of equals.
    """
    if options.divergence == "forward_kl":
        return -q.log.exp()
    mass = p.log.exp()
    if options.divergence == "reverse_kl":
        ratios = p.log - q.log
        common = ratios.gather(-1, p.log.argmax(-1, keepdim=True)).detach()
        if p.capped is not None:
            common = torch.where(p.capped[..., None], -1.0, common)
        return mass * torch.where(mass > 0, ratios - common, 0.0)
    mixed = log_mixture(p.log, q.log, options.mixture)
    return (1.0 - options.mixture) * mass * torch.where(mass > 0, p.log - mixed, 0.0)
