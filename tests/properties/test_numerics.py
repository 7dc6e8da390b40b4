"""The two tables of numerics, row by row, for every divergence and form, on reference and implementation."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from paritygate.harness.strategies import tensor
from paritygate.losses import grpo, policy_gradient, sdpo, spod
from paritygate_reference import sdpo as reference
from paritygate_reference import spod as spod_reference

INF = math.inf
DTYPES = ("float16", "bfloat16", "float32", "float64")
TABLE = {  # entry -> what it contributes: 0, finite or inf, by divergence
    "both": {"forward_kl": "zero", "reverse_kl": "zero", "jsd": "zero"},
    "teacher": {"forward_kl": "finite", "reverse_kl": "inf", "jsd": "finite"},
    "student": {"forward_kl": "inf", "reverse_kl": "finite", "jsd": "finite"},
}
STUDENT, TEACHER = np.array([0.5, -1.0, 2.0, 0.25]), np.array([1.0, 0.5, -0.5, 0.125])


def row(excluded: str) -> tuple[np.ndarray, np.ndarray]:
    """(1, 1, 4) student and teacher, entry 3 at -inf on the named side."""
    student, teacher = STUDENT.copy(), TEACHER.copy()
    if excluded in ("both", "student"):
        student[3] = -INF
    if excluded in ("both", "teacher"):
        teacher[3] = -INF
    return student[None, None], teacher[None, None]


def sides(student: np.ndarray, teacher: np.ndarray, dtype: str, **options: Any) -> list[tuple[float, np.ndarray]]:
    """Value and gradient of the reference and of the implementation, validated and not."""
    ones = np.ones(student.shape[:2])
    results = [
        (
            reference.logit_loss(student, teacher, ones, **options),
            reference.logit_loss_grad(student, teacher, ones, **options),
        )
    ]
    for validate in (True, False):
        logits = tensor(student, dtype, "cpu").requires_grad_()
        loss = sdpo.logit_loss(logits, tensor(teacher, dtype, "cpu"), torch.tensor(ones), validate=validate, **options)
        results.append((loss.item(), torch.autograd.grad(loss, logits)[0].double().numpy()))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("excluded", "divergence"), list(itertools.product(TABLE, reference.DIVERGENCES)))
def test_an_excluded_entry(excluded: str, divergence: str, dtype: str) -> None:
    student, teacher = row(excluded)
    for loss, gradient in sides(student, teacher, dtype, divergence=divergence):
        if TABLE[excluded][divergence] == "inf":
            assert loss == INF
            continue
        assert math.isfinite(loss)
        assert np.isfinite(gradient).all()
        if excluded in ("both", "student"):
            assert gradient[0, 0, 3] == 0.0
    if excluded == "both":
        whole = sides(student, teacher, dtype, divergence=divergence)
        cut = sides(student[..., :3], teacher[..., :3], dtype, divergence=divergence)
        for (loss, gradient), (alone, slopes) in zip(whole, cut, strict=True):
            assert math.isclose(loss, alone, rel_tol=1e-6)
            np.testing.assert_allclose(gradient[..., :3], slopes, rtol=2e-3 if dtype in DTYPES[:2] else 1e-6)


@pytest.mark.parametrize("divergence", reference.DIVERGENCES)
@pytest.mark.parametrize(("top_k", "tail"), [(2, True), (2, False), (3, True), (4, True)])
@pytest.mark.parametrize("excluded", ["both", "student"])
def test_an_excluded_entry_under_a_truncation(excluded: str, divergence: str, top_k: int, tail: bool) -> None:
    """The student's -inf is never among its top 3 of 4; as its fourth it is an entry like any other."""
    student, teacher = row(excluded)
    (loss, gradient), *others = sides(student, teacher, "float64", divergence=divergence, top_k=top_k, tail=tail)
    assert (loss == INF) == (excluded == "student" and divergence == "forward_kl" and top_k == 4)
    for other, slopes in others:
        assert other == pytest.approx(loss, rel=1e-12, abs=0.0)
        if loss < INF:
            assert np.isfinite(gradient).all()
            np.testing.assert_allclose(slopes, gradient, rtol=0, atol=1e-15)


@pytest.mark.parametrize("divergence", reference.DIVERGENCES)
def test_float16_at_its_ends(divergence: str) -> None:
    """±65504: the loss as float64 to 1e-6, the gradient within the rounding of its output."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        student, teacher = rng.choice([65504.0, -65504.0, 0.0, 65472.0], size=(2, 1, 2, 9))
        (loss, gradient), *others = sides(student, teacher, "float16", divergence=divergence)
        for other, slopes in others:
            assert other == pytest.approx(loss, rel=1e-6, abs=0.0)
            np.testing.assert_allclose(slopes, gradient, rtol=0, atol=4.9e-4 * np.abs(gradient).max() + 3e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float16_ends_in_spod(dtype: str) -> None:
    """Actions at both ends of float16: log-probabilities of -131008 keep their digits."""
    rng = np.random.default_rng(1)
    index = np.array([0, 0, 1])
    for _ in range(20):
        student, teacher = rng.choice([65504.0, -65504.0, 0.0], size=(2, 3, 7))
        if dtype == "bfloat16":
            student, teacher = (np.where(np.abs(x) > 1, np.sign(x) * 65536.0, x) for x in (student, teacher))
        actions, success = rng.integers(0, 7, size=3), np.array([True, False])
        rows = [slice(0, 2), slice(2, 3)]
        episodes = [
            {
                "success": ok,
                "actions": [{"student_logits": student[r], "teacher_logits": teacher[r], "tokens": actions[r]}],
            }
            for ok, r in zip(success, rows, strict=True)
        ]
        expected = spod_reference.success_preserving_loss(episodes)
        result, gradient = spod.success_preserving_loss_and_grad(
            tensor(student, dtype, "cpu"),
            tensor(teacher, dtype, "cpu"),
            torch.tensor(actions),
            torch.tensor(index),
            torch.tensor([0, 1]),
            torch.tensor(success),
        )
        assert result.loss.item() == pytest.approx(expected.loss, rel=1e-6, abs=0.0)
        assert result.gate.tolist() == [gate for episode in expected.gate for gate in episode]
        slopes = np.concatenate([r for episode in spod_reference.success_preserving_grad(episodes) for r in episode])
        scale = {"float16": 4.9e-4, "bfloat16": 2**-8, "float32": 3e-7, "float64": 1e-12}[dtype]
        np.testing.assert_allclose(gradient.double().numpy(), slopes, rtol=0, atol=scale * np.abs(slopes).max() + 3e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("excluded", TABLE)
def test_spod_is_the_forward_column(excluded: str, dtype: str) -> None:
    student, teacher = row(excluded)
    zero = torch.zeros(1, dtype=torch.int64)
    arguments = (tensor(teacher[0], dtype, "cpu"), zero, zero, zero, torch.tensor([False]))
    for validate in (True, False):
        logits = tensor(student[0], dtype, "cpu").requires_grad_()
        result = spod.success_preserving_loss(logits, *arguments, validate=validate)
        (gradient,) = torch.autograd.grad(result.loss, logits)
        if TABLE[excluded]["forward_kl"] == "inf":
            assert result.loss.item() == INF
            continue
        assert math.isfinite(result.loss.item())
        assert torch.isfinite(gradient).all()
        expected = reference.logit_loss(student, teacher, np.ones((1, 1)), divergence="forward_kl")
        assert result.loss.item() == pytest.approx(expected, rel=1e-6, abs=0.0)
        if excluded == "both":
            assert gradient[0, 3] == 0.0


def test_a_protected_action_does_not_read_an_infinite_kl() -> None:
    """KL +inf where the floor acts: the loss is the floor's, finite, and so is the gradient."""
    student = torch.tensor([[0.0, 1.0, -INF]], requires_grad=True)
    zero = torch.zeros(1, dtype=torch.int64)
    teacher = torch.tensor([[-3.0, 1.0, 0.0]])
    result = spod.success_preserving_loss(student, teacher, zero, zero, zero, torch.tensor([True]))
    assert result.gate.tolist() == [True]
    assert result.kl.tolist() == [0.0]
    assert result.loss.item() == pytest.approx(math.log(0.5) + math.log(1 + math.e), rel=1e-6, abs=0.0)
    assert torch.isfinite(torch.autograd.grad(result.loss, student)[0]).all()


def test_the_floor_at_equality_has_no_gradient() -> None:
    """p = 1/2 exactly against tau0 = 0.5: loss 0 and gradient exactly 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        student = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
        teacher = torch.tensor([[-1.0, 1.0]], dtype=dtype)
        result = spod.success_preserving_loss(student, teacher, zero, zero, zero, torch.tensor([True]))
        assert result.gate.tolist() == [True]
        assert result.loss.item() == 0.0
        assert torch.equal(torch.autograd.grad(result.loss, student)[0], torch.zeros(1, 2, dtype=dtype))


@pytest.mark.parametrize("noise", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("divergence", reference.DIVERGENCES)
def test_nearly_equal_rows_keep_their_digits(divergence: str, noise: float) -> None:
    """V = 4096: relative error under 1e-6, where subtracting logarithms in float32 loses half its digits.

    A kernel's KL is a difference of float64 numbers of some nats, of which 1e-14 is some ulps; float64's blocks sum
    terms that are not negative, and keep nine digits of 1e-13.
    """
    rng = np.random.default_rng(3)
    student = rng.normal(size=(1, 2, 4096)).astype(np.float32).astype(np.float64)
    teacher = (student + noise * rng.normal(size=student.shape)).astype(np.float32).astype(np.float64)
    for dtype, allowed in (("float32", {"rel": 1e-6, "abs": 1e-14}), ("float64", {"rel": 1e-9, "abs": 0.0})):
        (loss, _), *others = sides(student, teacher, dtype, divergence=divergence)
        assert loss > 0.0
        for other, _ in others:
            assert other == pytest.approx(loss, **allowed)


def test_rewards_of_1e8_are_told_apart_in_float32() -> None:
    """Given as Python numbers or float64 they are centred in float64; in float32 all three are one number."""
    assert grpo.group_mean_advantage([1e8, 1e8 + 1, 1e8 - 1]).tolist() == [0.0, 1.0, -1.0]


def test_a_position_of_advantage_zero_is_not_read() -> None:
    new = torch.tensor([float("nan"), -1.0, INF], requires_grad=True)
    loss = policy_gradient.importance_sampling_loss(new, torch.tensor([-INF, -1.0, 2.0]), torch.tensor([0.0, 2.0, 0.0]))
    assert loss.item() == -2.0
    assert torch.autograd.grad(loss, new)[0].tolist() == [0.0, -2.0, 0.0]


def test_validate_false_lets_nan_through_and_does_not_raise() -> None:
    bad = torch.full((1, 1, 3), float("nan"))
    assert torch.isnan(sdpo.logit_loss(bad, bad, torch.ones(1, 1), validate=False))
    zero = torch.zeros(1, dtype=torch.int64)
    result = spod.success_preserving_loss(bad[0], bad[0], zero, zero, zero, torch.tensor([False]), validate=False)
    assert torch.isnan(result.loss)
