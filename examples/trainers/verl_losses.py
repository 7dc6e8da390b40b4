"""verl's PPO and GRPO. Install: pip install verl==0.9.1 torch (its vLLM is not needed for the losses)."""

from types import SimpleNamespace

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

SIZES = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "use_dynamic_bsz": True}


def ppo_loss(logprobs, sampler_logprobs, advantages, clip_low_threshold, clip_high_threshold):
    """The sum over tokens; its bounds are distances from 1; the dual clip out of reach."""
    config = ActorConfig(
        clip_ratio_low=1.0 - clip_low_threshold,
        clip_ratio_high=clip_high_threshold - 1.0,
        clip_ratio_c=1e30,
        **SIZES,
    )
    mask = torch.ones_like(logprobs)
    return core_algos.compute_policy_loss_vanilla(
        sampler_logprobs, logprobs, advantages, mask, loss_agg_mode="token-sum", config=config
    )[0]


def group_mean_advantage(rewards):
    """One token a response; not divided by the deviation."""
    scores, mask = rewards[:, None].clone(), torch.ones(len(rewards), 1, dtype=rewards.dtype)
    index = np.zeros(len(rewards), dtype=int)
    return core_algos.compute_grpo_outcome_advantage(scores, mask, index, norm_adv_by_std_in_grpo=False)[0][:, 0]


def estimator(name):
    """Its estimators of the KL to a reference."""
    return lambda logprobs, reference_logprobs: core_algos.kl_penalty(logprobs, reference_logprobs, name)


policy_gradient = SimpleNamespace(ppo_loss=ppo_loss)
grpo = SimpleNamespace(group_mean_advantage=group_mean_advantage)
kl_estimators = SimpleNamespace(k1=estimator("k1"), k2=estimator("k2"), k3=estimator("k3"), surrogate=estimator("k3+"))
