"""The names and parameters that other people's code relies on: in order, by position or keyword, none renamed."""

import inspect
from types import ModuleType

import pytest

from paritygate.losses import averaging, grpo, policy_gradient, sdpo, spod
from paritygate_reference import averaging as averaging_reference
from paritygate_reference import grpo as grpo_reference
from paritygate_reference import policy_gradient as policy_gradient_reference
from paritygate_reference import sdpo as sdpo_reference
from paritygate_reference import spod as spod_reference

LOGITS = "student_logits teacher_logits mask divergence mixture top_k tail importance_ratio aggregation"
RATIOS = "logprobs sampler_logprobs advantages"
CLIP = "clip_low_threshold clip_high_threshold"
PACKED = "actions action_index episode_index success tau0 floor_weight validate"
SHARED = [
    (grpo_reference, grpo, "group_mean_advantage", "rewards"),
    (policy_gradient_reference, policy_gradient, "importance_sampling_loss", RATIOS),
    (policy_gradient_reference, policy_gradient, "importance_sampling_grad", RATIOS),
    (policy_gradient_reference, policy_gradient, "ppo_loss", f"{RATIOS} {CLIP}"),
    (policy_gradient_reference, policy_gradient, "ppo_grad", f"{RATIOS} {CLIP}"),
    (policy_gradient_reference, policy_gradient, "cispo_loss", f"{RATIOS} {CLIP}"),
    (policy_gradient_reference, policy_gradient, "cispo_grad", f"{RATIOS} {CLIP}"),
    (policy_gradient_reference, policy_gradient, "dro_loss", f"{RATIOS} beta"),
    (policy_gradient_reference, policy_gradient, "dro_grad", f"{RATIOS} beta"),
    (policy_gradient_reference, policy_gradient, "gspo_loss", f"{RATIOS} sequence_ratio_mask {CLIP}"),
    (policy_gradient_reference, policy_gradient, "gspo_grad", f"{RATIOS} sequence_ratio_mask {CLIP}"),
    (sdpo_reference, sdpo, "token_advantage", "teacher_logprobs student_logprobs mask clip"),
    (sdpo_reference, sdpo, "sequence_advantage", "teacher_logprobs student_logprobs mask"),
    (sdpo_reference, sdpo, "hybrid_advantage", "grpo sdpo weight"),
    (sdpo_reference, sdpo, "logit_loss", LOGITS),
    (sdpo_reference, sdpo, "logit_loss_grad", LOGITS),
    (sdpo_reference, sdpo, "select_sibling", "composites index threshold rule"),
    (sdpo_reference, sdpo, "ema", "teacher student rate"),
    (sdpo_reference, sdpo, "trust_region", "initial_logits student_logits rate"),
    (sdpo_reference, sdpo, "frozen_initial", "initial_logits student_logits"),
    (sdpo_reference, sdpo, "current", "initial_logits student_logits"),
]
OWN = [
    (averaging_reference, "three_level_mean", "values"),
    (averaging, "three_level_mean", "values action_index episode_index"),
    (spod_reference, "success_preserving_loss", "episodes tau0 floor_weight"),
    (spod_reference, "success_preserving_grad", "episodes tau0 floor_weight"),
    (spod, "success_preserving_loss", f"student_logits teacher_logits {PACKED}"),
    (spod, "success_preserving_loss_and_grad", f"student_logits teacher_logits {PACKED} out"),
    (
        spod,
        "fused_linear_success_preserving_loss",
        f"student_hidden student_head teacher_hidden teacher_head {PACKED} chunk_tokens exact_teacher_logprob",
    ),
    (
        spod,
        "success_preserving_loss_padded",
        "student_logits teacher_logits actions mask success tau0 floor_weight",
    ),
    (
        spod,
        "success_preserving_weights",
        "student_logprobs teacher_logprobs student_sampled teacher_sampled action_index episode_index success tau0 "
        "floor_weight tail",
    ),
    (sdpo, "cross_entropy_weights", "student_logprobs teacher_logprobs divergence mixture tail"),
]
EVERY = [(m, name, names) for r, i, name, names in SHARED for m in (r, i)] + OWN
DEFAULTS = {
    "clip": 5.0,
    "divergence": "reverse_kl",
    "mixture": 0.5,
    "top_k": None,
    "tail": True,
    "importance_ratio": None,
    "aggregation": "token_mean",
    "threshold": 0.8,
    "rule": "best",
    "tau0": 0.5,
    "floor_weight": 1.0,
    "out": None,
    "validate": True,
    "chunk_tokens": None,
    "exact_teacher_logprob": True,
}


@pytest.mark.parametrize(("module", "name", "names"), EVERY, ids=[f"{m.__name__}.{name}" for m, name, _ in EVERY])
def test_parameters(module: ModuleType, name: str, names: str) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters
    wanted = names.split()
    assert list(parameters)[: len(wanted)] == wanted
    for parameter in list(parameters.values())[: len(wanted)]:
        assert parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
        if parameter.name in DEFAULTS:
            assert parameter.default == DEFAULTS[parameter.name]
    for parameter in list(parameters.values())[len(wanted) :]:
        assert parameter.default is not inspect.Parameter.empty, f"{parameter.name} is new and has no default"
