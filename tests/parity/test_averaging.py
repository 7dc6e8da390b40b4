"""Three-level averaging: value and gradient against the reference, the reference against 60 digits."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from paritygate.harness import compare
from paritygate.harness.strategies import DTYPES, SEEDS, rounded, sampled, tensor
from paritygate_reference import averaging as reference
from tests import oracle

LENGTHS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=5)


@st.composite
def batches(draw: st.DrawFn, dtype: str) -> list[list[list[float]]]:
    """Ragged values of `dtype`."""
    rng = np.random.default_rng(draw(SEEDS))
    lengths = draw(LENGTHS)
    scale = draw(sampled(1.0, 1e-3, 300.0))
    return [[rounded(rng.exponential(size=n) * scale, dtype).tolist() for n in actions] for actions in lengths]


def packed(values: list[list[list[float]]], dtype: str, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values (N,), action_index (N,), episode_index (A,))."""
    flat = [value for episode in values for action in episode for value in action]
    actions = [action for episode in values for action in episode]
    action_index = [a for a, action in enumerate(actions) for _ in action]
    episode_index = [e for e, episode in enumerate(values) for _ in episode]
    return (
        tensor(flat, dtype, device),
        torch.tensor(action_index, device=device),
        torch.tensor(episode_index, device=device),
    )


@pytest.mark.obligation("averaging/value", "averaging/gradient")
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradient(losses: Any, device: str, dtype: str) -> None:
    @settings(max_examples=25)
    @given(batches(dtype))
    def value_and_gradient_are_the_three_level_mean_s(values: list[list[list[float]]]) -> None:
        flat, action_index, episode_index = packed(values, dtype, device)
        flat.requires_grad_()
        mean = losses.averaging.three_level_mean(flat, action_index, episode_index)
        compare("averaging/value", mean, reference.three_level_mean(values), dtype=dtype)
        (gradient,) = torch.autograd.grad(mean, flat)
        weights = [1 / (len(action) * len(ep) * len(values)) for ep in values for action in ep for _ in action]
        compare("averaging/gradient", gradient, weights, dtype=dtype)

    value_and_gradient_are_the_three_level_mean_s()


@pytest.mark.obligation("averaging/oracle")
def test_reference_against_sixty_digits() -> None:
    @settings(max_examples=60)
    @given(batches("float64"))
    def the_reference_has_sixty_digits_value(values: list[list[list[float]]]) -> None:
        exact = mp.fsum(
            mp.fsum(mp.fsum(oracle.numbers(action)) / len(action) for action in episode) / mpf(len(episode))
            for episode in values
        ) / len(values)
        compare("averaging/oracle", reference.three_level_mean(values), float(exact), dtype="float64", oracle="mpmath")

    the_reference_has_sixty_digits_value()
