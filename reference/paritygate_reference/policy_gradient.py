"""Policy-gradient losses on the log-probabilities of sampled tokens, as the Tinker service documents them.

Each is a sum over the tokens of one sequence (T,), divided by nothing; a batch is the sum of its sequences. Sampler
and advantages are constants. Source: tinker-docs.thinkingmachines.ai/tinker/losses (a page a loss) and
tinker-cookbook: docs/losses.mdx at a2b1b820, tutorials/202_loss_functions.py at 9dfcc3a2. See design/014.
Obligations: policy_gradient/oracle, policy_gradient/clipped_oracle, policy_gradient/service_oracle.
"""

import math

import numpy as np
from numpy.typing import NDArray

from . import _checks
from ._checks import Array, Mask, Row
from ._distributions import exact_sum, exp


def ratio(logprobs: Array, sampler_logprobs: Array) -> Array:
    """`r_t = pi(a_t) / mu(a_t) = exp(logprobs_t - sampler_logprobs_t)` of the sampled tokens, (T,)."""
    return exp(logprobs - sampler_logprobs)


def clip(r: Array, low: float, high: float) -> Array:
    """`min(max(r, low), high)`: the bounds are ratios themselves, not distances from 1."""
    return np.minimum(np.maximum(r, low), high)


def clipped_objective(r: Array, advantages: Array, low: float, high: float) -> Array:
    """`min(r A, clip(r, low, high) A)`, (T,)."""
    return np.minimum(r * advantages, clip(r, low, high) * advantages)


def clipped_slope(r: Array, advantages: Array, low: float, high: float) -> Array:
    """d `clipped_objective` / d log r: `r A`, and 0 where `clip(r) A < r A`. At a bound exactly nothing is clipped.

    Obligations: policy_gradient/clip_bounds.
    """
    return np.where(r * advantages <= clip(r, low, high) * advantages, r * advantages, 0.0)


# Importance sampling


def importance_sampling_loss(logprobs: Row, sampler_logprobs: Row, advantages: Row) -> float:
    """`-sum_t exp(logprobs_t - sampler_logprobs_t) * advantages_t` of one sequence (T,), in nats, a sum and no mean.

    A position with advantage exactly 0 is not read (NaN and None may stand there).
    ValueError: shapes differ, or a value that is read is NaN, +inf, or a sampler logprob of -inf.
    Obligations: policy_gradient/value, policy_gradient/constants.
    """
    p, q, A = _checks.policy_rows("importance_sampling_loss", logprobs, sampler_logprobs, advantages)
    return 0.0 - exact_sum(ratio(p, q) * A)


def importance_sampling_grad(logprobs: Row, sampler_logprobs: Row, advantages: Row) -> Array:
    """d `importance_sampling_loss` / d logprobs (T,): `-exp(logprobs_t - sampler_logprobs_t) * advantages_t`.

    Exactly 0 where the advantage is 0. ValueError as `importance_sampling_loss`.
    Obligations: policy_gradient/gradient, policy_gradient/closed_form.
    """
    p, q, A = _checks.policy_rows("importance_sampling_loss", logprobs, sampler_logprobs, advantages)
    return 0.0 - ratio(p, q) * A


def importance_ratio(logprobs: Row, old_logprobs: Row, mask: Mask, cap: float = math.inf) -> Array:
    """`min(exp(logprobs_t - old_logprobs_t), cap)` at mask 1, 0 at mask 0, where nothing is read; (T,), a constant.

    The `importance_ratio` of `sdpo.logit_loss`, from the log-probabilities of the policy that sampled. ValueError:
    shapes differ, a mask that is not 0 or 1, cap not positive, at mask 1 a logprob that is NaN or +inf, an old one
    that is not finite. Source: SDPO, arXiv 2601.20802, section 4 (cap 2); truncated importance sampling.
    Obligations: policy_gradient/importance_ratio.
    """
    if not cap > 0.0:
        raise ValueError(f"importance_ratio: cap is {cap}; it is positive")
    used = _checks.zero_or_one("importance_ratio", np.asarray(mask))
    p, q, one = _checks.policy_rows("importance_ratio", logprobs, old_logprobs, used.astype(np.float64))
    return np.where(one == 1.0, np.minimum(ratio(p, q), cap), 0.0)


# PPO


def ppo_loss(
    logprobs: Row,
    sampler_logprobs: Row,
    advantages: Row,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> float:
    """`-sum_t min(r_t A_t, clip(r_t, low, high) A_t)`, in nats. Positions and errors as `importance_sampling_loss`.

    ValueError also: bounds that are no interval of numbers at or above 0. Source: arXiv 1707.06347, equation 7.
    Obligations: policy_gradient/ppo_value.
    """
    p, q, A = _checks.policy_rows("ppo_loss", logprobs, sampler_logprobs, advantages)
    low, high = _checks.bounds("ppo_loss", clip_low_threshold, clip_high_threshold)
    return 0.0 - exact_sum(clipped_objective(ratio(p, q), A, low, high))


def ppo_grad(
    logprobs: Row,
    sampler_logprobs: Row,
    advantages: Row,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Array:
    """d `ppo_loss` / d logprobs (T,): `-r_t A_t`, 0 where `clip(r_t) A_t < r_t A_t`. ValueError as `ppo_loss`.

    Obligations: policy_gradient/ppo_gradient.
    """
    p, q, A = _checks.policy_rows("ppo_loss", logprobs, sampler_logprobs, advantages)
    low, high = _checks.bounds("ppo_loss", clip_low_threshold, clip_high_threshold)
    return 0.0 - clipped_slope(ratio(p, q), A, low, high)


# CISPO


def cispo_loss(
    logprobs: Row,
    sampler_logprobs: Row,
    advantages: Row,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> float:
    """`-sum_t sg(clip(r_t, low, high)) logprobs_t A_t`, in nats: the clipped ratio is a constant weight.

    Positions as `importance_sampling_loss`. ValueError also: a logprob of -inf that is read; bounds as `ppo_loss`.
    Source: arXiv 2506.13585, equation 4 without its division by the number of tokens.
    Obligations: policy_gradient/cispo_value.
    """
    p, q, A = _checks.policy_rows("cispo_loss", logprobs, sampler_logprobs, advantages, finite=True)
    low, high = _checks.bounds("cispo_loss", clip_low_threshold, clip_high_threshold)
    return 0.0 - exact_sum(clip(ratio(p, q), low, high) * p * A)


def cispo_grad(
    logprobs: Row,
    sampler_logprobs: Row,
    advantages: Row,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> Array:
    """The gradient that `cispo_loss` stands for, (T,): `-clip(r_t, low, high) A_t`; no token loses its gradient.

    It is not the derivative of the value, whose ratio is held constant. ValueError as `cispo_loss`.
    Obligations: policy_gradient/cispo_gradient.
    """
    p, q, A = _checks.policy_rows("cispo_loss", logprobs, sampler_logprobs, advantages, finite=True)
    low, high = _checks.bounds("cispo_loss", clip_low_threshold, clip_high_threshold)
    return 0.0 - clip(ratio(p, q), low, high) * A


# DRO


def dro_loss(logprobs: Row, sampler_logprobs: Row, advantages: Row, beta: float) -> float:
    """`-sum_t (logprobs_t A_t - beta/2 (logprobs_t - sampler_logprobs_t)^2)`, in nats.

    Every position is read: one with advantage 0 has the penalty still. ValueError: shapes differ, a number that is not
    finite, a negative beta. Source: arXiv 2405.19107; no default of beta is documented.
    Obligations: policy_gradient/dro_value.
    """
    p, q, A = _checks.policy_rows("dro_loss", logprobs, sampler_logprobs, advantages, finite=True, everywhere=True)
    beta = _checks.not_negative("dro_loss", "beta", beta)
    return 0.0 - exact_sum(p * A - beta / 2.0 * (p - q) ** 2)


def dro_grad(logprobs: Row, sampler_logprobs: Row, advantages: Row, beta: float) -> Array:
    """d `dro_loss` / d logprobs (T,): `-(A_t - beta (logprobs_t - sampler_logprobs_t))`. ValueError as `dro_loss`.

    Obligations: policy_gradient/dro_gradient.
    """
    p, q, A = _checks.policy_rows("dro_loss", logprobs, sampler_logprobs, advantages, finite=True, everywhere=True)
    beta = _checks.not_negative("dro_loss", "beta", beta)
    return 0.0 - (A - beta * (p - q))


# GSPO


def sequence_ratio(logprobs: Array, sampler_logprobs: Array, mask: NDArray[np.bool_]) -> float:
    """`s = exp(mean over mask 1 of (logprobs_t - sampler_logprobs_t))`: the geometric mean of the tokens' ratios."""
    mean = exact_sum((logprobs - sampler_logprobs)[mask], int(np.count_nonzero(mask)))
    return float(exp(np.array(mean)))


def gspo_loss(
    logprobs: Row,
    sampler_logprobs: Row,
    advantages: Row,
    sequence_ratio_mask: Mask,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> float:
    """`-sum_t min(s A_t, clip(s, low, high) A_t)` in nats, with one ratio s for the sequence: `sequence_ratio`.

    A position is read where the mask is 1 or the advantage is not 0. A mask of zeros gives 0. ValueError as
    `cispo_loss`, and a mask that is not 0 or 1. Source: arXiv 2507.18071; no default of the bounds is documented.
    Obligations: policy_gradient/gspo_value.
    """
    p, q, A, mask = _checks.sequence_rows("gspo_loss", logprobs, sampler_logprobs, advantages, sequence_ratio_mask)
    low, high = _checks.bounds("gspo_loss", clip_low_threshold, clip_high_threshold)
    if not mask.any():
        return 0.0
    s = np.full_like(p, sequence_ratio(p, q, mask))
    return 0.0 - exact_sum(clipped_objective(s, A, low, high))


def gspo_grad(
    logprobs: Row,
    sampler_logprobs: Row,
    advantages: Row,
    sequence_ratio_mask: Mask,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Array:
    """The gradient that `gspo_loss` stands for, (T,): `-s A_t`, 0 where `clip(s) A_t < s A_t` (GSPO-token).

    The ratio of token t is taken as `sg(s) pi_t / sg(pi_t)`. Where the mask is 1 everywhere and all advantages are
    equal, this is the derivative of the value too. ValueError as `gspo_loss`. Source: arXiv 2507.18071, equation 14.
    Obligations: policy_gradient/gspo_gradient.
    """
    p, q, A, mask = _checks.sequence_rows("gspo_loss", logprobs, sampler_logprobs, advantages, sequence_ratio_mask)
    low, high = _checks.bounds("gspo_loss", clip_low_threshold, clip_high_threshold)
    if not mask.any():
        return np.zeros_like(p)
    s = np.full_like(p, sequence_ratio(p, q, mask))
    return 0.0 - clipped_slope(s, A, low, high)
