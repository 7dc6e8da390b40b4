"""Sums, and divergences between rows of log-probabilities: float64, exact for -inf, nearly equal and huge entries."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 21  # entries of a (rows, V) block held in float64 at once: 16 MiB
HUGE = 2.0**900  # numbers below it can be added up, however many


def chunk_rows(logits: Tensor) -> Iterator[tuple[int, int]]:
    """Bounds of successive blocks of rows of (N, V) logits, at least one row each."""
    rows = max(1, CHUNK // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield start, min(start + rows, logits.shape[0])


def total(terms: Tensor, dim: int | None = None, over: Tensor | float = 1.0) -> Tensor:
    """The sum of float64 `terms`, all or along `dim` (kept), divided by `over`; finite wherever its value is.

    Terms so large that a partial sum may be infinite are added times a power of two.
    """
    size = terms.numel() if dim is None else terms.shape[dim]
    if size == 0:
        return (terms.sum() if dim is None else terms.sum(dim, keepdim=True)) / over
    largest = terms.detach().abs()
    largest = largest.max() if dim is None else largest.amax(dim, keepdim=True)
    scale = torch.ones_like(largest).masked_fill(largest > HUGE, 2.0 ** -(size.bit_length() + 1))
    scaled = terms * scale
    return (scaled.sum() if dim is None else scaled.sum(dim, keepdim=True)) / over / scale


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of float64 logits (..., V); NaN in a row that is no distribution.

    torch's own adds a row up in one run and is 1e-14 off at V = 50,000; its `sum` adds in pairs.
    """
    shifted = logits - logits.amax(-1, keepdim=True).detach()
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def kl_divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) of rows (..., V) with equal sums, in nats (...,); 0 log 0 is 0, a > 0 against b = 0 is +inf.

    Summed as `a log(a/b) - a + b`, whose terms are not negative, so that nearly equal rows keep their digits.
    """
    a, b, d = log_a.exp(), log_b.exp(), log_a - log_b
    # exp(-d) - 1 + d by its series below 0.02, where the plain form would cancel
    series = d * d / 2 * (1 - d / 3 * (1 - d / 4 * (1 - d / 5 * (1 - d / 6 * (1 - d / 7)))))
    terms = torch.where(d.abs() < 0.02, a * series, a * d - a + b)
    return torch.where(a == 0, b, terms).sum(-1)


def log_mixture(log_p: Tensor, log_q: Tensor, mixture: float) -> Tensor:
    """log((1-a) p + a q) of each entry, written from the larger of the two so that nearly equal rows keep digits."""
    larger = log_p >= log_q
    gap = torch.where(larger, log_q - log_p, log_p - log_q)
    gap = torch.where(gap.isnan(), 0.0, gap)  # -inf - -inf
    rest = torch.expm1(gap)
    return torch.where(larger, log_p + torch.log1p(mixture * rest), log_q + torch.log1p((1.0 - mixture) * rest))
