"""The importance-sampling policy-gradient loss of the Tinker service, and its gradient."""

from ._checks import Array, Row, weighted_logprobs
from ._distributions import exact_sum, exp


def importance_sampling_loss(logprobs: Row, sampler_logprobs: Row, advantages: Row) -> float:
    """`-sum_t exp(logprobs_t - sampler_logprobs_t) * advantages_t` of one sequence (T,), in nats, a sum and no mean.

    A position with advantage exactly 0 is not read (NaN and None may stand there).
    ValueError: shapes differ, or a value that is read is NaN, +inf, or a sampler logprob of -inf.
    Source: the documented `importance_sampling` loss of the Tinker service.
    """
    new, old, advantage = weighted_logprobs("importance_sampling_loss", logprobs, sampler_logprobs, advantages)
    return 0.0 - exact_sum(ratio(new, old) * advantage)


def importance_sampling_grad(logprobs: Row, sampler_logprobs: Row, advantages: Row) -> Array:
    """d `importance_sampling_loss` / d logprobs (T,): `-exp(logprobs_t - sampler_logprobs_t) * advantages_t`.

    Exactly 0 where the advantage is 0. ValueError as `importance_sampling_loss`.
    """
    new, old, advantage = weighted_logprobs("importance_sampling_loss", logprobs, sampler_logprobs, advantages)
    return 0.0 - ratio(new, old) * advantage


def ratio(logprobs: Array, sampler_logprobs: Array) -> Array:
    """`pi(a) / mu(a) = exp(logprobs - sampler_logprobs)` of the sampled tokens, (T,)."""
    return exp(logprobs - sampler_logprobs)
