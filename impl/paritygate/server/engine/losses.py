"""The losses of the Tinker API, as its documentation defines them; every one is a sum over tokens, in nats.

Source of every formula and default here: https://tinker-docs.thinkingmachines.ai/tinker/losses/ (one page a loss), and
its earlier form, tinker-cookbook docs/losses.mdx at commit a2b1b820. Where that documentation gives no formula or no
default, the request is refused and the error says so.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    """-sum(exp(logprobs - sampling logprobs) * advantages). Source: .../losses/importance-sampling."""
    return -(torch.exp(logprobs - datum.of("logprobs")) * datum.of("advantages")).sum()


def ppo(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """-sum(min(ratio * A, clamp(ratio, low, high) * A)), low 0.8, high 1.2 unless given. Source: .../losses/ppo."""
    low, high = _thresholds(config, _PPO_DEFAULTS)
    ratio = torch.exp(logprobs - datum.of("logprobs"))
    advantages = datum.of("advantages")
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


def cispo(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """-sum(stop_gradient(clamp(ratio, low, high)) * logprobs * A); thresholds must be given. Source: .../cispo."""
    low, high = _thresholds(config)
    ratio = torch.exp(logprobs - datum.of("logprobs")).clamp(low, high).detach()
    return -(ratio * logprobs * datum.of("advantages")).sum()


def dro(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """-sum(logprobs * A - beta / 2 * (logprobs - sampling logprobs)^2), beta must be given. Source: .../losses/dro."""
    beta = _beta(config)
    penalty = (logprobs - datum.of("logprobs")) ** 2
    return -(logprobs * datum.of("advantages") - 0.5 * beta * penalty).sum()


def gspo(logprobs: Tensor, datum: LossInputs, config: Config) -> Tensor:
    """PPO with the sequence's geometric mean ratio over `sequence_ratio_mask`, token gradients (GSPO-token).

    The thresholds must be given. Source: .../losses/gspo.
    """
    low, high = _thresholds(config)
    masked = datum.of("sequence_ratio_mask") != 0
    if not bool(masked.any()):
        return (logprobs * 0).sum()
    mean = (logprobs.detach() - datum.of("logprobs"))[masked].mean()
    ratio = torch.exp(mean + logprobs - logprobs.detach())
    advantages = datum.of("advantages")
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


_PPO_DEFAULTS: Config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
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
            "formula, and a guess would train on something else"
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
        _thresholds(config, _PPO_DEFAULTS if name == "ppo" else {})
    if "beta" in options:
        _beta(config)
    return loss, inputs


def _beta(config: Config) -> float:
    beta = _number(config, "beta")
    if beta is None:
        raise RequestError(
            "loss dro: pass loss_fn_config={'beta': ...}: the documentation (losses/dro) gives no default for beta"
        )
    return beta


def _thresholds(config: Config, defaults: Config | None = None) -> tuple[float, float]:
    """The interval that ratios are clamped to; only ppo's is documented ("currently fixed to 0.2")."""
    merged = {**(defaults or {}), **config}
    low, high = _number(merged, "clip_low_threshold"), _number(merged, "clip_high_threshold")
    if low is None or high is None:
        raise RequestError(
            "pass loss_fn_config={'clip_low_threshold': ..., 'clip_high_threshold': ...}: the documentation gives "
            "defaults for ppo only (0.8 and 1.2)"
        )
    if not 0 <= low <= high:
        raise RequestError(f"loss_fn_config: clip_low_threshold {low} and clip_high_threshold {high} are no interval")
    return low, high


def _number(config: Config, name: str) -> float | None:
    value = config.get(name)
    if isinstance(value, str) or (value is not None and not math.isfinite(value)):
        raise RequestError(f"loss_fn_config[{name!r}] must be a finite number, found {value!r}")
    return value
