"""The official SDPO repository at 0e6d5106: every case that the definitions cover, and where it departs."""

import math
from typing import Any

import numpy as np
import pytest

import paritygate_reference.sdpo as reference
from paritygate.losses import sdpo
from tests.golden.golden_numbers import EXACT, both, divergence_of, golden, inputs, sampled_gradient

CASES = {case["name"]: case for case in golden("sdpo_losses_official")["cases"]}
LOGIT = [name for name, case in CASES.items() if case["params"]["full_logit_distillation"]]
SAMPLED = [name for name, case in CASES.items() if not case["params"]["full_logit_distillation"]]
AGGREGATION = {"token-mean": "token_mean", "seq-mean-token-sum": "sequence_sum", "seq-mean-token-mean": "sequence_mean"}


def ratio_of(params: dict[str, Any]) -> np.ndarray | None:
    """exp(student - old), clamped above as upstream does, times its rollout weights."""
    given, x = golden("sdpo_losses_official")["inputs"], inputs()
    if params["is_clip"] is None:
        return None
    ratio = np.minimum(np.exp(x["student_logprobs"] - np.array(given["old_log_probs"])), params["is_clip"])
    return ratio * np.array(given["rollout_is_weights"]) if params["rollout_is_weights"] else ratio


def logit_case(name: str) -> tuple[float, np.ndarray]:
    """Our loss and gradient for one of its cases."""
    params, x = CASES[name]["params"], inputs()
    return both(
        x["student"],
        x["teacher"],
        x["distilled"] if params["self_distillation_mask"] else x["response"],
        **divergence_of(params["alpha"]),
        top_k=params["distillation_topk"],
        tail=params["distillation_add_tail"],
        importance_ratio=ratio_of(params),
        aggregation=AGGREGATION.get(params["loss_agg_mode"], "token_sum"),
    )


@pytest.mark.parametrize("name", [name for name in LOGIT if not name.endswith(("-mean-token-mean", "-norm"))])
def test_logit_level(name: str) -> None:
    loss, gradient = logit_case(name)
    np.testing.assert_allclose(CASES[name]["loss"], loss, **EXACT)
    np.testing.assert_allclose(CASES[name]["grad_student_logits"], gradient, rtol=0, atol=3e-16)


def test_its_sequence_mean_adds_1e_8_to_each_length() -> None:
    """The denominator of a row is its number of tokens plus 1e-8, so the mean is low by 2e-9 of itself."""
    loss, gradient = logit_case("official_full_rkl_seq-mean-token-mean")
    case = CASES["official_full_rkl_seq-mean-token-mean"]
    theirs = case["loss"]
    assert 1e-9 < loss / theirs - 1.0 < 3e-9
    np.testing.assert_allclose(case["grad_student_logits"], gradient, rtol=1e-8, atol=1e-16)


def test_its_sum_norm_divides_by_the_padded_length() -> None:
    """`seq-mean-token-sum-norm` is the sum over all tokens divided by the padded T = 6: no aggregation here does."""
    loss, gradient = logit_case("official_full_rkl_seq-mean-token-sum-norm")
    case = CASES["official_full_rkl_seq-mean-token-sum-norm"]
    np.testing.assert_allclose(case["loss"], loss / 6, **EXACT)
    np.testing.assert_allclose(case["grad_student_logits"], gradient / 6, rtol=0, atol=3e-16)


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_token_is_the_token_level_advantage(name: str) -> None:
    """Its sampled-token loss is minus the unclipped token advantage times the log-probability, averaged over tokens."""
    case, x = CASES[name], inputs()
    ratio = ratio_of(case["params"])
    rows = zip(x["teacher_logprobs"], x["student_logprobs"], x["distilled"], strict=True)
    advantage = np.stack([reference.token_advantage(*row, clip=math.inf) for row in rows])
    weight = advantage * (1.0 if ratio is None else ratio) / x["distilled"].sum()
    np.testing.assert_allclose(case["loss"], -(weight * x["student_logprobs"]).sum(), **EXACT)
    np.testing.assert_allclose(case["grad_student_logits"], sampled_gradient(weight), rtol=0, atol=3e-16)


def test_its_result_depends_on_the_micro_batches() -> None:
    """It averages over the tokens of a micro-batch: 4, 2 and 1 rows at a time give three numbers. Ours is the first."""
    theirs = golden("teacher_and_microbatch")["results"]["official_microbatch_dependence_full_rkl"]
    x = inputs()
    whole, _ = both(x["student"], x["teacher"], x["distilled"])
    np.testing.assert_allclose(theirs["micro=4"], whole, **EXACT)
    for rows in (2, 1):
        pieces = []
        for start in range(0, 4, rows):
            part = slice(start, start + rows)
            empty = not x["distilled"][part].any()
            pieces.append(0.0 if empty else both(x["student"][part], x["teacher"][part], x["distilled"][part])[0])
        np.testing.assert_allclose(theirs[f"micro={rows}"], np.mean(pieces), **EXACT)
        assert abs(theirs[f"micro={rows}"] - whole) > 0.04


def test_teachers() -> None:
    import torch

    results = golden("teacher_and_microbatch")["results"]
    ema = results["official_ema"]
    expected = reference.ema(ema["teacher_before"], ema["student"], ema["rate"])
    np.testing.assert_allclose(ema["teacher_after"], expected, rtol=1e-7)  # upstream's in float32
    region = results["official_trust_region"]
    expected = reference.trust_region(region["ref_logits"], region["student_logits"], region["mix"])
    np.testing.assert_allclose(region["teacher_logits"][0], expected, **EXACT)
    pair = torch.tensor(region["ref_logits"]), torch.tensor(region["student_logits"])
    np.testing.assert_allclose(sdpo.trust_region(*pair, region["mix"]).numpy(), expected, **EXACT)


@pytest.mark.parametrize("name", golden("sibling_selection")["cases"])
def test_siblings_are_the_first_above_the_threshold(name: str) -> None:
    """It shows each rollout the first sibling of its group at or above the threshold: rule `first`."""
    case = golden("sibling_selection")["cases"][name]["official"]
    for i, chosen in enumerate(case["chosen"]):
        group = case["rewards"][i - i % 4 : i - i % 4 + 4]
        if not case["self_excluded"] and case["rewards"][i] >= case["threshold"]:
            assert chosen == i, "an option of its own lets a rollout demonstrate to itself: never here"
            continue
        for select in (reference.select_sibling, sdpo.select_sibling):
            sibling = select(group, i % 4, threshold=case["threshold"], rule="first")
            assert (None if sibling is None else sibling + i - i % 4) == chosen


def test_best_and_first_differ() -> None:
    """The experiment takes the best sibling, upstream the first."""
    composites = [0.85, 0.9, 0.95, 0.1]
    for select in (reference.select_sibling, sdpo.select_sibling):
        assert select(composites, 3, rule="best") == 2
        assert select(composites, 3, rule="first") == 0
