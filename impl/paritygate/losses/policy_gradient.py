"""Policy-gradient losses on the log-probabilities of sampled tokens, as the Tinker service documents them.

Each is a sum over everything given, (..., T), divided by nothing; () in nats. Differentiable in `logprobs` alone:
sampler and advantages are constants. Source: tinker-docs.thinkingmachines.ai/tinker/losses (a page a loss) and
tinker-cookbook: docs/losses.mdx at a2b1b820, tutorials/202_loss_functions.py at 9dfcc3a2. See design/014.
"""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import as_float, as_mask, refuse_where, result_dtype, same_shape
from .numerics import total

PPO_BOUNDS = (0.8, 1.2)  # the documented defaults, as ratios; gspo's bounds and dro's beta have none
CISPO_BOUNDS = (0.0, 4.0)


def importance_sampling_loss(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, *, validate: bool = True
) -> Tensor:
    """`-sum exp(logprobs - sampler_logprobs) * advantages` over everything given (..., T): a sum, no mean; () nats.

    Differentiable in `logprobs` alone: sampler and advantages are constants. A position with advantage exactly 0 is not
    read. ValueError: shapes differ; with `validate`, a value that is read is NaN, +inf, or a sampler logprob of -inf.
    Obligations: policy_gradient/value, policy_gradient/gradient, policy_gradient/constants.
    """
    new, old, weight = _checked("importance_sampling_loss", logprobs, sampler_logprobs, advantages, validate)
    return -total(_ratio(new, old, weight) * weight).to(result_dtype(new))


def importance_sampling_grad(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, *, validate: bool = True
) -> Tensor:
    """d `importance_sampling_loss` / d logprobs, of their shape and dtype: minus ratio times advantage.

    Exactly 0 where the advantage is 0. ValueError as `importance_sampling_loss`.
    Obligations: policy_gradient/closed_form.
    """
    new, old, weight = _checked("importance_sampling_loss", logprobs, sampler_logprobs, advantages, validate)
    return torch.where(weight == 0, 0.0, -_ratio(new.detach(), old, weight) * weight).to(new.dtype)


def importance_ratio(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, cap: float = math.inf, *, validate: bool = True
) -> Tensor:
    """`min(exp(logprobs - old_logprobs), cap)` at mask 1, 0 elsewhere, (..., T) float64: a constant.

    The `importance_ratio` of `sdpo.logit_loss`, from the log-probabilities of the policy that sampled; nothing is read
    at mask 0. ValueError: shapes differ, cap not positive; with `validate`, a mask that is not 0 or 1, at mask 1 a
    logprob that is NaN or +inf, an old one that is not finite. Source: SDPO, arXiv 2601.20802, section 4 (cap 2).
    Obligations: policy_gradient/importance_ratio.
    """
    if not cap > 0.0:
        raise ValueError(f"importance_ratio: cap is {cap}; it is positive")
    used = as_mask(mask, as_float(logprobs, "logprobs"), "importance_ratio", validate=validate)
    new, old, weight = _checked("importance_ratio", logprobs, old_logprobs, used.double(), validate)
    return torch.where(weight == 0, 0.0, _ratio(new.detach(), old, weight).clamp(max=cap))


class Objective(NamedTuple):
    """What is maximised at each position, and its documented slope in the logprob, both (..., T) float64."""

    value: Tensor
    slope: Tensor


def ppo_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: float = PPO_BOUNDS[0],
    clip_high_threshold: float = PPO_BOUNDS[1],
    *,
    validate: bool = True,
) -> Tensor:
    """`-sum min(r A, clip(r, low, high) A)` with r = exp(logprobs - sampler_logprobs), (..., T) -> () nats.

    A position with advantage exactly 0 is not read. ValueError as `importance_sampling_loss`, and bounds that are no
    interval of numbers at or above 0. Source: arXiv 1707.06347, equation 7.
    Obligations: policy_gradient/ppo_value, policy_gradient/ppo_gradient.
    """
    bounds = clip_low_threshold, clip_high_threshold
    return _loss(*_ppo(logprobs, sampler_logprobs, advantages, bounds, validate))


def ppo_grad(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: float = PPO_BOUNDS[0],
    clip_high_threshold: float = PPO_BOUNDS[1],
    *,
    validate: bool = True,
) -> Tensor:
    """d `ppo_loss` / d logprobs, of their shape and dtype: `-r A`, 0 where `clip(r) A < r A`. ValueError likewise.

    Obligations: policy_gradient/ppo_gradient.
    """
    bounds = clip_low_threshold, clip_high_threshold
    return _grad(*_ppo(logprobs, sampler_logprobs, advantages, bounds, validate))


def cispo_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: float = CISPO_BOUNDS[0],
    clip_high_threshold: float = CISPO_BOUNDS[1],
    *,
    validate: bool = True,
) -> Tensor:
    """`-sum sg(clip(r, low, high)) logprobs A`: the clipped ratio is a constant weight; (..., T) -> () nats.

    Positions as `ppo_loss`. ValueError as `ppo_loss`, and a logprob of -inf that is read. Source: arXiv 2506.13585.
    Obligations: policy_gradient/cispo_value, policy_gradient/cispo_gradient.
    """
    bounds = clip_low_threshold, clip_high_threshold
    return _loss(*_cispo(logprobs, sampler_logprobs, advantages, bounds, validate))


def cispo_grad(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: float = CISPO_BOUNDS[0],
    clip_high_threshold: float = CISPO_BOUNDS[1],
    *,
    validate: bool = True,
) -> Tensor:
    """d `cispo_loss` / d logprobs, of their shape and dtype: `-clip(r, low, high) A`. ValueError likewise.

    Obligations: policy_gradient/cispo_gradient.
    """
    bounds = clip_low_threshold, clip_high_threshold
    return _grad(*_cispo(logprobs, sampler_logprobs, advantages, bounds, validate))


def dro_loss(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, beta: float, *, validate: bool = True
) -> Tensor:
    """`-sum (logprobs A - beta/2 (logprobs - sampler_logprobs)^2)`, (..., T) -> () nats.

    Every position is read: one with advantage 0 has the penalty still. ValueError: shapes differ, a negative beta; with
    `validate`, a number that is not finite. Source: arXiv 2405.19107; no default of beta is documented.
    Obligations: policy_gradient/dro_value, policy_gradient/dro_gradient.
    """
    return _loss(*_dro(logprobs, sampler_logprobs, advantages, beta, validate))


def dro_grad(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, beta: float, *, validate: bool = True
) -> Tensor:
    """d `dro_loss` / d logprobs, of their shape and dtype: `-(A - beta (logprobs - sampler_logprobs))`.

    Obligations: policy_gradient/dro_gradient.
    """
    return _grad(*_dro(logprobs, sampler_logprobs, advantages, beta, validate))


def gspo_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequence_ratio_mask: Tensor,
    clip_low_threshold: float,
    clip_high_threshold: float,
    *,
    validate: bool = True,
) -> Tensor:
    """`-sum min(s A, clip(s, low, high) A)`, one ratio a sequence: s = exp(mean over mask 1 of log r); () nats.

    (..., T): the last axis is a sequence. A position is read where the mask is 1 or the advantage is not 0; a sequence
    whose mask is all 0 gives 0. Differentiated as `sg(s) pi / sg(pi)` a token (GSPO-token). ValueError as `cispo_loss`,
    and a mask that is not 0 or 1. Source: arXiv 2507.18071; no default of the bounds is documented.
    Obligations: policy_gradient/gspo_value, policy_gradient/gspo_gradient.
    """
    bounds = clip_low_threshold, clip_high_threshold
    return _loss(*_gspo(logprobs, sampler_logprobs, advantages, sequence_ratio_mask, bounds, validate))


def gspo_grad(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequence_ratio_mask: Tensor,
    clip_low_threshold: float,
    clip_high_threshold: float,
    *,
    validate: bool = True,
) -> Tensor:
    """d `gspo_loss` / d logprobs, of their shape and dtype: `-s A`, 0 where `clip(s) A < s A`. ValueError likewise.

    Obligations: policy_gradient/gspo_gradient.
    """
    bounds = clip_low_threshold, clip_high_threshold
    return _grad(*_gspo(logprobs, sampler_logprobs, advantages, sequence_ratio_mask, bounds, validate))


class _Sum(torch.autograd.Function):
    """Minus the sum of an objective; backward gives minus its slope, infinite ratios included, and NaN nowhere else."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, objective: Objective) -> Tensor:
        ctx.slope, ctx.dtype = objective.slope, new.dtype
        return (0.0 - total(objective.value)).to(result_dtype(new))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (0.0 - ctx.slope * upstream[0].double()).to(ctx.dtype), None


def _loss(new: Tensor, objective: Objective) -> Tensor:
    return cast("Tensor", _Sum.apply(new, objective))


def _grad(new: Tensor, objective: Objective) -> Tensor:
    return (0.0 - objective.slope).to(new.dtype)


def _ppo(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, bounds: tuple[float, float], validate: bool
) -> tuple[Tensor, Objective]:
    new, old, weight = _checked("ppo_loss", logprobs, sampler_logprobs, advantages, validate)
    _check_bounds("ppo_loss", bounds)
    return new, _clipped(_ratio(new.detach(), old, weight), weight, bounds)


def _cispo(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, bounds: tuple[float, float], validate: bool
) -> tuple[Tensor, Objective]:
    new, old, weight = _checked("cispo_loss", logprobs, sampler_logprobs, advantages, validate, finite=True)
    _check_bounds("cispo_loss", bounds)
    clipped = _ratio(new.detach(), old, weight).clamp(*bounds)
    log_p = torch.where(weight == 0, 0.0, new.detach().double())
    return new, Objective(clipped * log_p * weight, clipped * weight)


def _dro(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, beta: float, validate: bool
) -> tuple[Tensor, Objective]:
    if not (math.isfinite(beta) and beta >= 0.0):
        raise ValueError(f"dro_loss: beta is {beta}; it is finite and not negative")
    everywhere = torch.ones((), dtype=torch.bool, device=logprobs.device)
    new, old, weight = _checked(
        "dro_loss", logprobs, sampler_logprobs, advantages, validate, finite=True, also=everywhere
    )
    log_p = new.detach().double()
    log_r = log_p - old
    return new, Objective(log_p * weight - beta / 2.0 * log_r**2, weight - beta * log_r)


def _gspo(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequence_ratio_mask: Tensor,
    bounds: tuple[float, float],
    validate: bool,
) -> tuple[Tensor, Objective]:
    _check_bounds("gspo_loss", bounds)
    new = as_float(logprobs, "logprobs")
    mask = as_mask(sequence_ratio_mask, new, "gspo_loss", validate=validate)
    same_shape("gspo_loss", logprobs=new, sequence_ratio_mask=mask)
    new, old, weight = _checked("gspo_loss", new, sampler_logprobs, advantages, validate, finite=True, also=mask)
    tokens = mask.sum(-1, keepdim=True)
    log_r = torch.where(mask, new.detach().double() - old, 0.0)
    s = total(log_r, -1, tokens.clamp(min=1)).exp()
    return new, _clipped(s, torch.where(tokens == 0, 0.0, weight), bounds)


def _clipped(ratio: Tensor, weight: Tensor, bounds: tuple[float, float]) -> Objective:
    """`min(r A, clip(r) A)`; at a bound exactly nothing is clipped.

    Obligations: policy_gradient/clip_bounds.
    """
    plain, clipped = ratio * weight, ratio.clamp(*bounds) * weight
    return Objective(torch.minimum(plain, clipped), torch.where(plain <= clipped, plain, 0.0))


def _ratio(new: Tensor, old: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight == 0, 0.0, new.double() - old).exp()


def _check_bounds(name: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not 0.0 <= low <= high or low == math.inf:
        raise ValueError(f"{name}: clip_low_threshold {low} and clip_high_threshold {high} are no interval of ratios")


def _checked(
    name: str,
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    validate: bool,
    *,
    finite: bool = False,
    also: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, and the sampler's and the advantages as float64 constants.

    With `validate` ValueError for what is no number of the kind where the advantage is not 0 or `also` is True.
    """
    new = as_float(logprobs, "logprobs")
    old = as_float(sampler_logprobs, "sampler_logprobs").detach().double()
    weight = as_float(advantages, "advantages").detach().double()
    same_shape(name, logprobs=new, sampler_logprobs=old, advantages=weight)
    if validate:
        used = weight != 0 if also is None else (weight != 0) | also.to(weight.device)
        bad = new.isnan() | (new == torch.inf) | ((new == -torch.inf) if finite else False)
        refuse_where(used & ~torch.isfinite(weight), weight, f"{name}: the advantage")
        refuse_where(used & bad, new, f"{name}: the logprob")
        refuse_where(used & ~torch.isfinite(old), old, f"{name}: the sampler logprob")
    return new, old, weight
