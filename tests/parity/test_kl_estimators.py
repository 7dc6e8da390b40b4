"""k1, k2, k3 and the surrogate against the reference; their expectations and expected gradients by enumeration."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from paritygate.harness import compare
from paritygate.harness.strategies import DTYPES, rounded, sampled, seeded, tensor
from paritygate_reference import kl_estimators as reference
from paritygate_reference import sdpo
from tests import oracle

NAMES = ("k1", "k2", "k3", "surrogate")


@st.composite
def batches(draw: st.DrawFn, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logprobs, reference_logprobs, mask, (B, T): from nearly equal to far apart."""
    rng = seeded(draw, dtype, "ordinary")
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 7)))
    logprobs = rounded(-rng.exponential(2.0, size=shape), dtype)
    diff = rng.normal(size=shape) * draw(sampled(0.0, 1e-5, 1e-2, 0.5, 4.0))
    mask = (rng.random(shape) < draw(sampled(0.5, 1.0))).astype(np.int64)
    return logprobs, rounded(logprobs + diff, dtype), mask


def rows(name: str, batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> list[np.ndarray]:
    """The reference, sequence by sequence."""
    return [getattr(reference, name)(*row) for row in zip(*batch, strict=True)]


@pytest.mark.obligation("kl_estimators/value", "kl_estimators/gradient")
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradient(losses: Any, device: str, dtype: str) -> None:
    @settings(max_examples=30)
    @given(batches(dtype))
    def value_and_gradient_are_the_reference_s(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        logprobs, others, mask = batch
        hidden = mask == 0
        other = tensor(np.where(hidden, -np.inf, others), dtype, device)
        for name in NAMES:
            leaf = tensor(np.where(hidden, np.nan, logprobs), dtype, device).requires_grad_()
            values = getattr(losses.kl_estimators, name)(leaf, other, torch.tensor(mask, device=device))
            compare("kl_estimators/value", values, rows(name, batch), dtype=dtype, where=name)
            (gradient,) = torch.autograd.grad(2.0 * values.sum(), leaf)
            compare("kl_estimators/gradient", gradient / 2.0, rows(f"{name}_grad", batch), dtype=dtype, where=name)

    value_and_gradient_are_the_reference_s()


@pytest.mark.obligation("kl_estimators/near_equal")
def test_k3_of_nearly_equal_policies_keeps_its_digits(losses: Any, device: str) -> None:
    for d, sign in itertools.product((1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7), (1.0, -1.0)):
        p, q = np.array([-1.0]), np.array([-1.0 + sign * d])
        log_r = mpf(float(q[0])) - mpf(-1)
        exact = float(mp.exp(log_r) - 1 - log_r)
        labels = {"dtype": "float64", "regime": "near_equal", "oracle": "mpmath", "where": f"{sign * d:g}"}
        actual = losses.kl_estimators.k3(tensor(p, "float64", device), tensor(q, "float64", device))
        compare("kl_estimators/near_equal", actual, [exact], **labels)
        compare("kl_estimators/near_equal", reference.k3(p, q, np.ones(1)), [exact], **labels)


@pytest.mark.obligation("kl_estimators/mean")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_metric_is_the_mean_over_tokens_that_are_read(losses: Any, device: str, dtype: str) -> None:
    @settings(max_examples=20)
    @given(batches(dtype))
    def the_metric_is_the_reference_s(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        logprobs, others, mask = batch
        mask[0, 0] = 1
        rows = tensor(np.where(mask == 0, np.nan, logprobs), dtype, device), tensor(others, dtype, device)
        for estimator in reference.ESTIMATORS:
            actual = losses.kl_estimators.mean_kl(*rows, torch.tensor(mask, device=device), estimator)
            expected = reference.mean_kl(logprobs.ravel(), others.ravel(), mask.ravel(), estimator)
            compare("kl_estimators/mean", actual, expected, dtype=dtype, where=estimator)

    the_metric_is_the_reference_s()


@pytest.mark.obligation("kl_estimators/constants")
def test_the_reference_policy_and_the_metric_are_constants(losses: Any, device: str) -> None:
    for dtype, name in itertools.product(DTYPES, (*NAMES, "mean_kl")):
        leaf, other = (tensor(row, dtype, device).requires_grad_() for row in ([-1.0, -2.0], [-1.5, -1.0]))
        values = getattr(losses.kl_estimators, name)(leaf, other, torch.ones(2, device=device))
        reached = torch.autograd.grad(values.sum(), other, allow_unused=True)[0] if values.requires_grad else None
        gradient = torch.zeros_like(other) if reached is None else reached
        compare("kl_estimators/constants", gradient, [0.0, 0.0], dtype=dtype, where=name)
        compare("kl_estimators/constants", values.requires_grad, name != "mean_kl", dtype=dtype, where=name)


def expected(losses: Any, device: str, name: str, student: np.ndarray, other: np.ndarray) -> tuple[Any, Any]:
    """Under p = softmax(student): the expected value, and the expected gradient in the logits, tokens held fixed."""
    logits = torch.tensor(student, device=device).requires_grad_()
    log_p, log_q = logits.log_softmax(-1), torch.tensor(other, device=device).log_softmax(-1)
    values = (log_p.detach().exp() * getattr(losses.kl_estimators, name)(log_p, log_q)).sum()
    return values.detach(), torch.autograd.grad(values, logits)[0]


@pytest.mark.obligation("kl_estimators/expected_value", "kl_estimators/expected_gradient")
def test_expectations_over_every_token(losses: Any, device: str) -> None:
    """k1 and k3 estimate KL(p || q); of the gradients k2's and the surrogate's are its own, k3's is KL(q || p)'s."""
    rng = np.random.default_rng(5)
    one = np.ones((1, 1), dtype=np.int64)
    for _ in range(10):
        student, other = rng.normal(size=4), rng.normal(size=4)
        pair = student[None, None], other[None, None], one
        reverse = sdpo.logit_loss(*pair, divergence="reverse_kl")
        gradients = {kind: sdpo.logit_loss_grad(*pair, divergence=kind)[0, 0] for kind in ("reverse_kl", "forward_kl")}
        labels = {"dtype": "float64", "oracle": "enumeration"}
        for name in ("k1", "k3", "surrogate"):
            value, _ = expected(losses, device, name, student, other)
            compare("kl_estimators/expected_value", value, reverse, where=name, **labels)
        wanted = {"k1": np.zeros(4), "k2": gradients["reverse_kl"], "k3": gradients["forward_kl"]}
        for name, gradient in {**wanted, "surrogate": gradients["reverse_kl"]}.items():
            _, actual = expected(losses, device, name, student, other)
            compare("kl_estimators/expected_gradient", actual, gradient, where=name, **labels)


@pytest.mark.obligation("kl_estimators/k3_is_no_reverse_kl")
def test_the_gradient_of_k3_is_not_that_of_the_reverse_kl(losses: Any, device: str) -> None:
    """p [1, 0, -1], q [0, .5, -.2]: the reverse KL has [.3520, -.2376, -.1144], k3 gives softmax(p) - softmax(q)."""
    student, other = np.array([1.0, 0.0, -1.0]), np.array([0.0, 0.5, -0.2])
    reverse = sdpo.logit_loss_grad(student[None, None], other[None, None], np.ones((1, 1)))[0, 0]
    np.testing.assert_allclose(reverse, [0.3520, -0.2376, -0.1144], atol=5e-5)
    masses = [np.exp(row) / np.exp(row).sum() for row in (student, other)]
    diff = masses[0] - masses[1] - reverse
    assert np.abs(diff).max() > 0.01
    _, actual = expected(losses, device, "k3", student, other)
    compare("kl_estimators/k3_is_no_reverse_kl", actual - tensor(reverse, "float64", device), diff, dtype="float64")


@pytest.mark.obligation("kl_estimators/oracle")
def test_reference_against_sixty_digits() -> None:
    @settings(max_examples=30)
    @given(batches("float64"))
    def the_reference_has_sixty_digits(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        def k(name: str, x: Any, y: Any) -> Any:
            d = y - x
            return {"k1": -d, "k2": d * d / 2, "k3": mp.exp(d) - 1 - d}[name]

        for logprobs, others, mask in zip(*batch, strict=True):
            pairs = list(zip(oracle.numbers(logprobs), oracle.numbers(others), mask.tolist(), strict=True))
            step = mpf(10) ** -25
            for name in reference.ESTIMATORS:
                labels = {"dtype": "float64", "oracle": "mpmath", "where": name}
                exact = [k(name, x, y) * m for x, y, m in pairs]
                actual = getattr(reference, name)(logprobs, others, mask)
                compare("kl_estimators/oracle", actual, oracle.as_floats(exact), **labels)
                slopes = [(k(name, x + step, y) - k(name, x - step, y)) / (2 * step) * m for x, y, m in pairs]
                actual = getattr(reference, f"{name}_grad")(logprobs, others, mask)
                compare("kl_estimators/oracle", actual, oracle.as_floats(slopes), **labels)

    the_reference_has_sixty_digits()
