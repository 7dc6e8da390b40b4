"""GSPO against its definition: ragged masks, ratios on both sides of the clip, both signs of the advantage."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from my_reference import gspo as reference

from paritygate.harness import compare
from paritygate.harness.strategies import MASKS, masks, rounded, seeded, tensor


@st.composite
def batches(draw, dtype):
    """Log-probabilities (B, T) of now and then, advantages (B,), a mask; every third batch moves past the clip."""
    rng = seeded(draw, dtype, "ordinary")
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    old = rounded(-rng.exponential(2.0, size=shape), dtype)
    new = rounded(old + rng.normal(size=shape) * rng.choice([1e-4, 1e-2, 0.5]), dtype)
    advantages = rounded(rng.normal(size=shape[0]), dtype)
    return new, old, advantages, masks(rng, draw(st.sampled_from(MASKS)), shape)


@pytest.mark.obligation("gspo/value", "gspo/gradient")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_value_and_gradient(losses, device, dtype):
    @settings(max_examples=100)
    @given(batches(dtype))
    def value_and_gradient_are_the_reference_s(batch):
        new, old, advantages, mask = batch
        hidden = mask == 0  # what is masked is not read
        leaf = tensor(np.where(hidden, np.nan, new), dtype, device).requires_grad_()
        rest = tensor(np.where(hidden, np.inf, old), dtype, device), tensor(advantages, dtype, device)
        value = losses.gspo.loss(leaf, *rest, torch.tensor(mask, device=device), low=0.02, high=0.03)
        compare("gspo/value", value, reference.loss(*batch, low=0.02, high=0.03), dtype=dtype)
        (gradient,) = torch.autograd.grad(value, leaf)
        compare("gspo/gradient", gradient, reference.grad(*batch, low=0.02, high=0.03), dtype=dtype)

    value_and_gradient_are_the_reference_s()


@pytest.mark.obligation("gspo/advantages")
def test_the_advantages_of_an_arm(losses):
    @settings(max_examples=50)
    @given(batches("float64"))
    def advantages_are_minus_the_gradient(batch):
        sampled, _, composites, mask = batch
        rows = zip(composites, mask, np.where(mask == 0, np.nan, sampled), strict=True)
        group = [SimpleNamespace(composite=c, mask=m.tolist(), logprobs=p.tolist()) for c, m, p in rows]
        defined = reference.advantages(sampled, composites, mask)
        compare("gspo/advantages", np.array(losses.gspo.advantages(group)), defined, dtype="float64")

    advantages_are_minus_the_gradient()
