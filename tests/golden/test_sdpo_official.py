"""The official SDPO repository at 0e6d5106: every case that the definitions cover, and where it departs."""

import math
from typing import Any

import numpy as np
import pytest
from golden_numbers import EXACT, both, divergence_of, golden, inputs, options_of

import paritygate_reference.sdpo as reference
from paritygate.losses import sdpo

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
    loss, _ = logit_case("official_full_rkl_seq-mean-token-mean")
    theirs = CASES["official_full_rkl_seq-mean-token-mean"]["loss"]
    assert 1e-9 < loss / theirs - 1.0 < 3e-9


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
    weighted = -advantage * x["student_logprobs"] * (1.0 if ratio is None else ratio)
    np.testing.assert_allclose(case["loss"], weighted.sum() / x["distilled"].sum(), **EXACT)


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


@pytest.mark.parametrize("name", ["full_fkl", "top2tail_fkl", "full_jsd", "top2tail_jsd", "full_rkl", "top2tail_rkl"])
def test_edge_case_base(name: str) -> None:
    x = inputs("edge_cases")
    loss, gradient = both(x["student"], x["teacher"], x["distilled"], **options_of(name))
    theirs = golden("edge_cases")["results"][f"base/official_{name}"]
    np.testing.assert_allclose(theirs["loss"], loss, **EXACT)
    np.testing.assert_allclose(np.array(theirs["grad"], dtype=float), gradient, rtol=0, atol=3e-16)


@pytest.mark.parametrize("kind", ["fkl", "jsd"])
def test_it_loses_a_finite_loss_where_the_teacher_excludes_an_entry(kind: str) -> None:
    """0 log 0 becomes 0 times -inf, NaN, where the definition is finite. With a tail bucket it agrees again."""
    results, x = golden("edge_cases")["results"], inputs("edge_cases")
    teacher = x["teacher"].copy()
    teacher[0, 0, 4] = -np.inf
    assert results[f"teacher_neginf_one_vocab_at_unmasked/official_full_{kind}"]["loss"] == "nan"
    assert math.isfinite(both(x["student"], teacher, x["distilled"], **options_of(f"full_{kind}"))[0])
    loss, _ = both(x["student"], teacher, x["distilled"], **options_of(f"top2tail_{kind}"))
    theirs = results[f"teacher_neginf_one_vocab_at_unmasked/official_top2tail_{kind}"]["loss"]
    np.testing.assert_allclose(theirs, loss, **EXACT)


def test_reverse_kl_is_infinite_where_the_teacher_excludes_what_the_student_does() -> None:
    results, x = golden("edge_cases")["results"], inputs("edge_cases")
    teacher = x["teacher"].copy()
    teacher[0, 0, 4] = -np.inf
    assert results["teacher_neginf_one_vocab_at_unmasked/official_full_rkl"]["loss"] == "inf"
    assert reference.logit_loss(x["student"], teacher, x["distilled"]) == math.inf


@pytest.mark.parametrize("kind", ["fkl", "jsd", "rkl"])
def test_it_loses_a_padded_vocabulary(kind: str) -> None:
    """An entry at -inf on both sides is NaN upstream; by definition it contributes nothing, in value and gradient."""
    results, x = golden("edge_cases")["results"], inputs("edge_cases")
    student, teacher = x["student"].copy(), x["teacher"].copy()
    student[..., 4] = teacher[..., 4] = -np.inf
    assert results[f"both_neginf_vocab_pad/official_full_{kind}"]["loss"] == "nan"
    loss, gradient = both(student, teacher, x["distilled"], **options_of(f"full_{kind}"))
    without, slopes = both(student[..., :4], teacher[..., :4], x["distilled"], **options_of(f"full_{kind}"))
    np.testing.assert_allclose(loss, without, **EXACT)
    np.testing.assert_allclose(gradient[..., :4], slopes, rtol=0, atol=1e-16)
    assert not gradient[..., 4].any()
    tail, _ = both(student, teacher, x["distilled"], **options_of(f"top2tail_{kind}"))
    np.testing.assert_allclose(results[f"both_neginf_vocab_pad/official_top2tail_{kind}"]["loss"], tail, **EXACT)


@pytest.mark.parametrize("kind", ["fkl", "jsd", "rkl"])
def test_what_is_masked_reaches_its_gradient(kind: str) -> None:
    """NaN at a masked teacher position spares its loss and makes its gradient NaN: the mask multiplies. Not ours."""
    results, x = golden("edge_cases")["results"], inputs("edge_cases")
    assert not results[f"teacher_nan_at_MASKED/official_full_{kind}"]["grad_finite"]
    teacher = np.where(x["distilled"][..., None] == 1, x["teacher"], np.nan)
    loss, gradient = both(x["student"], teacher, x["distilled"], **options_of(f"full_{kind}"))
    np.testing.assert_allclose(results[f"base/official_full_{kind}"]["loss"], loss, **EXACT)
    assert np.isfinite(gradient).all()


def test_a_fully_masked_batch_is_zero_or_nan_there_and_refused_here() -> None:
    results, x = golden("edge_cases")["results"], inputs("edge_cases")
    assert results["all_masked/official_token-mean"]["loss"] == 0.0
    assert results["all_masked/official_seq-mean-token-mean"]["loss"] == "nan"
    empty = np.zeros_like(x["distilled"])
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum"):
        with pytest.raises(ValueError, match="masked"):
            both(x["student"], x["teacher"], empty, aggregation=aggregation)
    loss, gradient = both(x["student"], x["teacher"], empty, aggregation="token_sum")
    assert loss == 0.0
    assert not gradient.any()


def test_the_discontinuity_at_the_ends_of_alpha() -> None:
    """Its JSD tends to 0 as alpha does, while alpha = 0 is defined as the forward KL: a jump, kept by name here."""
    results, x = golden("edge_cases")["results"], inputs("edge_cases")
    for alpha in (1e-3, 1e-6, 0.999, 0.999999):
        loss, _ = both(x["student"], x["teacher"], x["distilled"], divergence="jsd", mixture=alpha)
        np.testing.assert_allclose(results[f"jsd_limit/alpha={alpha:g}"]["loss"], loss, rtol=1e-9)
    by_name, _ = both(x["student"], x["teacher"], x["distilled"], divergence="forward_kl")
    assert abs(by_name - 0.38960) < 1e-5
    assert abs(results["jsd_limit/alpha=1e-06"]["loss"] - 3.896e-7) < 1e-10
    for end in (0.0, 1.0):
        with pytest.raises(ValueError, match="mixture"):
            both(x["student"], x["teacher"], x["distilled"], divergence="jsd", mixture=end)


@pytest.mark.parametrize("kind", ["fkl", "rkl"])
@pytest.mark.parametrize(("name", "top_k"), [("K_eq_V", 5), ("K_eq_V-1", 4)])
def test_top_k_of_the_whole_vocabulary_has_an_empty_tail(kind: str, name: str, top_k: int) -> None:
    results, x = golden("edge_cases")["results"], inputs("edge_cases")
    options = {**options_of(f"full_{kind}"), "top_k": top_k}
    loss, _ = both(x["student"], x["teacher"], x["distilled"], **options)
    # Upstream takes the tail as 1 - the kept, which in float64 leaves 1e-15.
    np.testing.assert_allclose(results[f"{name}/torch.float64/tail_{kind}"]["loss"], loss, rtol=1e-13, atol=3e-15)


def test_bfloat16_made_its_divergences_negative() -> None:
    """In bfloat16 its JSD of nearly equal rows is -0.00226 for a true +0.00017: a divergence is never negative."""
    results = golden("edge_cases")["results"]
    assert results["precision/torch.bfloat16/full_jsd"]["loss"] < -0.002
    assert results["precision/torch.float64/full_jsd"]["loss"] > 0.00016
    assert results["precision/torch.bfloat16/full_rkl"]["loss"] < 0.0


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
            found = select(group, i % 4, threshold=case["threshold"], rule="first")
            assert (None if found is None else found + i - i % 4) == chosen


def test_best_and_first_differ() -> None:
    """The experiment takes the best sibling, upstream the first."""
    composites = [0.85, 0.9, 0.95, 0.1]
    for select in (reference.select_sibling, sdpo.select_sibling):
        assert select(composites, 3, rule="best") == 2
        assert select(composites, 3, rule="first") == 0
