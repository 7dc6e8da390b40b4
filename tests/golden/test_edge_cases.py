"""NaN, -inf, empty masks, low precision in the official SDPO code and in TRL: each case is ours, or NaN.

Neither ever returns another number than the definition's where it returns one at all.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import paritygate_reference.sdpo as reference
from paritygate.losses import sdpo
from tests.golden.golden_numbers import EXACT, both, golden, inputs, log_softmax, options_of

RESULTS: dict[str, Any] = golden("edge_cases")["results"]
FULL = ("full_fkl", "full_jsd", "full_rkl")
LOSSES = (*FULL, "top2tail_fkl", "top2tail_jsd", "top2tail_rkl", "sampled")
CHANGES = (
    "base",
    "teacher_neginf_one_vocab_at_unmasked",
    "teacher_neginf_one_vocab_at_MASKED",
    "teacher_nan_at_MASKED",
    "both_neginf_vocab_pad",
)
AGGREGATION = {"official": "token_mean", "trl": "sequence_mean"}  # here every row has a token


def changed(change: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Student, teacher and mask of a case; in its row 0 position 2 is masked."""
    x = inputs("edge_cases")
    student, teacher = x["student"].copy(), x["teacher"].copy()
    if change == "teacher_neginf_one_vocab_at_unmasked":
        teacher[0, 0, 4] = -np.inf
    elif change == "teacher_neginf_one_vocab_at_MASKED":
        teacher[0, 2, 4] = -np.inf
    elif change == "teacher_nan_at_MASKED":
        teacher[0, 2] = np.nan
    elif change == "both_neginf_vocab_pad":
        student[..., 4] = teacher[..., 4] = -np.inf
    return student, teacher, x["distilled"]


def ours(
    student: np.ndarray,
    teacher: np.ndarray,
    mask: np.ndarray,
    implementation: str,
    loss: str,
    ratio: np.ndarray | None = None,
) -> tuple[float, np.ndarray]:
    """Value and gradient by definition; `sampled`: minus the unclipped token advantage times the log-probability."""
    if loss != "sampled":
        return both(student, teacher, mask, aggregation=AGGREGATION[implementation], **options_of(loss))
    tokens = np.array(golden("edge_cases")["inputs"]["completion_ids"])[..., None]
    log_p, log_q = (np.take_along_axis(log_softmax(x), tokens, -1)[..., 0] for x in (student, teacher))
    rows = zip(log_q, log_p, mask, strict=True)
    advantage = np.stack([reference.token_advantage(*row, clip=math.inf) for row in rows])
    share = mask / (mask.sum() if implementation == "official" else mask.sum(1, keepdims=True) * len(mask))
    weight = advantage * share * (1.0 if ratio is None else ratio)
    onehot = np.zeros_like(student)
    np.put_along_axis(onehot, tokens, 1.0, -1)
    return -(weight * log_p).sum(), weight[..., None] * (np.exp(log_softmax(student)) - onehot)


def number(value: Any) -> float:
    """A stored number; the file writes NaN and infinities as words."""
    return float(value)


def is_nan(change: str, implementation: str, loss: str) -> bool:
    """Whether its value is lost: 0 log 0 over the whole vocabulary, and in TRL what stands where nothing is read."""
    if change == "teacher_neginf_one_vocab_at_unmasked":
        return loss in ("full_fkl", "full_jsd")
    if change == "both_neginf_vocab_pad":
        return loss in FULL
    if implementation == "trl" and change == "teacher_neginf_one_vocab_at_MASKED":
        return loss in FULL
    return implementation == "trl" and change == "teacher_nan_at_MASKED"


def gradient_is_lost(change: str, loss: str) -> bool:
    """Whether its gradient is: the mask multiplies, so NaN at a masked position comes through, in both projects."""
    lost = {
        "teacher_neginf_one_vocab_at_unmasked": ("full_rkl",),  # by definition +inf: no gradient here either
        "teacher_neginf_one_vocab_at_MASKED": ("full_rkl",),
        "teacher_nan_at_MASKED": LOSSES,
        "both_neginf_vocab_pad": ("full_rkl", "full_jsd"),
    }
    return loss in lost.get(change, ())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("implementation", ["official", "trl"])
@pytest.mark.parametrize("change", CHANGES)
def test_it_is_ours_or_nan(change: str, implementation: str, loss: str) -> None:
    theirs = RESULTS[f"{change}/{implementation}_{loss}"]
    value, gradient = ours(*changed(change), implementation, loss)
    assert math.isnan(number(theirs["loss"])) == is_nan(change, implementation, loss)
    if not is_nan(change, implementation, loss):
        np.testing.assert_allclose(number(theirs["loss"]), value, **EXACT)
    stored = np.array(theirs["grad"], dtype=float)
    assert theirs["grad_finite"] == bool(np.isfinite(stored).all()) != gradient_is_lost(change, loss)
    if theirs["grad_finite"]:
        np.testing.assert_allclose(stored, gradient, rtol=0, atol=4e-16)
        np.testing.assert_allclose(theirs["grad_absmax"], np.abs(gradient).max(), rtol=1e-12)
    assert math.isnan(number(theirs["grad_absmax"])) != theirs["grad_finite"]
    assert np.isfinite(gradient).all() == (value < math.inf)


@pytest.mark.parametrize(
    ("implementation", "name"),
    [*itertools.product(["official", "trl"], LOSSES), ("official", "token-mean")],
)
def test_a_fully_masked_batch_is_zero_there(implementation: str, name: str) -> None:
    """Divided by a count clamped to one: a step that learns nothing and says nothing. Here a mean of it is refused."""
    theirs = RESULTS[f"all_masked/{implementation}_{name}"]
    assert (theirs["loss"], theirs["grad_finite"], theirs["grad_absmax"]) == (0.0, True, 0.0)
    assert not np.array(theirs["grad"]).any()
    student, teacher, mask = changed("base")
    with pytest.raises(ValueError, match="masked"):
        both(student, teacher, 0 * mask, aggregation=AGGREGATION[implementation])
    value, gradient = both(student, teacher, 0 * mask, aggregation="token_sum")
    assert (value, gradient.any()) == (0.0, False)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_or_nan_with_a_gradient_of_zero(mode: str) -> None:
    theirs = RESULTS[f"all_masked/official_{mode}"]
    assert math.isnan(number(theirs["loss"]))
    assert (theirs["grad_finite"], theirs["grad_absmax"]) == (True, 0.0)
    assert not np.array(theirs["grad"]).any()


@pytest.mark.parametrize("kind", ["fkl", "rkl"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "top_k"), [("K_eq_V", 5), ("K_eq_V-1", 4)])
def test_top_k_of_the_whole_vocabulary_has_an_empty_tail(name: str, top_k: int, dtype: str, kind: str) -> None:
    """They take the tail as 1 - the kept, which leaves the rounding of their dtype: 1e-15 or 1e-7."""
    theirs = RESULTS[f"{name}/torch.{dtype}/tail_{kind}"]
    student, teacher, mask = changed("base")
    value, gradient = both(student, teacher, mask, **{**options_of(f"full_{kind}"), "top_k": top_k})
    close = {"float64": {"rtol": 1e-13, "atol": 3e-15}, "float32": {"rtol": 3e-7, "atol": 1e-7}}[dtype]
    assert theirs["grad_finite"]
    for key, expected in (("loss", value), ("grad", gradient), ("grad_absmax", np.abs(gradient).max())):
        np.testing.assert_allclose(np.array(theirs[key], dtype=float), expected, **close)


@pytest.mark.parametrize("alpha", [1e-3, 1e-6, 0.999, 0.999999])
def test_the_discontinuity_at_the_ends_of_alpha(alpha: float) -> None:
    """Their JSD tends to 0 as alpha does, while alpha = 0 is the forward KL by name: a jump, kept by name here."""
    theirs = RESULTS[f"jsd_limit/alpha={alpha:g}"]
    student, teacher, mask = changed("base")
    value, gradient = both(student, teacher, mask, divergence="jsd", mixture=alpha)
    assert theirs["grad_finite"]
    np.testing.assert_allclose(theirs["loss"], value, rtol=1e-9)
    np.testing.assert_allclose(theirs["grad"], gradient, rtol=0, atol=1e-15)
    np.testing.assert_allclose(theirs["grad_absmax"], np.abs(gradient).max(), rtol=1e-9)


def test_the_ends_are_asked_for_by_name() -> None:
    student, teacher, mask = changed("base")
    assert abs(both(student, teacher, mask, divergence="forward_kl")[0] - 0.38960) < 1e-5
    assert abs(RESULTS["jsd_limit/alpha=1e-06"]["loss"] - 3.896e-7) < 1e-10
    for end in (0.0, 1.0):
        with pytest.raises(ValueError, match="mixture"):
            both(student, teacher, mask, divergence="jsd", mixture=end)


DTYPES = ("float32", "bfloat16")
# How far in each its value and the largest entry of its gradient are off those of float64. The inputs were not kept
# (nearly equal rows of 4096 entries), so ours cannot be set beside them.
OFF = {
    "full_fkl": ((1.03e-4, 9.34e-6), (1.47, 1.30e-2)),
    "top20tail_fkl": ((1.10e-4, 9.20e-6), (1.78, 0.261)),
    "full_jsd": ((9.54e-5, 1.53e-5), (14.3, 0.131)),
    "top20tail_jsd": ((3.78e-5, 1.00e-5), (6.29, 0.449)),
    "full_rkl": ((9.50e-5, 1.42e-5), (1.08, 2.33e-2)),
    "top20tail_rkl": ((1.05e-4, 7.02e-6), (3.57, 0.347)),
    "sampled": ((5.40e-5, 8.49e-6), (0.168, 0.177)),
}


@pytest.mark.parametrize(("name", "place"), list(itertools.product(OFF, (0, 1))))
def test_nearly_equal_rows_in_low_precision(name: str, place: int) -> None:
    """In float32 four digits are left, in bfloat16 none: the JSD of nearly equal rows comes out negative."""
    exact, low = RESULTS[f"precision/torch.float64/{name}"], RESULTS[f"precision/torch.{DTYPES[place]}/{name}"]
    assert exact["grad_finite"]
    assert low["grad_finite"]
    for key, expected in zip(("loss", "grad_absmax"), OFF[name][place], strict=True):
        assert abs(low[key] / exact[key] - 1.0) == pytest.approx(expected, rel=0.01)
    if name != "sampled":
        assert exact["loss"] > 0.0
        assert (low["loss"] < 0.0) == (place == 1 and name in ("full_jsd", "top20tail_jsd", "full_rkl"))


@pytest.mark.parametrize("noise", [1e-2, 1e-3])
def test_ours_are_never_negative_in_bfloat16(noise: float) -> None:
    rng = np.random.default_rng(0)
    student = torch.tensor(rng.normal(size=(1, 4, 4096))).bfloat16()
    teacher = (student.double() + noise * torch.tensor(rng.normal(size=student.shape))).bfloat16()
    for divergence in sdpo.DIVERGENCES:
        assert sdpo.logit_loss(student, teacher, torch.ones(1, 4), divergence=divergence).item() >= 0.0


def test_sampled_tokens_off_policy() -> None:
    """With a clip of 2 on its importance ratio, whose logarithm it holds within 20 first: 2e-9 where it is 1e-22."""
    student, teacher, mask = changed("base")
    tokens = np.array(golden("edge_cases")["inputs"]["completion_ids"])[..., None]
    log_p = np.take_along_axis(log_softmax(student), tokens, -1)[..., 0]
    log_ratio = log_p - np.array(RESULTS["isclip2/old_log_probs"]["old"])
    assert log_ratio.min() < -40
    ratio = np.minimum(np.exp(np.clip(log_ratio, -20.0, 20.0)), 2.0)
    theirs = RESULTS["isclip2/official_sampled"]
    value, gradient = ours(student, teacher, mask, "official", "sampled", ratio)
    assert theirs["grad_finite"]
    np.testing.assert_allclose(theirs["loss"], value, **EXACT)
    np.testing.assert_allclose(theirs["grad"], gradient, rtol=0, atol=4e-16)
    np.testing.assert_allclose(theirs["grad_absmax"], np.abs(gradient).max(), rtol=1e-12)


def test_trls_gkd_of_a_fully_masked_batch_is_zero() -> None:
    assert RESULTS["gkd_all_masked"]["loss"] == 0.0
