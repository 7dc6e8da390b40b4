"""TRL 1.16.0: its SDPO averages rows, masked ones too; its generalised JSD is ours; where it departs."""

import math

import numpy as np
import pytest

import paritygate_reference.sdpo as reference
from tests.golden.golden_numbers import EXACT, both, divergence_of, golden, inputs, options_of, sampled_gradient

CASES = {case["name"]: case for case in golden("sdpo_losses_trl")["cases"]}
LOGIT = [name for name, case in CASES.items() if case["params"]["distillation_mode"] != "sampled_token"]


@pytest.mark.parametrize("name", LOGIT)
def test_it_is_the_mean_of_row_means_over_all_rows(name: str) -> None:
    """A row without a token counts as 0 in its mean: ours is the mean over rows with one, larger by 4/3 here."""
    params, x = CASES[name]["params"], inputs()
    mask = x["distilled"] if params["self_distillation_mask"] else x["response"]
    loss, gradient = both(
        x["student"],
        x["teacher"],
        mask,
        **divergence_of(params["distillation_alpha"]),
        top_k=params["distillation_topk"],
        tail=params["distillation_add_tail"],
        aggregation="sequence_mean",
    )
    share = mask.any(axis=1).mean()
    assert share == (0.75 if params["self_distillation_mask"] else 1.0)
    np.testing.assert_allclose(CASES[name]["loss"], loss * share, **EXACT)
    np.testing.assert_allclose(CASES[name]["grad_student_logits"], gradient * share, rtol=0, atol=3e-16)


def test_no_aggregation_here_is_that_when_a_row_is_masked() -> None:
    x = inputs()
    theirs = CASES["trl_full_rkl"]["loss"]
    for aggregation in reference.AGGREGATIONS:
        ours, _ = both(x["student"], x["teacher"], x["distilled"], aggregation=aggregation)
        assert abs(ours - theirs) > 0.1


@pytest.mark.parametrize("name", ["trl_sampled_token_rkl", "trl_sampled_token_rkl_default_isclip2"])
def test_sampled_token(name: str) -> None:
    case, x = CASES[name], inputs()
    old = np.array(golden("sdpo_losses_official")["inputs"]["old_log_probs"])
    ratio = np.ones_like(old)
    if case["params"]["distillation_is_clip"]:
        ratio = np.minimum(np.exp(x["student_logprobs"] - old), case["params"]["distillation_is_clip"])
    rows = zip(x["teacher_logprobs"], x["student_logprobs"], x["distilled"], strict=True)
    advantage = np.stack([reference.token_advantage(*row, clip=math.inf) for row in rows])
    weight = advantage * ratio / np.maximum(x["distilled"].sum(1, keepdims=True), 1) / len(ratio)
    np.testing.assert_allclose(case["loss"], -(weight * x["student_logprobs"]).sum(), **EXACT)
    np.testing.assert_allclose(case["grad_student_logits"], sampled_gradient(weight), rtol=0, atol=4e-16)


def test_each_sampled_token() -> None:
    """Minus the unclipped token advantage times the log-probability, at every position, masked or not."""
    x = inputs()
    rows = zip(x["teacher_logprobs"], x["student_logprobs"], np.ones_like(x["response"]), strict=True)
    advantage = np.stack([reference.token_advantage(*row, clip=math.inf) for row in rows])
    theirs = golden("sdpo_losses_trl")["per_token_trl_loss_utils"]["sampled_token"]
    np.testing.assert_allclose(theirs, -advantage * x["student_logprobs"], rtol=1e-12)


@pytest.mark.parametrize(
    "name", [n for n in golden("sdpo_losses_trl")["per_token_trl_loss_utils"] if n != "sampled_token"]
)
def test_each_token(name: str) -> None:
    x = inputs()
    theirs = np.array(golden("sdpo_losses_trl")["per_token_trl_loss_utils"][name])
    for b in range(4):
        for t in range(6):
            row = slice(b, b + 1), slice(t, t + 1)
            loss, _ = both(x["student"][row], x["teacher"][row], np.ones((1, 1)), **options_of(name))
            np.testing.assert_allclose(theirs[b, t], loss, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_generalised_jsd_of_its_gkd(beta: float) -> None:
    """`batchmean` over unmasked tokens: token_mean, with its beta as the mixture and the ends as the two KLs."""
    case, x = golden("sdpo_losses_trl")["gkd_generalized_jsd"][f"beta{beta:g}"], inputs()
    loss, gradient = both(x["student"], x["teacher"], x["response"], **divergence_of(beta))
    np.testing.assert_allclose(case["loss"], loss, **EXACT)
    np.testing.assert_allclose(case["grad_student_logits"], gradient, rtol=0, atol=3e-16)


def test_ema() -> None:
    case = golden("teacher_and_microbatch")["results"]["trl_ema"]
    expected = reference.ema(case["teacher_before"], case["student"], case["rate"])
    np.testing.assert_allclose(case["teacher_after"], expected, rtol=1e-7)


@pytest.mark.parametrize("name", golden("sibling_selection")["cases"])
def test_siblings(name: str) -> None:
    """The first above the threshold here too; an option of its own lets a rollout demonstrate to itself: never here."""
    case = golden("sibling_selection")["cases"][name]["trl"]
    for i, chosen in enumerate(case["chosen"]):
        group = case["rewards"][i - i % 4 : i - i % 4 + 4]
        if name == "one_success_self_allowed" and case["rewards"][i] >= case["threshold"]:
            assert chosen == i
            continue
        sibling = reference.select_sibling(group, i % 4, threshold=case["threshold"], rule="first")
        assert (None if sibling is None else sibling + i - i % 4) == chosen
