"""SkyRL's policy losses and GRPO. Install: pip install skyrl==0.4.0 torch ray jaxtyping loguru omegaconf.

It asks for Python 3.12; its losses run on 3.11 too (`--ignore-requires-python`), with pydantic's kind of TypedDict.
"""

import sys
import typing
from types import SimpleNamespace

import numpy as np
import torch

if sys.version_info < (3, 12):
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.train.config import AlgorithmConfig


def loss_of(function, kind):
    """The sum over tokens; its bounds are distances from 1."""

    def loss(logprobs, sampler_logprobs, advantages, mask=None, clip_low_threshold=0.8, clip_high_threshold=1.2):
        config = AlgorithmConfig(policy_loss_type=kind)
        low, high = 1.0 - clip_low_threshold, clip_high_threshold - 1.0
        config.eps_clip_low, config.eps_clip_high = low, high
        config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high = low, high
        given = torch.ones_like(logprobs) if mask is None else mask.to(logprobs.dtype)
        return function(logprobs, sampler_logprobs, advantages, config, given)[0]

    return loss


def group_mean_advantage(rewards):
    """One token a response; not divided by the deviation."""
    scores, mask = rewards[:, None].clone(), torch.ones(len(rewards), 1, dtype=rewards.dtype)
    index = np.zeros(len(rewards), dtype=int)
    return ppo_utils.compute_grpo_outcome_advantage(scores, mask, index, grpo_norm_by_std=False)[0][:, 0]


def estimator(name):
    """Its estimators of the KL to a reference."""
    return lambda logprobs, reference, mask=None: ppo_utils.compute_approx_kl(logprobs, reference, mask, name)


policy_gradient = SimpleNamespace(
    importance_sampling_loss=loss_of(ppo_utils.importance_sampling_loss, "importance_sampling"),
    ppo_loss=loss_of(ppo_utils.ppo_policy_loss, "regular"),
    cispo_loss=loss_of(ppo_utils.compute_policy_loss_cispo, "cispo"),
    gspo_loss=loss_of(ppo_utils.gspo_policy_loss, "gspo"),
)
grpo = SimpleNamespace(group_mean_advantage=group_mean_advantage)
kl_estimators = SimpleNamespace(k1=estimator("k1"), k2=estimator("k2"), k3=estimator("k3"))
