"""The losses of the Tinker API by their names on the wire, computed with `paritygate.losses.policy_gradient`.

Defaults are the documented ones (design/014). Where the documentation gives no formula or no default, the request is
refused and the error says so.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paritygate.losses import policy_gradient
from paritygate.server.errors import RequestError

Config = Mapping[str, float | str]


@dataclass(frozen=True)
class LossInputs:
    """One datum: `target_tokens` (N,) or (N, K) int64 ids, and the other tensors of the request by name."""

    target_tokens: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def of(self, name: str) -> Tensor:
        return self.tensors[name]


Loss = Callable[[Tensor, LossInputs, Config], Tensor]


def cross_entropy(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """-sum(weights * logprobs); (N,) or (N, K). Source: .../losses/cross-entropy."""
    return -(datum.of("weights") * logprobs).sum()


def importance_sampling(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """`policy_gradient.importance_sampling_loss` of one datum."""
    return policy_gradient.importance_sampling_loss(*_rows(logprobs, datum), validate=False)


def ppo(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """`policy_gradient.ppo_loss` of one datum, bounds 0.8 and 1.2 unless given."""
    return policy_gradient.ppo_loss(*_rows(logprobs, datum), *_thresholds("ppo", config), validate=False)


def cispo(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """`policy_gradient.cispo_loss` of one datum, bounds 0 and 4 unless given."""
    return policy_gradient.cispo_loss(*_rows(logprobs, datum), *_thresholds("cispo", config), validate=False)


def dro(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """`policy_gradient.dro_loss` of one datum; beta must be given."""
    return policy_gradient.dro_loss(*_rows(logprobs, datum), _beta(config), validate=False)


def gspo(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """`policy_gradient.gspo_loss` of one datum; the bounds must be given. What is not 0 is in the mask."""
    mask = datum.of("sequence_ratio_mask") != 0
    return policy_gradient.gspo_loss(*_rows(logprobs, datum), mask, *_thresholds("gspo", config), validate=False)


def _rows(logprobs: Tensor, datum: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    return logprobs, datum.of("logprobs"), datum.of("advantages")


_BOUNDS = {"ppo": policy_gradient.PPO_BOUNDS, "cispo": policy_gradient.CISPO_BOUNDS}
_POLICY = ("logprobs", "advantages")
LOSSES: dict[str, tuple[Loss, tuple[str, ...], frozenset[str]]] = {
    "cross_entropy": (cross_entropy, ("weights",), frozenset()),
    "importance_sampling": (importance_sampling, _POLICY, frozenset()),
    "ppo": (ppo, _POLICY, frozenset({"clip_low_threshold", "clip_high_threshold"})),
    "cispo": (cispo, _POLICY, frozenset({"clip_low_threshold", "clip_high_threshold"})),
    "dro": (dro, _POLICY, frozenset({"beta"})),
    "gspo": (gspo, (*_POLICY, "sequence_ratio_mask"), frozenset({"clip_low_threshold", "clip_high_threshold"})),
}


def find_loss(name: str, config: Config) -> tuple[Loss, tuple[str, ...]]:
    """The loss of that name and the inputs that it needs; RequestError for unknown names and options."""
    if name == "stable_reinforce":
        raise RequestError(
            "loss stable_reinforce is not served: its documentation (losses/stable-reinforce, alpha) publishes no "
            "formula, and a guess would train on something else; use loss_fn='cispo' with loss_fn_config="
            "{'clip_low_threshold': 0.0, 'clip_high_threshold': 4.0}, which takes the same datums"
        )
    if name == "custom":
        raise RequestError(
            "loss custom is not run on this server: client/config says custom_loss_server_side is off, so "
            "forward_backward_custom computes it in the client and sends cross_entropy"
        )
    if name not in LOSSES:
        raise RequestError(f"unknown loss {name!r}: this server has {', '.join(LOSSES)}")
    loss, inputs, options = LOSSES[name]
    unknown = sorted(set(config) - options)
    if unknown:
        raise RequestError(f"loss {name}: unknown loss_fn_config {unknown[0]!r}; it takes {sorted(options) or 'none'}")
    if "clip_low_threshold" in options:
        _thresholds(name, config)
    if "beta" in options:
        _beta(config)
    return loss, inputs


def _beta(config: Config) -> float:
    beta = _number(config, "beta")
    if beta is None:
        raise RequestError(
            "loss dro: pass loss_fn_config={'beta': ...}: the documentation (losses/dro) gives no default for beta"
        )
    if beta < 0:
        raise RequestError(f"loss_fn_config: beta {beta} is negative: it would reward leaving the sampler")
    return beta


def _thresholds(name: str, config: Config) -> tuple[float, float]:
    """The interval that ratios are clamped to."""
    default_low, default_high = _BOUNDS.get(name, (None, None))
    low = _number(config, "clip_low_threshold", default_low)
    high = _number(config, "clip_high_threshold", default_high)
    if low is None or high is None:
        raise RequestError(
            f"loss {name}: pass loss_fn_config={{'clip_low_threshold': ..., 'clip_high_threshold': ...}}: the "
            "documentation gives defaults for ppo (0.8 and 1.2) and cispo (0 and 4) only"
        )
    if not 0 <= low <= high:
        raise RequestError(f"loss_fn_config: clip_low_threshold {low} and clip_high_threshold {high} are no interval")
    return low, high


def _number(config: Config, name: str, default: float | None = None) -> float | None:
    value = config.get(name, default)
    if isinstance(value, str) or (value is not None and not math.isfinite(value)):
        raise RequestError(f"loss_fn_config[{name!r}] must be a finite number, found {value!r}")
    return value
