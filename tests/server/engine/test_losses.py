"""Each loss of the API against its documented formula, written out anew in NumPy float64, and its gradient."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from paritygate.server.engine.losses import LOSSES, LossInputs, find_loss
from paritygate.server.errors import RequestError

N = 9
RNG = np.random.default_rng(0)
LOGPROBS, OLD = -RNG.exponential(1.5, N), -RNG.exponential(1.5, N)
ADVANTAGES = RNG.normal(size=N)
WEIGHTS = RNG.random(N)
MASK = (np.arange(N) % 3 != 0).astype(float)


def value(name: str, logprobs: np.ndarray, frozen: np.ndarray, config: dict[str, float]) -> float:
    """The documented loss at `logprobs`, with what it does not differentiate taken at `frozen`."""
    defaults = (0.0, 4.0) if name == "cispo" else (0.8, 1.2)  # as documented: tutorials/202 of the cookbook at 9dfcc3a2
    low, high = config.get("clip_low_threshold", defaults[0]), config.get("clip_high_threshold", defaults[1])
    total = 0.0
    s = math.exp(float((frozen - OLD)[MASK != 0].mean()))
    for t in range(N):
        ratio, advantage = math.exp(logprobs[t] - OLD[t]), ADVANTAGES[t]
        if name == "cross_entropy":
            total -= WEIGHTS[t] * logprobs[t]
        elif name == "importance_sampling":
            total -= ratio * advantage
        elif name == "ppo":
            total -= min(ratio * advantage, min(max(ratio, low), high) * advantage)
        elif name == "cispo":
            total -= min(max(math.exp(frozen[t] - OLD[t]), low), high) * logprobs[t] * advantage
        elif name == "dro":
            total -= logprobs[t] * advantage - config["beta"] / 2 * (logprobs[t] - OLD[t]) ** 2
        elif name == "gspo":
            token = s * math.exp(logprobs[t] - frozen[t])
            total -= min(token * advantage, min(max(token, low), high) * advantage)
    return total


CASES: list[tuple[str, dict[str, float]]] = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ("cispo", {}),
    ("cispo", {"clip_high_threshold": 1.1}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}),
    ("dro", {"beta": 0.05}),
    ("dro", {"beta": 0.0}),
    ("gspo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("gspo", {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}),
]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_value_and_gradient(name: str, config: dict[str, float]) -> None:
    leaf = torch.tensor(LOGPROBS, requires_grad=True)
    tensors = {
        "weights": torch.tensor(WEIGHTS),
        "logprobs": torch.tensor(OLD),
        "advantages": torch.tensor(ADVANTAGES),
        "sequence_ratio_mask": torch.tensor(MASK),
    }
    loss, needed = find_loss(name, config)
    assert set(needed) <= set(tensors)
    out = loss(leaf, LossInputs(torch.arange(N), tensors), config)
    assert float(out.detach()) == pytest.approx(value(name, LOGPROBS, LOGPROBS, config), rel=1e-12, abs=0.0)
    out.backward()
    for t in range(N):
        step = np.zeros(N)
        step[t] = 1e-6
        up, down = (value(name, LOGPROBS + sign * step, LOGPROBS, config) for sign in (1, -1))
        assert leaf.grad is not None
        assert float(leaf.grad[t]) == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("unused", [-1e10, 1e10, 0.0, 88.0, -3.0e38])
@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_a_sampling_logprob_at_advantage_0_is_never_read(name: str, unused: float) -> None:
    """Prompt tokens have no sampling logprob: whatever a client puts there, the loss is -1 and its gradient -1, 0."""
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    tensors = {"logprobs": torch.tensor([-1.0, unused]), "advantages": torch.tensor([1.0, 0.0])}
    loss = LOSSES[name][0](leaf, LossInputs(torch.arange(2), tensors), {})
    loss.backward()
    assert float(loss.detach()) == (1.0 if name == "cispo" else -1.0)  # cispo: -sg(1) * (-1) * 1
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [-1.0, 0.0]


def test_every_loss_is_tested() -> None:
    assert {name for name, _ in CASES} == set(LOSSES)


def test_gspo_without_a_sampled_token_is_zero_and_still_a_gradient() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    zeros = torch.zeros(3)
    inputs = LossInputs(torch.arange(3), {"logprobs": zeros, "advantages": zeros + 1, "sequence_ratio_mask": zeros})
    loss = LOSSES["gspo"][0](leaf, inputs, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    loss.backward()
    assert float(loss.detach()) == 0
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, zeros)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_position_of_advantage_zero_is_not_read(name: str) -> None:
    """What stands there may be anything: no logprob, -1e10, NaN. (dro has its penalty there and reads it.)"""
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0} if name == "gspo" else {}
    values = []
    for there in (-1.5, -1e10, float("nan"), float("-inf")):
        leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
        old = torch.tensor([-1.2, there])
        tensors = {
            "logprobs": old,
            "advantages": torch.tensor([1.0, 0.0]),
            "sequence_ratio_mask": torch.tensor([1.0, 0]),
        }
        loss = LOSSES[name][0](leaf, LossInputs(torch.arange(2), tensors), config)
        loss.backward()
        assert leaf.grad is not None
        assert leaf.grad[1] == 0.0
        values.append((float(loss.detach()), float(leaf.grad[0])))
    assert len(set(values)) == 1
    assert math.isfinite(values[0][0])


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("ppo", {"clip_low_threshold": 1.5}, "no interval"),
        ("ppo", {"clip_low_threshold": float("nan")}, "finite"),
        ("cispo", {"clip_low_threshold": 0.1, "clip_high_threshold": "high"}, "number"),
        ("gspo", {}, r"for ppo \(0.8 and 1.2\) and cispo \(0 and 4\) only"),
        ("gspo", {"clip_low_threshold": 0.5}, "gspo: pass loss_fn_config"),
        ("dro", {"beta": -0.1}, "negative"),
        ("dro", {}, "default for beta"),
        ("dro", {"beta": "x"}, "number"),
        ("importance_sampling", {"beta": 1.0}, "unknown loss_fn_config"),
        ("custom", {"loss_id": "x"}, "custom_loss_server_side"),
        ("stable_reinforce", {}, "publishes no formula.*use loss_fn='cispo'"),
        ("nll", {}, "unknown loss"),
    ],
)
def test_what_is_not_documented_is_refused(name: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        find_loss(name, config)
