"""sdpo-rl, verl, prime-rl and SkyRL: where they are the definitions and where they depart."""

import itertools
import math

import numpy as np
import pytest
import torch

from paritygate.losses import sdpo
from paritygate_reference import _distributions
from paritygate_reference import policy_gradient as policy_gradient_reference
from paritygate_reference import sdpo as sdpo_reference
from tests.golden.golden_numbers import EXACT, golden, inputs, log_softmax, sampled_gradient

RESULTS = golden("other_impls")["results"]


def test_sdpo_rl_returns_the_official_numbers() -> None:
    """Six cases equal to the last bit, so what is shown of the official code holds for it."""
    official = {case["name"]: case["loss"] for case in golden("sdpo_losses_official")["cases"]}
    for name, case in RESULTS["sdpo_rl_0.0.3_vs_official"].items():
        assert case["sdpo_rl"] == case["official"] == official[name]
        assert case["max_grad_diff"] == 0.0


def test_verl_keeps_the_teachers_top_k_and_neither_a_tail_nor_renormalises() -> None:
    """Its forward KL is cut to the teacher's k largest: it can be negative, and its minimum is not at the teacher."""
    case = RESULTS["verl_forward_kl_topk"]
    student, teacher = (np.array(case[f"{who}_logits"])[0] for who in ("student", "teacher"))
    p, q = log_softmax(student), log_softmax(teacher)
    kept = np.argsort(-teacher, axis=-1)[:, : case["k"]]
    p_kept, q_kept = (np.take_along_axis(row, kept, -1) for row in (p, q))
    np.testing.assert_allclose(case["raw"][0], (np.exp(q_kept) * (q_kept - p_kept)).sum(-1), rtol=1e-5)
    assert case["clamped"] == case["raw"]  # no log-ratio is over its clamp here
    slopes = np.exp(p) * np.exp(q_kept).sum(-1, keepdims=True)
    np.put_along_axis(slopes, kept, np.take_along_axis(slopes, kept, -1) - np.exp(q_kept), -1)
    np.testing.assert_allclose(case["grad"][0], slopes, rtol=0, atol=1e-6)
    full = [_distributions.kl_divergence(b, a) for a, b in zip(p, q, strict=True)]
    assert np.abs(np.array(case["raw"][0]) - full).min() > 1e-3


def test_verls_clamp_kills_the_gradient_where_teacher_and_student_disagree_most() -> None:
    """Log-ratios are clamped at 10 after the fact: beyond it nothing is learnt. The definition's gradient is near 1."""
    clamped = RESULTS["verl_forward_kl_topk_confident_disagree_clamp=-10.0"]
    free = RESULTS["verl_forward_kl_topk_confident_disagree_clamp=None"]
    assert not np.array(clamped["grad"]).any()
    assert abs(clamped["raw"][0][0] - 10.0) < 1e-4
    assert abs(free["raw"][0][0] - 15.0) < 1e-4
    student, teacher = np.array(free["student_logits"]), np.array(free["teacher_logits"])
    ours = sdpo_reference.logit_loss_grad(student, teacher, np.ones((1, 1)), divergence="forward_kl")
    assert np.abs(ours).max() > 0.99
    # Without the clamp only the truncation is left: 1e-6 of the mass.
    np.testing.assert_allclose(free["grad"], ours, rtol=0, atol=2e-6)


def test_prime_rls_reference_kl_is_the_token_advantage_under_importance_sampling() -> None:
    """Its gradient is ratio times (trainer - reference), plus 2e-3 log ratio from a small quadratic term of its own."""
    case = RESULTS["prime_rl_ref_kl"]
    trainer, sampler, teacher = (np.array(case[f"{who}_logprobs"]) for who in ("trainer", "inference", "ref"))
    advantage = sdpo_reference.token_advantage(teacher, trainer, case["mask"], clip=math.inf)
    gradient = policy_gradient_reference.importance_sampling_grad(trainer, sampler, advantage)
    quadratic = trainer - sampler
    np.testing.assert_allclose(case["grad"], gradient + 2e-3 * quadratic, rtol=0, atol=1e-6)
    loss = policy_gradient_reference.importance_sampling_loss(trainer, sampler, advantage)
    np.testing.assert_allclose(case["loss"], loss + 1e-3 * (quadratic**2).sum(), rtol=1e-7)
    assert np.abs(advantage).max() > 4.0  # it does not clip


def test_trls_importance_weighted_distillation_weighs_a_token_by_what_is_left_of_its_sequence() -> None:
    """IW-OPD, gamma 1: the token advantage against the sampler, times 1 + the share of |advantage| still to come.

    From 2 at the first token down to 1 + the last one's share, a token mean: no loss defined here weighs positions so.
    """
    case, x = RESULTS["trl_iw_opd_gamma1"], inputs()
    sampler, mask = np.array(golden("sdpo_losses_official")["inputs"]["old_log_probs"]), x["response"]
    tokens = np.array(golden("sdpo_losses_official")["inputs"]["completion_ids"])
    assert np.array_equal(np.array(case["labels"]), np.where(mask == 1, tokens, -100))
    rows = zip(x["teacher_logprobs"], sampler, mask, strict=True)
    advantage = np.stack([sdpo_reference.token_advantage(*row, clip=math.inf) for row in rows])
    size = np.abs(advantage)
    to_come = np.flip(np.flip(size, 1).cumsum(1), 1) / size.sum(1, keepdims=True)
    weight = (1.0 + to_come) * advantage / mask.sum()
    np.testing.assert_allclose(case["loss"], -(weight * x["student_logprobs"]).sum(), **EXACT)
    np.testing.assert_allclose(case["grad"], sampled_gradient(weight), rtol=0, atol=4e-16)
    plain = sampled_gradient(advantage / mask.sum())
    assert np.abs(np.array(case["grad"]) - plain).max() > 0.1


def test_skyrls_torch_backend_sums_as_documented() -> None:
    datums = [d for case in golden("tinker_importance_sampling")["cases"] for d in case["datums"]]
    for theirs, datum in zip(RESULTS["skyrl_torch_importance_sampling"], datums, strict=True):
        row = datum["target_logprobs"], datum["sampling_logprobs"], datum["advantages"]
        np.testing.assert_allclose(
            theirs["skyrl"], policy_gradient_reference.importance_sampling_loss(*row), rtol=1e-12
        )


def test_k3_has_the_gradient_of_the_forward_kl_and_naive_k1_none() -> None:
    """By enumeration: k3 backpropagated is not the reverse KL (0.133 apart), and k1 backpropagated is no signal."""
    case = golden("token_math")
    grads = {name: np.array(value) for name, value in case["grads"].items()}
    assert np.abs(grads["naive_k1"]).max() < 1e-14
    np.testing.assert_allclose(grads["k3_backprop"], grads["full_fkl"], rtol=0, atol=1e-14)
    assert abs(np.abs(grads["k3_backprop"] - grads["full_rkl"]).max() - 0.1329) < 1e-3
    for name in ("sampled", "is_ratio1", "is_ratio1_baseline_minus1", "k2_backprop"):
        np.testing.assert_allclose(grads[name], grads["full_rkl"], rtol=0, atol=1e-14)


def test_the_enumerated_gradient_is_the_one_defined_here() -> None:
    """The table's reverse-KL gradient from logit_loss: each prefix's row weighted by its probability."""
    case = golden("token_math")
    student, teacher = np.array(case["student_logits"]), np.array(case["teacher_logprobs"])
    log_p = log_softmax(student)
    index = {tuple(prefix): i for i, prefix in enumerate(case["prefixes"])}
    for name, divergence in (("full_rkl", "reverse_kl"), ("full_fkl", "forward_kl")):
        reach = np.array(
            [
                math.exp(sum(log_p[index[tuple(prefix[:t])], token] for t, token in enumerate(prefix)))
                for prefix in case["prefixes"]
            ]
        )
        options = {"divergence": divergence, "aggregation": "token_sum", "importance_ratio": reach[None]}
        mask = np.ones((1, len(student)))
        expected = sdpo_reference.logit_loss_grad(student[None], teacher[None], mask, **options)
        np.testing.assert_allclose(case["grads"][name], expected[0], rtol=0, atol=1e-14)
        value = sdpo_reference.logit_loss(student[None], teacher[None], mask, **options)
        np.testing.assert_allclose(case["values"][name], value, **EXACT)


def test_the_enumerated_values_and_differences() -> None:
    """Every sequence, weighted: what each estimator's value is, and how far the recorded gradients are apart."""
    case = golden("token_math")
    log_p, log_q = log_softmax(np.array(case["student_logits"])), np.array(case["teacher_logprobs"])
    index = {tuple(prefix): i for i, prefix in enumerate(case["prefixes"])}
    expected = dict.fromkeys(case["values"], 0.0)
    for sequence in itertools.product(range(4), repeat=3):
        rows = [index[sequence[:t]] for t in range(3)]
        p, q = (np.array([x[row, token] for row, token in zip(rows, sequence, strict=True)]) for x in (log_p, log_q))
        kl = [(np.exp(log_p[row]) * (log_p[row] - log_q[row])).sum() for row in rows]
        forward = [(np.exp(log_q[row]) * (log_q[row] - log_p[row])).sum() for row in rows]
        terms = {
            "full_rkl": sum(kl),
            "full_fkl": sum(forward),
            "sampled": ((p - q) * p).sum(),
            "is_ratio1": (p - q).sum(),
            "is_ratio1_baseline_minus1": (p - q + 1).sum(),
            "naive_k1": (p - q).sum(),
            "seqkl": (p - q).sum(),
            "rtg_gamma1": np.flip(np.flip(p - q).cumsum()).sum(),
            "k2_backprop": ((p - q) ** 2 / 2).sum(),
            "k3_backprop": (np.exp(q - p) - 1 - (q - p)).sum(),
        }
        for name, term in terms.items():
            expected[name] += math.exp(p.sum()) * term
    for name, value in case["values"].items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-13)
    grads = {name: np.array(value) for name, value in case["grads"].items()}
    for name, first, second in (
        ("sampled_surrogate - full_rkl", "sampled", "full_rkl"),
        ("IS(ratio=1) - full_rkl", "is_ratio1", "full_rkl"),
        ("IS with A-1 - full_rkl", "is_ratio1_baseline_minus1", "full_rkl"),
        ("k2 backprop - full_rkl", "k2_backprop", "full_rkl"),
        ("k3 backprop - full_fkl", "k3_backprop", "full_fkl"),
        ("k3 backprop - full_rkl", "k3_backprop", "full_rkl"),
        ("reward-to-go(gamma=1) - sequence KL", "rtg_gamma1", "seqkl"),
        ("token-level(full_rkl) - sequence KL", "full_rkl", "seqkl"),
    ):
        assert case["diffs"][name] == pytest.approx(np.abs(grads[first] - grads[second]).max(), rel=1e-9, abs=3e-16)
    for name, grad in (
        ("|grad full_rkl|", "full_rkl"),
        ("|grad seqKL|", "seqkl"),
        ("naive k1 backprop |grad|", "naive_k1"),
    ):
        assert case["diffs"][name] == pytest.approx(np.linalg.norm(grads[grad]), rel=1e-9, abs=0.0)
    for name, value in (
        ("value IS ratio=1 = E[sum(log pi-log q)]", "is_ratio1"),
        ("value full_rkl", "full_rkl"),
        ("value sampled surrogate", "sampled"),
    ):
        assert case["diffs"][name] == case["values"][value]


def test_token_level_is_not_the_gradient_of_the_sequence_kl() -> None:
    """Reward-to-go with gamma = 1 is; the token level leaves 0.139 of it out by holding the prefixes fixed."""
    grads = {name: np.array(value) for name, value in golden("token_math")["grads"].items()}
    np.testing.assert_allclose(grads["rtg_gamma1"], grads["seqkl"], rtol=0, atol=1e-14)
    assert abs(np.abs(grads["full_rkl"] - grads["seqkl"]).max() - 0.1392) < 1e-3


def test_the_sampled_advantages_of_the_golden_batch() -> None:
    """Reference and implementation agree on the batch that the golden losses were made from."""
    x = inputs()
    for clip in (5.0, 0.5):
        rows = zip(x["teacher_logprobs"], x["student_logprobs"], x["distilled"], strict=True)
        expected = np.stack([sdpo_reference.token_advantage(*row, clip=clip) for row in rows])
        batched = [torch.tensor(x[key]) for key in ("teacher_logprobs", "student_logprobs", "distilled")]
        np.testing.assert_allclose(sdpo.token_advantage(*batched, clip=clip).numpy(), expected, **EXACT)
