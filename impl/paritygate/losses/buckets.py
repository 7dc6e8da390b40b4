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
    logits: Tensor  # (n, k) of the entries kept
    rest: Tensor | None  # (n,) the probability of everything else, before the cap; None where there is no tail

    @property
    def capped(self) -> Tensor | None:
        """(n,) whether the tail is the cap."""
        return None if self.rest is None else self.rest < SMALLEST_TAIL

    @property
    def excess(self) -> Tensor | float:
        """(n,) how far the probabilities sum above 1: not 0 only where the cap acts."""
        return 0.0 if self.rest is None else (SMALLEST_TAIL - self.rest).clamp(min=0.0)


def with_tail(logits: Tensor, selected: Tensor, rest: Tensor) -> Buckets:
    """Logits and log-probabilities (n, k) and the probability of everything else (n,), which is capped."""
    log_tail = rest.clamp(min=SMALLEST_TAIL).log()
    return Buckets(torch.cat([selected, log_tail[:, None]], dim=1), logits, rest)


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


def logit_slopes(p: Buckets, q: Buckets, options: Options) -> tuple[Tensor, Tensor]:
    """d divergence / d student logits: of each entry kept (n, k), and of any other over its probability (n, 1).

    With g = dD/dp_b of a bucket and s = sum_b p_b g_b an entry has p_j (g_b(j) - s); a capped tail is a constant, g 0;
    without a tail the others have 0. NaN in a row without a gradient: the teacher excludes what the student does.
    """
    weighted, shift = _bucket_gradients(p, q, options)
    mass, k = p.log.exp(), p.logits.shape[1]
    if p.capped is not None:
        weighted = torch.cat([weighted[:, :k], torch.where(p.capped[:, None], 0.0, weighted[:, k:])], dim=1)
    total = weighted.sum(-1, keepdim=True)
    none = torch.where(torch.isfinite(total + shift), 0.0, torch.nan)
    inside, outside = weighted[:, :k] - mass[:, :k] * total + none, none
    if p.rest is not None and p.capped is not None:
        outside = none - total + weighted[:, k:] / mass[:, k:]
        # The p_b of a capped tail sum to more than 1, and `shift` was left out of every g but the tail's.
        left_out, rest = torch.where(p.capped[:, None], shift, 0.0), p.rest[:, None]
        inside, outside = inside + mass[:, :k] * left_out * rest, outside - left_out * (1.0 - rest)
    return inside, outside


def _bucket_gradients(p: Buckets, q: Buckets, options: Options) -> tuple[Tensor, Tensor]:
    """`p_b (dD/dp_b - shift)` of each bucket, 0 where p_b is 0 and the divergence does not read it; the shift (n, 1).

    A number taken from every slope changes no gradient as long as no bucket is a constant. The reverse KL's own is that
    of the student's largest bucket, and the log-ratios against it are those of logits: a student who is sure, or logits
    far from zero, would be left the rounding of a difference of equals.
    """
    if options.divergence == "forward_kl":
        return -q.log.exp(), torch.zeros_like(p.log[:, :1])
    mass = p.log.exp()
    if options.divergence == "jsd":
        mixed = log_mixture(p.log, q.log, options.mixture)
        weighted = (1.0 - options.mixture) * mass * torch.where(mass > 0, p.log - mixed, 0.0)
        return weighted, torch.zeros_like(p.log[:, :1])
    top = p.logits.argmax(-1, keepdim=True)
    ratios = (p.logits - p.logits.gather(-1, top)) - (q.logits - q.logits.gather(-1, top))
    shift = p.log.gather(-1, top) - q.log.gather(-1, top)
    if p.rest is not None:
        of_tail = p.log[:, -1:] - q.log[:, -1:]
        by_tail = p.rest[:, None] > 0.5
        ratios = torch.where(by_tail, p.log - q.log - of_tail, torch.cat([ratios, of_tail - shift], dim=1))
        shift = torch.where(by_tail, of_tail, shift)
    return mass * torch.where(mass > 0, ratios, 0.0), shift + 1.0
