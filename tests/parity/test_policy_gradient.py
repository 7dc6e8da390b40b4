"""The importance-sampling loss and its gradient against the reference; the reference against 60 digits."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp

from paritygate.harness import compare
from paritygate.harness.strategies import DTYPES, rounded, tensor
from paritygate_reference import policy_gradient as reference
from tests import oracle


@st.composite
def batches(draw: st.DrawFn, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logprobs, sampler_logprobs, advantages, (B, T); on and off policy, prompt positions at advantage 0."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 9)))
    old = rounded(-rng.exponential(2.0, size=shape), dtype)
    new = rounded(old + rng.normal(size=shape) * draw(st.sampled_from([0.0, 1e-3, 1.0])), dtype)
    advantages = rounded(np.abs(rng.normal(size=shape)) * rng.choice([1.0, -1.0]), dtype)  # one sign: no cancellation
    advantages[rng.random(shape) < 0.3] = np.sign(advantages.flat[0])  # exactly one, as a lone success has
    advantages[rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0.0
    return new, old, advantages


@pytest.mark.obligation("policy_gradient/value", "policy_gradient/gradient")
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradient(losses: Any, device: str, dtype: str) -> None:
    @settings(max_examples=50)
    @given(batches(dtype))
    def value_and_gradient_are_the_reference_s(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        new, old, advantages = batch
        hidden = advantages == 0.0  # what is not an action is not read
        logprobs = tensor(np.where(hidden, np.nan, new), dtype, device).requires_grad_()
        sampler, weight = tensor(np.where(hidden, -np.inf, old), dtype, device), tensor(advantages, dtype, device)
        loss = losses.policy_gradient.importance_sampling_loss(logprobs, sampler, weight)
        rows = list(zip(new, old, advantages, strict=True))
        expected = sum(reference.importance_sampling_loss(*row) for row in rows)
        compare("policy_gradient/value", loss, expected, dtype=dtype)
        slopes = [reference.importance_sampling_grad(*row) for row in rows]
        compare("policy_gradient/gradient", torch.autograd.grad(loss, logprobs)[0], slopes, dtype=dtype)

    value_and_gradient_are_the_reference_s()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("policy_gradient/closed_form")
def test_closed_form_gradient(losses: Any, device: str, dtype: str) -> None:
    @settings(max_examples=30)
    @given(batches(dtype))
    def the_closed_form_is_the_gradient(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        hidden = batch[2] == 0.0
        inputs = np.where(hidden, np.nan, batch[0]), np.where(hidden, np.inf, batch[1]), batch[2]
        closed = losses.policy_gradient.importance_sampling_grad(*(tensor(part, dtype, device) for part in inputs))
        slopes = [reference.importance_sampling_grad(*row) for row in zip(*batch, strict=True)]
        compare("policy_gradient/closed_form", closed, slopes, dtype=dtype)

    the_closed_form_is_the_gradient()


@pytest.mark.obligation("policy_gradient/oracle")
def test_reference_against_sixty_digits() -> None:
    @settings(max_examples=60)
    @given(batches("float64"))
    def the_reference_has_sixty_digits_value_and_gradient(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        for new, old, advantages in zip(*batch, strict=True):
            columns = zip(*(oracle.numbers(row) for row in (new, old, advantages)), strict=True)
            terms = [-mp.exp(x - y) * a for x, y, a in columns]
            actual = reference.importance_sampling_loss(new, old, advantages)
            compare("policy_gradient/oracle", actual, float(mp.fsum(terms)), dtype="float64", oracle="mpmath")
            slopes = reference.importance_sampling_grad(new, old, advantages)
            compare("policy_gradient/oracle", slopes, oracle.as_floats(terms), dtype="float64", oracle="mpmath")

    the_reference_has_sixty_digits_value_and_gradient()
