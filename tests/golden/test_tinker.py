"""tinker-cookbook 0.6.1 over tinker 0.38.0: advantages, the service's importance-sampling loss, distillation terms."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from golden_numbers import golden

from paritygate.losses import grpo, policy_gradient, sdpo
from paritygate_reference import grpo as grpo_reference
from paritygate_reference import policy_gradient as policy_gradient_reference
from paritygate_reference import sdpo as sdpo_reference

FLOAT32 = {"rtol": 0, "atol": 3e-7}  # the cookbook computes in float32


@pytest.mark.parametrize("i", range(len(golden("tinker_advantages")["cases"])))
def test_group_mean(i: int) -> None:
    case = golden("tinker_advantages")["cases"][i]
    ours = grpo_reference.group_mean_advantage(case["rewards"])
    np.testing.assert_allclose(grpo.group_mean_advantage(case["rewards"]).numpy(), ours, rtol=0, atol=1e-8)
    if max(case["rewards"]) < 1e7:
        np.testing.assert_allclose(case["advantages"], ours, **FLOAT32)
    else:
        # Centred in float32, rewards of 1e8 and 1e8 + 1 are one number and the signal is gone.
        assert case["advantages"] == [0.0, 0.0, 0.0]
        np.testing.assert_allclose(ours, [0.0, 1.0, -1.0], rtol=0, atol=0)


def test_step_rewards_and_final_reward_are_added_before_centring() -> None:
    case = golden("tinker_advantages")["step_plus_final"]
    np.testing.assert_allclose(case["advantages"], grpo_reference.group_mean_advantage(case["total"]), rtol=0, atol=0)


@pytest.mark.parametrize("i", [0, 1])
def test_importance_sampling(i: int) -> None:
    """A sum over everything sent, prompt positions silenced by advantage 0 alone."""
    case = golden("tinker_importance_sampling")["cases"][i]
    total = 0.0
    for datum in case["datums"]:
        row = datum["target_logprobs"], datum["sampling_logprobs"], datum["advantages"]
        np.testing.assert_allclose(
            policy_gradient_reference.importance_sampling_loss(*row), datum["loss_sum"], rtol=1e-12
        )
        gradient = policy_gradient_reference.importance_sampling_grad(*row)
        np.testing.assert_allclose(gradient, datum["grad_logprobs"], rtol=1e-12)
        logprobs, sampler, advantages = (torch.tensor(part, dtype=torch.float64) for part in row)
        loss = policy_gradient.importance_sampling_loss(logprobs.requires_grad_(), sampler, advantages)
        np.testing.assert_allclose(torch.autograd.grad(loss, logprobs)[0], gradient, rtol=1e-12)
        total += loss.item()
    np.testing.assert_allclose(case["total_loss"], total, rtol=1e-12)


def test_a_backend_that_divides_departs() -> None:
    """One known backend divides each sequence by its number of positions: four here, so its loss is a quarter."""
    datum = golden("tinker_importance_sampling")["cases"][0]["datums"][0]
    ours = policy_gradient_reference.importance_sampling_loss(
        datum["target_logprobs"], datum["sampling_logprobs"], datum["advantages"]
    )
    np.testing.assert_allclose(datum["alt_mean_all_positions"], ours / 4, rtol=1e-12)
    assert "divides each sequence" in golden("tinker_importance_sampling")["backend_divergence"]


def fake_teacher(targets: list[int], offset: int = 0) -> list[float]:
    """The stand-in teacher that the numbers were made with: -0.1 (position + 1) - 0.01 token."""
    return [-0.1 * (offset + i + 2) - 0.01 * token for i, token in enumerate(targets)]


def advantages_of(datum: dict[str, Any]) -> np.ndarray:
    """Our token-level advantage of a datum, unclipped."""
    targets, student, mask = (datum[key]["data"] for key in ("target_tokens", "logprobs", "mask"))
    teacher = fake_teacher(targets)
    ours = sdpo_reference.token_advantage(teacher, student, mask, clip=math.inf)
    np.testing.assert_allclose(sdpo.token_advantage(teacher, student, mask, clip=math.inf).numpy(), ours, rtol=1e-12)
    return ours


def test_its_on_policy_distillation_adds_the_token_advantage() -> None:
    """Without discount: advantage = group advantage + (teacher - student) * mask, as token_advantage says."""
    results = golden("tinker_distillation")["results"]
    plain = golden("tinker_assemble")["datums"]
    for datum, before in zip(results["opd_incorporate_kl_penalty/discount=0.0"]["datums"], plain, strict=True):
        group = np.array(before["advantages"]["data"])
        np.testing.assert_allclose(datum["advantages"]["data"], group + advantages_of(datum), **FLOAT32)


def test_its_other_penalty_subtracts_the_mean() -> None:
    """`rl.metrics` adds (mean KL - KL) * mask: the same advantages less the batch's mean, a baseline of its own."""
    results = golden("tinker_distillation")["results"]
    plain = golden("tinker_assemble")["datums"]
    datums = results["rl_metrics_incorporate_kl_penalty/discount=0.0"]["datums"]
    ours = [advantages_of(datum) for datum in datums]
    tokens = sum(sum(datum["mask"]["data"]) for datum in datums)
    mean = sum(row.sum() for row in ours) / tokens
    for datum, before, row in zip(datums, plain, ours, strict=True):
        mask, group = np.array(datum["mask"]["data"]), np.array(before["advantages"]["data"])
        np.testing.assert_allclose(datum["advantages"]["data"], group + (row - mean) * mask, rtol=0, atol=1e-6)


def test_its_discount_leaks_onto_positions_that_are_not_actions() -> None:
    """With a discount of 0.9, fourteen positions that are no action carry an advantage: the wire masks nothing."""
    leaked = golden("tinker_distillation")["results"]["opd_incorporate_kl_penalty/discount=0.9"]
    assert leaked["nonzero_adv_on_masked"] == 14
    for datum in leaked["datums"]:
        assert not advantages_of(datum)[np.array(datum["mask"]["data"]) == 0].any()


def test_its_self_distillation_is_the_token_advantage_on_the_teachers_context() -> None:
    """Teacher and student score the same action tokens; the teacher's positions are those of its longer prompt."""
    for datum in golden("tinker_distillation")["results"]["sdft_advantages_061"]["datums"]:
        targets, student, mask = (datum[key]["data"] for key in ("target_tokens", "logprobs", "mask"))
        # The teacher saw 5 prompt tokens where the student saw 3.
        ours = sdpo_reference.token_advantage(fake_teacher(targets, offset=2), student, mask)
        np.testing.assert_allclose(datum["advantages"]["data"], ours, **FLOAT32)


def test_an_older_commit_misaligned_the_second_turn() -> None:
    """At 9dfcc3a the teacher of a multi-turn datum was read two positions early from the second turn on."""
    datum = golden("tinker_distillation")["results"]["sdft_advantages_commit_9dfcc3a_MULTITURN_MISALIGNED"]["datums"][1]
    targets, student, mask = (datum[key]["data"] for key in ("target_tokens", "logprobs", "mask"))
    ours = sdpo_reference.token_advantage(fake_teacher(targets, offset=2), student, mask)
    off = np.abs(np.array(datum["advantages"]["data"]) - ours)
    assert (off[:4] < 1e-6).all()
    assert (off[6:] > 0.2).all()


def test_a_truncated_teacher_silences_its_turn() -> None:
    """Where the teacher's context was cut, its advantages are 0 rather than wrong."""
    datum = golden("tinker_distillation")["results"]["sdft_advantages_061_truncated_ctx8"]["datums"][0]
    assert datum["advantages"]["data"][6:] == [0.0, 0.0]


def test_its_top_k_weights_are_truncated_cross_entropy() -> None:
    """Its weights are the teacher's renormalised top k: our forward weights without `- p`, the gradient of no KL.

    Only at K = V does the student's own term vanish."""
    for datum in golden("tinker_distillation")["results"]["sdft_topk_datums_skip0"]["datums"]:
        weights = np.array(datum["weights"]["data"])
        read = weights.sum(1) > 0
        teacher = torch.tensor([[-0.5, -1.2, -1.9]], dtype=torch.float64)
        student = torch.tensor([[-1.0, -2.0, -1.5]], dtype=torch.float64)
        ours = sdpo.cross_entropy_weights(student, teacher, divergence="forward_kl", tail=False).weights.numpy()
        expected = np.broadcast_to(ours + torch.softmax(student, -1).numpy(), weights[read].shape)
        np.testing.assert_allclose(weights[read], expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours.sum(), 0.0, rtol=0, atol=1e-12)


def test_its_custom_reverse_kl_is_the_renormalised_reverse_kl() -> None:
    """Loss and gradient of its custom loss over three tokens are our weights for reverse KL without a tail."""
    case = golden("tinker_distillation")["results"]["sdft_reverse_kl_custom_loss"]
    total = 0.0
    for logprobs, datum, slopes in zip(case["student_logprobs"], case["datums"], case["grads"], strict=True):
        weights = np.array(datum["weights"]["data"])
        read = weights.sum(1) > 0
        student = torch.tensor(np.array(logprobs)[read])
        teacher = torch.tensor(weights[read]).log()
        ours = sdpo.cross_entropy_weights(student, teacher, tail=False).weights.numpy()
        np.testing.assert_allclose(np.array(slopes)[read], -ours, rtol=0, atol=3e-7)
        mask = np.ones((1, len(student)))
        total += sdpo_reference.logit_loss(student[None].numpy(), teacher[None].numpy(), mask, aggregation="token_sum")
    np.testing.assert_allclose(case["loss"], total, rtol=1e-6)
