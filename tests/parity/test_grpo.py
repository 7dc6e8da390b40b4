"""Group-mean advantage against the reference, groups of every kind; the reference against 60 digits."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp

from paritygate.harness import compare
from paritygate.harness.strategies import SEEDS, rounded, sampled
from paritygate_reference import grpo as reference
from tests import oracle


@st.composite
def groups(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    """A regime and rewards (B, G): 0/1, graded, all equal, and 1e8 plus or minus 1, which float32 cannot tell apart."""
    rng = np.random.default_rng(draw(SEEDS))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 9)))
    kind = draw(sampled("binary", "graded", "equal", "large"))
    rewards = {
        "binary": rng.integers(0, 2, shape).astype(float),
        "graded": rng.normal(size=shape) * 3,
        "equal": np.full(shape, rng.choice([0.1, 1 / 3, 1.0, -7.7])),
        "large": 1e8 + rng.integers(-1, 2, shape),
    }[kind]
    return ("large" if kind == "large" else "ordinary"), rewards


@pytest.mark.obligation("grpo/value")
def test_value(losses: Any, device: str) -> None:
    @settings(max_examples=150)
    @given(groups(), st.sampled_from(["float32", "float64"]))
    def the_mean_of_the_group_is_taken_off(group: tuple[str, np.ndarray], dtype: str) -> None:
        regime, rewards = group
        rewards = rewards if regime == "large" else rounded(rewards, dtype)
        inputs = "float64" if regime == "large" else dtype
        actual = losses.grpo.group_mean_advantage(torch.tensor(rewards, dtype=getattr(torch, inputs), device=device))
        expected = [reference.group_mean_advantage(row) for row in rewards]
        compare("grpo/value", actual, expected, dtype="float64", regime=regime)

    the_mean_of_the_group_is_taken_off()


@pytest.mark.obligation("grpo/equal_rewards")
def test_equal_rewards_are_exact_zeros(losses: Any, device: str) -> None:
    for reward in (0.1, 1 / 3, -7.7, 1e8 + 0.1, 0.0):
        for size in (1, 2, 3, 7, 16):
            zeros = [0.0] * size
            rewards = torch.full((size,), reward, dtype=torch.float64, device=device)
            compare("grpo/equal_rewards", losses.grpo.group_mean_advantage(rewards), zeros, dtype="float64")
            compare("grpo/equal_rewards", reference.group_mean_advantage([reward] * size), zeros, dtype="float64")


@pytest.mark.obligation("grpo/oracle")
def test_reference_against_sixty_digits() -> None:
    @settings(max_examples=60)
    @given(groups())
    def the_reference_has_sixty_digits_value(group: tuple[str, np.ndarray]) -> None:
        for row in group[1]:
            exact = oracle.numbers(row)
            mean = mp.fsum(exact) / len(exact)
            expected = [float(reward - mean) for reward in exact]
            actual = reference.group_mean_advantage(row)
            compare("grpo/oracle", actual, expected, dtype="float64", oracle="mpmath")

    the_reference_has_sixty_digits_value()


@pytest.mark.obligation("grpo/constant")
def test_advantages_are_constants(losses: Any, device: str) -> None:
    for rewards in ([0.0, 1.0], [1.0, 1.0, 1.0], [0.5], [2.0, 3.0, 7.0]):
        leaf = torch.tensor(rewards, dtype=torch.float64, device=device, requires_grad=True)
        advantages = losses.grpo.group_mean_advantage(leaf)
        reached = torch.zeros_like(leaf)
        if advantages.requires_grad:
            reached = torch.autograd.grad((advantages * torch.arange(1.0, len(rewards) + 1)).sum(), leaf)[0]
        compare("grpo/constant", reached, [0.0] * len(rewards), dtype="float64")
        compare("grpo/constant", float(advantages.requires_grad), 0.0, dtype="float64", where="attached")
