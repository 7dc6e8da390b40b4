"""What the losses of the Tinker API are: value and gradient of each, in float64 NumPy, short enough to check by eye.

Every function takes one datum's arrays of shape (N,) (cross_entropy also (N, K)) in nats and returns an `Oracle`.
The loss of a request is the sum of `value` over its datums; the sums run over tokens, and nothing is divided.
`weights` is -dL/dlogprobs: cross_entropy with these weights has the same gradient, whatever the model.

Source: https://tinker-docs.thinkingmachines.ai/tinker/losses/ (one page a loss), and its earlier form, tinker-cookbook
docs/losses.mdx at commit a2b1b820. The reference package says the same with more digits; parity obligations hold this
file to it, so that the proof of a service needs neither torch nor the reference.
Obligations: policy_gradient/service_oracle.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class Oracle(NamedTuple):
    """`value`: the loss in nats. `weights`: -d value / d logprobs, the shape of the logprobs, float64."""

    value: float
    weights: Array


def cross_entropy(logprobs: ArrayLike, weights: ArrayLike) -> Oracle:
    """-sum(weights * logprobs); (N,) or (N, K), weights of any sign."""
    p, w = _arrays(logprobs, weights)
    return _summed(-w * p, w)


def importance_sampling(logprobs: ArrayLike, sampler_logprobs: ArrayLike, advantages: ArrayLike) -> Oracle:
    """-sum(r * A) with r = exp(logprobs - sampler_logprobs)."""
    p, q, a = _arrays(logprobs, sampler_logprobs, advantages)
    r = np.exp(p - q)
    return _summed(-r * a, r * a)


def ppo(
    logprobs: ArrayLike,
    sampler_logprobs: ArrayLike,
    advantages: ArrayLike,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Oracle:
    """-sum(min(r * A, clip(r, low, high) * A)); the thresholds are absolute ratios, 0.8 and 1.2 by default."""
    p, q, a = _arrays(logprobs, sampler_logprobs, advantages)
    return _clipped(np.exp(p - q), a, clip_low_threshold, clip_high_threshold)


def cispo(
    logprobs: ArrayLike,
    sampler_logprobs: ArrayLike,
    advantages: ArrayLike,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Oracle:
    """-sum(stop_gradient(clip(r, low, high)) * logprobs * A): the clipped ratio weighs, and is never differentiated.

    Without thresholds the documentation of today has 0 and 4, an older one 0.8 and 1.2: see `CISPO_DEFAULTS`.
    """
    p, q, a = _arrays(logprobs, sampler_logprobs, advantages)
    r = np.clip(np.exp(p - q), clip_low_threshold, clip_high_threshold)
    return _summed(-r * p * a, r * a)


def dro(logprobs: ArrayLike, sampler_logprobs: ArrayLike, advantages: ArrayLike, beta: float) -> Oracle:
    """-sum(logprobs * A - beta / 2 * (logprobs - sampler_logprobs)^2); beta has no documented default."""
    p, q, a = _arrays(logprobs, sampler_logprobs, advantages)
    return _summed(-(p * a - beta / 2 * (p - q) ** 2), a - beta * (p - q))


def gspo(
    logprobs: ArrayLike,
    sampler_logprobs: ArrayLike,
    advantages: ArrayLike,
    sequence_ratio_mask: ArrayLike,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Oracle:
    """ppo with one ratio s for the whole sequence, differentiated token by token (GSPO-token).

    s = exp(mean over the mask of (logprobs - sampler_logprobs)); each token's gradient is s * A where s is not clipped.
    An empty mask has loss 0.
    """
    p, q, a, mask = _arrays(logprobs, sampler_logprobs, advantages, sequence_ratio_mask)
    if not mask.any():
        return Oracle(0.0, np.zeros_like(p))
    s = np.exp(np.mean((p - q)[mask != 0]))
    return _clipped(np.full_like(p, s), a, clip_low_threshold, clip_high_threshold)


def _clipped(r: Array, a: Array, low: float, high: float) -> Oracle:
    """-sum(min(r A, clip(r) A)) and r A where the minimum is the unclipped branch (a tie is no clipping), else 0."""
    plain, bounded = r * a, np.clip(r, low, high) * a
    return _summed(-np.minimum(plain, bounded), np.where(plain <= bounded, plain, 0.0))


def _summed(terms: Array, weights: Array) -> Oracle:
    return Oracle(float(terms.sum()), weights)


def _arrays(*values: ArrayLike) -> tuple[Array, ...]:
    arrays = tuple(np.asarray(value, dtype=np.float64) for value in values)
    if any(array.shape != arrays[0].shape for array in arrays):
        raise ValueError(f"shapes differ: {', '.join(str(array.shape) for array in arrays)}")
    return arrays


@dataclass(frozen=True)
class LossDefinition:
    """A loss by its wire names: the keys of `loss_fn_inputs` after target_tokens, the options of `loss_fn_config`.

    defaults: options with a documented default. alternatives: other documented defaults, which a service may have.
    """

    oracle: Callable[..., Oracle]
    inputs: tuple[str, ...]
    options: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict[str, float])
    alternatives: tuple[Mapping[str, float], ...] = ()

    def __call__(self, logprobs: ArrayLike, inputs: Mapping[str, ArrayLike], config: Mapping[str, float]) -> Oracle:
        """The oracle at `logprobs`; ValueError when an option without a default is missing."""
        options = {**self.defaults, **config}
        missing = [name for name in self.options if name not in options]
        if missing:
            raise ValueError(f"{missing[0]} must be given: the documentation has no default for it")
        return self.oracle(logprobs, *(inputs[name] for name in self.inputs), *(options[name] for name in self.options))


_POLICY = ("logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")
PPO_DEFAULTS: Mapping[str, float] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CISPO_DEFAULTS: tuple[Mapping[str, float], ...] = (
    {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},  # the documentation of 2026-11
    {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},  # tinker-cookbook docs/losses.mdx at a2b1b820
)
LOSSES: Mapping[str, LossDefinition] = {
    "cross_entropy": LossDefinition(cross_entropy, ("weights",)),
    "importance_sampling": LossDefinition(importance_sampling, _POLICY),
    "ppo": LossDefinition(ppo, _POLICY, _CLIP, PPO_DEFAULTS),
    "cispo": LossDefinition(cispo, _POLICY, _CLIP, CISPO_DEFAULTS[0], CISPO_DEFAULTS[1:]),
    "dro": LossDefinition(dro, _POLICY, ("beta",)),
    "gspo": LossDefinition(gspo, (*_POLICY, "sequence_ratio_mask"), _CLIP),
}
