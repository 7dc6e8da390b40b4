"""tinker-cookbook 0.6.1 over tinker 0.38.0: advantages, the service's importance-sampling loss, distillation terms."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from paritygate.backend import policy_gradient_datum
from paritygate.losses import grpo, policy_gradient, sdpo
from paritygate_reference import grpo as grpo_reference
from paritygate_reference import policy_gradient as policy_gradient_reference
from paritygate_reference import sdpo as sdpo_reference
from tests.golden.golden_numbers import golden

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
    assert case["total"] == [
        sum(steps) + final for steps, final in zip(case["step_rewards"], case["final"], strict=True)
    ]
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


@pytest.mark.parametrize("i", [0, 1])
def test_a_backend_that_divides_departs(i: int) -> None:
    """One known backend divides each sequence by its number of positions; another choice would be that of actions."""
    for datum in golden("tinker_importance_sampling")["cases"][i]["datums"]:
        row = datum["target_logprobs"], datum["sampling_logprobs"], datum["advantages"]
        ours = policy_gradient_reference.importance_sampling_loss(*row)
        for key, count in (
            ("alt_mean_all_positions", len(datum["mask"])),
            ("alt_mean_action_tokens", sum(datum["mask"])),
        ):
            np.testing.assert_allclose(datum[key], ours / count, rtol=1e-12)
    assert "divides each sequence" in golden("tinker_importance_sampling")["backend_divergence"]


def test_its_datums_are_ours() -> None:
    """A turn whose prompt does not begin with all tokens so far starts another datum; no mask goes on the wire."""
    case = golden("tinker_assemble")
    made, owners = [], []
    for number, turns in enumerate(case["trajectories"]):
        tokens: list[int] = []
        for turn in turns:
            if not tokens or turn["ob"][: len(tokens)] != tokens:
                tokens, mask, logprobs = [], [], []
                made.append((tokens, mask, logprobs))
                owners.append({"group_idx": 0, "traj_idx": number})
            given = turn["ob"][len(tokens) :]
            tokens += [*given, *turn["ac"]]
            mask += [0] * len(given) + [1] * len(turn["ac"])
            logprobs += [None] * len(given) + turn["logprobs"]
    assert owners == case["metadata"]
    for datum, (tokens, mask, logprobs), owner in zip(case["datums"], made, owners, strict=True):
        advantage = case["advantages"][owner["traj_idx"]]
        ours = policy_gradient_datum(tokens, mask, logprobs, [advantage] * len(tokens))
        assert sorted(ours.inputs) == case["remove_mask_keys"]
        assert list(ours.tokens[:-1]) == datum["model_input"]
        assert mask[1:] == datum["mask"]["data"]
        for name, sent in ours.to_tinker().loss_fn_inputs.items():
            assert sent.to_numpy().tolist() == datum[name]["data"]
            assert (f"torch.{sent.dtype}", list(sent.shape)) == (datum[name]["dtype"], datum[name]["shape"])


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
    result = results["opd_incorporate_kl_penalty/discount=0.0"]
    assert result["nonzero_adv_on_masked"] == 0
    for datum, before in zip(result["datums"], plain, strict=True):
        group = np.array(before["advantages"]["data"])
        np.testing.assert_allclose(datum["advantages"]["data"], group + advantages_of(datum), **FLOAT32)


def test_its_other_penalty_subtracts_the_mean() -> None:
    """`rl.metrics` adds (mean KL - KL) * mask: the same advantages less the batch's mean, a baseline of its own."""
    results = golden("tinker_distillation")["results"]
    plain = golden("tinker_assemble")["datums"]
    assert results["rl_metrics_incorporate_kl_penalty/discount=0.0"]["nonzero_adv_on_masked"] == 0
    datums = results["rl_metrics_incorporate_kl_penalty/discount=0.0"]["datums"]
    ours = [advantages_of(datum) for datum in datums]
    tokens = sum(sum(datum["mask"]["data"]) for datum in datums)
    mean = sum(row.sum() for row in ours) / tokens
    for datum, before, row in zip(datums, plain, ours, strict=True):
        mask, group = np.array(datum["mask"]["data"]), np.array(before["advantages"]["data"])
        np.testing.assert_allclose(datum["advantages"]["data"], group + (row - mean) * mask, rtol=0, atol=1e-6)


def discounted(row: np.ndarray, discount: float) -> np.ndarray:
    """At each position the sum of what comes from there on, each step further counted `discount` times as much."""
    total, sums = 0.0, np.zeros_like(row)
    for t in range(len(row) - 1, -1, -1):
        sums[t] = total = row[t] + discount * total
    return sums


@pytest.mark.parametrize("kind", ["opd", "rl_metrics"])
def test_its_discount_leaks_onto_positions_that_are_not_actions(kind: str) -> None:
    """With a discount of 0.9, fourteen positions that are no action carry an advantage: the wire masks nothing.

    It is the discounted sum of what is to come, of the token advantages or (`rl_metrics`) those less their mean.
    """
    leaked = golden("tinker_distillation")["results"][f"{kind}_incorporate_kl_penalty/discount=0.9"]
    assert leaked["nonzero_adv_on_masked"] == 14
    masks = [np.array(datum["mask"]["data"]) for datum in leaked["datums"]]
    rows = [advantages_of(datum) for datum in leaked["datums"]]
    baseline = sum(row.sum() for row in rows) / sum(mask.sum() for mask in masks) if kind == "rl_metrics" else 0.0
    on_masked = 0
    for datum, mask, row, before in zip(
        leaked["datums"], masks, rows, golden("tinker_assemble")["datums"], strict=True
    ):
        assert not row[mask == 0].any()
        group, theirs = np.array(before["advantages"]["data"]), np.array(datum["advantages"]["data"])
        np.testing.assert_allclose(theirs, group + discounted((row - baseline) * mask, 0.9), rtol=0, atol=3e-7)
        on_masked += np.count_nonzero(theirs[mask == 0])
    assert on_masked == 14


def test_its_self_distillation_is_the_token_advantage_on_the_teachers_context() -> None:
    """Teacher and student score the same action tokens; the teacher's positions are those of its longer prompt."""
    for datum in golden("tinker_distillation")["results"]["sdft_advantages_061"]["datums"]:
        targets, student, mask = (datum[key]["data"] for key in ("target_tokens", "logprobs", "mask"))
        # The teacher saw 5 prompt tokens where the student saw 3.
        ours = sdpo_reference.token_advantage(fake_teacher(targets, offset=2), student, mask)
        np.testing.assert_allclose(datum["advantages"]["data"], ours, **FLOAT32)


def test_an_older_commit_misaligned_the_second_turn() -> None:
    """At 9dfcc3a the teacher of a multi-turn datum was read two positions early from the second turn on."""
    results = golden("tinker_distillation")["results"]
    for datum in results["sdft_advantages_commit_9dfcc3a_MULTITURN_MISALIGNED"]["datums"]:
        targets, student, mask = (datum[key]["data"] for key in ("target_tokens", "logprobs", "mask"))
        ours = sdpo_reference.token_advantage(fake_teacher(targets, offset=2), student, mask)
        off = np.abs(np.array(datum["advantages"]["data"]) - ours)
        assert (off[:4] < 1e-6).all()
        assert (off[6:] > 0.2).all()


def test_a_truncated_teacher_silences_its_turn() -> None:
    """Where the teacher's context was cut, its advantages are 0 rather than wrong."""
    datum = golden("tinker_distillation")["results"]["sdft_advantages_061_truncated_ctx8"]["datums"][0]
    assert datum["advantages"]["data"][6:] == [0.0, 0.0]


@pytest.mark.parametrize("skip", [0, 3])
def test_its_top_k_weights_are_truncated_cross_entropy(skip: int) -> None:
    """Its weights are the teacher's renormalised top k: our forward weights without `- p`, the gradient of no KL.

    Only at K = V does the student's own term vanish. The first `skip` action tokens of a sequence can be left out."""
    teacher = torch.tensor([[-0.5, -1.2, -1.9]], dtype=torch.float64)
    student = torch.tensor([[-1.0, -2.0, -1.5]], dtype=torch.float64)
    ours = sdpo.cross_entropy_weights(student, teacher, divergence="forward_kl", tail=False).weights.numpy()
    np.testing.assert_allclose(ours.sum(), 0.0, rtol=0, atol=1e-12)
    expected = (ours + torch.softmax(student, -1).numpy())[0]
    datums = golden("tinker_distillation")["results"][f"sdft_topk_datums_skip{skip}"]["datums"]
    for datum, plain in zip(datums, golden("tinker_assemble")["datums"], strict=False):
        mask = np.array(plain["mask"]["data"])
        row_mask = (mask == 1) & (mask.cumsum() > skip)
        assert datum["model_input"] == plain["model_input"]
        np.testing.assert_allclose(datum["weights"]["data"], np.outer(row_mask, expected), rtol=0, atol=1e-6)
        targets = [[token + j for j in range(3)] for token in plain["target_tokens"]["data"]]
        assert datum["target_tokens"]["data"] == [
            row if r else [0, 0, 0] for row, r in zip(targets, row_mask, strict=True)
        ]


def test_its_custom_reverse_kl_is_the_renormalised_reverse_kl() -> None:
    """Loss and gradient of its custom loss over three tokens are our weights for reverse KL without a tail."""
    case = golden("tinker_distillation")["results"]["sdft_reverse_kl_custom_loss"]
    total = 0.0
    for logprobs, datum, slopes in zip(case["student_logprobs"], case["datums"], case["grads"], strict=True):
        weights = np.array(datum["weights"]["data"])
        row_mask = weights.sum(1) > 0
        student = torch.tensor(np.array(logprobs)[row_mask])
        teacher = torch.tensor(weights[row_mask]).log()
        ours = sdpo.cross_entropy_weights(student, teacher, tail=False).weights.numpy()
        np.testing.assert_allclose(np.array(slopes)[row_mask], -ours, rtol=0, atol=3e-7)
        mask = np.ones((1, len(student)))
        total += sdpo_reference.logit_loss(student[None].numpy(), teacher[None].numpy(), mask, aggregation="token_sum")
    np.testing.assert_allclose(case["loss"], total, rtol=1e-6)
