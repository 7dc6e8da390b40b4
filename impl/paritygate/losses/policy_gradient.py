"""The importance-sampling policy-gradient loss of the Tinker service, and its gradient."""

import torch
from torch import Tensor

from .checks import as_float, refuse_where, result_dtype, same_shape


def importance_sampling_loss(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, *, validate: bool = True
) -> Tensor:
    """`-sum exp(logprobs - sampler_logprobs) * advantages` over everything given (..., T): a sum, no mean; () nats.

    Differentiable in `logprobs` alone: sampler and advantages are constants. A position with advantage exactly 0 is not
    read. ValueError: shapes differ; with `validate`, a value that is read is NaN, +inf, or a sampler logprob of -inf.
    Source: the documented `importance_sampling` loss of the Tinker service.
    """
    new, old, weight = _checked(logprobs, sampler_logprobs, advantages, validate)
    return -(_ratio(new, old, weight) * weight).sum().to(result_dtype(new))


def importance_sampling_grad(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, *, validate: bool = True
) -> Tensor:
    """d `importance_sampling_loss` / d logprobs, of their shape and dtype: minus ratio times advantage.

    Exactly 0 where the advantage is 0. ValueError as `importance_sampling_loss`.
    """
    new, old, weight = _checked(logprobs, sampler_logprobs, advantages, validate)
    return torch.where(weight == 0, 0.0, -_ratio(new.detach(), old, weight) * weight).to(new.dtype)


def _ratio(new: Tensor, old: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight == 0, 0.0, new.double() - old).exp()


def _checked(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, validate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    new = as_float(logprobs, "logprobs")
    old = as_float(sampler_logprobs, "sampler_logprobs").detach().double()
    weight = as_float(advantages, "advantages").detach().double()
    same_shape("importance_sampling_loss", logprobs=new, sampler_logprobs=old, advantages=weight)
    if validate:
        used = weight != 0
        refuse_where(used & ~torch.isfinite(weight), weight, "importance_sampling_loss: the advantage")
        refuse_where(used & (new.isnan() | (new == torch.inf)), new, "importance_sampling_loss: the logprob")
        refuse_where(used & ~torch.isfinite(old), old, "importance_sampling_loss: the sampler logprob")
    return new, old, weight
