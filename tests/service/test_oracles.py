"""The proof's own oracles: values worked out by hand, gradients by central differences, and what each must not do."""

import math

import numpy as np
import pytest

from paritygate.service.oracles import CISPO_DEFAULTS, LOSSES, Oracle, cispo, cross_entropy, dro, gspo, ppo

LN2 = math.log(2)
CONFIGS = {"cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.6}, "dro": {"beta": 0.3}}
CONFIGS["gspo"] = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}


def frozen_ratio(name: str, inputs: dict[str, np.ndarray], at: np.ndarray, config: dict[str, float]) -> "object":
    """The loss as a function whose finite differences are its documented gradient: stopped ratios stay at `at`."""
    if name == "cispo":
        r = np.clip(np.exp(at - inputs["logprobs"]), config["clip_low_threshold"], config["clip_high_threshold"])
        return lambda p: float(-(r * p * inputs["advantages"]).sum())
    if name == "gspo":
        mean = (at - inputs["logprobs"])[inputs["sequence_ratio_mask"] != 0].mean()

        def loss(p: np.ndarray) -> float:
            s = np.exp(mean + p - at)
            bounded = np.clip(s, config["clip_low_threshold"], config["clip_high_threshold"])
            return float(-np.minimum(s * inputs["advantages"], bounded * inputs["advantages"]).sum())

        return loss
    return lambda p: LOSSES[name](p, inputs, config).value


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_weights_are_minus_the_derivative_of_the_value(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = -rng.exponential(2, 9)
    inputs = {
        "weights": rng.normal(size=9),
        "logprobs": p - rng.normal(size=9) * 0.6,
        "advantages": rng.normal(size=9),
        "sequence_ratio_mask": (np.arange(9) % 3 != 0).astype(float),
    }
    config = CONFIGS.get(name, {})
    loss = frozen_ratio(name, inputs, p, config)
    oracle = LOSSES[name](p, inputs, config)
    assert oracle.value == pytest.approx(loss(p), rel=1e-12, abs=0.0)
    for i in range(9):
        h = np.zeros(9)
        h[i] = 1e-6
        slope = (loss(p + h) - loss(p - h)) / 2e-6
        assert -slope == pytest.approx(oracle.weights[i], rel=1e-6, abs=1e-7)


def test_ppo_by_hand_on_all_four_sides_of_the_clip() -> None:
    ratios, advantages = [0.5, 0.5, 1.0, 2.0, 2.0], [1.0, -1.0, 3.0, 1.0, -1.0]
    p = np.full(5, -1.0)
    value, weights = ppo(p, p - np.log(ratios), advantages)
    assert value == pytest.approx(-(0.5 - 0.8 + 3.0 + 1.2 - 2.0), rel=1e-14, abs=0.0)
    assert weights == pytest.approx([0.5, 0.0, 3.0, 0.0, -2.0], rel=1e-14, abs=0.0)


def test_cispo_keeps_a_gradient_where_it_clips() -> None:
    value, weights = cispo([-1.0, -2.0], [-1.0 - LN2, -2.0 + 2 * LN2], [1.0, 1.0], 0.8, 1.2)
    assert weights == pytest.approx([1.2, 0.8], rel=1e-14, abs=0.0)
    assert value == pytest.approx(1.2 * 1 + 0.8 * 2, rel=1e-14, abs=0.0)


def test_dro_pulls_towards_the_sampler() -> None:
    assert dro([-1.0], [-3.0], [0.5], beta=0.1) == Oracle(pytest.approx(0.5 + 0.05 * 4), pytest.approx([0.5 - 0.2]))


def test_gspo_has_one_ratio_a_sequence_and_none_without_a_mask() -> None:
    p, q = np.array([-1.0, -1.0, -1.0]), np.array([-1.0 - LN2, -1.0 - 3 * LN2, 5.0])
    value, weights = gspo(p, q, [1.0, -1.0, 2.0], [1, 1, 0], 0.5, 8.0)
    assert weights == pytest.approx([4.0, -4.0, 8.0], rel=1e-14, abs=0.0)
    assert value == pytest.approx(-8.0, rel=1e-14, abs=0.0)
    assert gspo(p, q, [1.0, 1.0, 1.0], [0, 0, 0], 0.5, 8.0) == Oracle(0.0, pytest.approx([0.0, 0.0, 0.0]))


def test_cross_entropy_takes_signed_weights_and_several_targets() -> None:
    p = np.array([[-1.0, -2.0], [-3.0, -4.0]])
    value, weights = cross_entropy(p, [[1.0, -0.5], [0.0, 0.25]])
    assert value == pytest.approx(1.0 - 1.0 + 1.0)
    assert weights.shape == (2, 2)


def test_options_without_a_default_must_be_given() -> None:
    rows = {"logprobs": [-1.0], "advantages": [1.0], "sequence_ratio_mask": [1.0]}
    for name in ("dro", "gspo"):
        with pytest.raises(ValueError, match="must be given"):
            LOSSES[name]([-1.0], rows, {})
    assert LOSSES["cispo"]([-1.0], {"logprobs": [-3.0], "advantages": [1.0]}, {}).weights == pytest.approx([4.0])
    assert CISPO_DEFAULTS[0] != CISPO_DEFAULTS[1]


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        ppo([-1.0, -2.0], [-1.0], [1.0, 1.0])
