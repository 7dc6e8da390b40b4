"""Policy-gradient losses and their gradients against the reference; the reference against 60 digits and by hand."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp

from paritygate.harness import compare
from paritygate.harness.strategies import DTYPES, SEEDS, rounded, sampled, tensor
from paritygate.service import oracles
from paritygate_reference import policy_gradient as reference
from tests import oracle


@st.composite
def batches(draw: st.DrawFn, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logprobs, sampler_logprobs, advantages, (B, T); on and off policy, prompt positions at advantage 0."""
    rng = np.random.default_rng(draw(SEEDS))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 9)))
    old = rounded(-rng.exponential(2.0, size=shape), dtype)
    new = rounded(old + rng.normal(size=shape) * draw(sampled(0.0, 1e-3, 1.0)), dtype)
    advantages = rounded(np.abs(rng.normal(size=shape)) * rng.choice([1.0, -1.0]), dtype)  # one sign: no cancellation
    advantages[rng.random(shape) < 0.3] = np.sign(advantages.flat[0])  # exactly one, as a lone success has
    advantages[rng.random(shape) < draw(sampled(0.0, 0.5, 1.0))] = 0.0
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


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.obligation("policy_gradient/value", "policy_gradient/gradient")
def test_far_from_the_sampler(losses: Any, device: str, dtype: str) -> None:
    """A log-ratio of any size is taken as it is: -e^25 / 2 at advantage 1/2, where a clamp at 20 gives -e^20 / 2."""
    for log_ratio in (25.0, 60.0, -25.0, -60.0):
        new = np.array([-1.0 + min(log_ratio, 0.0)])
        logprobs = tensor(new, dtype, device).requires_grad_()
        sampler, weight = tensor(new - log_ratio, dtype, device), tensor(np.array([0.5]), dtype, device)
        loss = losses.policy_gradient.importance_sampling_loss(logprobs, sampler, weight)
        where = f"log-ratio {log_ratio:g}"
        expected = -math.exp(log_ratio) / 2
        compare("policy_gradient/value", loss, expected, dtype=dtype, where=where)
        slope = torch.autograd.grad(loss, logprobs)[0]
        compare("policy_gradient/gradient", slope, [expected], dtype=dtype, where=where)


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


@pytest.mark.obligation("policy_gradient/importance_ratio")
@pytest.mark.parametrize("dtype", DTYPES)
def test_importance_ratio_from_old_logprobs(losses: Any, device: str, dtype: str) -> None:
    @settings(max_examples=30)
    @given(batches(dtype), st.sampled_from([math.inf, 2.0, 0.5]))
    def the_ratio_is_the_reference_s(batch: tuple[np.ndarray, np.ndarray, np.ndarray], cap: float) -> None:
        new, old, advantages = batch
        mask = (advantages != 0.0).astype(np.int64)
        inputs = np.where(mask == 0, np.nan, new), np.where(mask == 0, np.inf, old)
        logprobs, sampler = (tensor(row, dtype, device).requires_grad_() for row in inputs)
        actual = losses.policy_gradient.importance_ratio(logprobs, sampler, torch.tensor(mask, device=device), cap)
        assert not actual.requires_grad
        expected = [reference.importance_ratio(*row, cap=cap) for row in zip(new, old, mask, strict=True)]
        compare("policy_gradient/importance_ratio", actual, expected, dtype=dtype, where=f"cap {cap}")
        exact = [
            [min(math.exp(x - y), cap) * m for x, y, m in zip(*row, strict=True)]
            for row in zip(new, old, mask.tolist(), strict=True)
        ]
        compare("policy_gradient/importance_ratio", expected, exact, dtype="float64", oracle="by hand")

    the_ratio_is_the_reference_s()


# ppo, cispo, dro, gspo

OBLIGATIONS = {  # of value and gradient
    "ppo": ("policy_gradient/ppo_value", "policy_gradient/ppo_gradient"),
    "cispo": ("policy_gradient/cispo_value", "policy_gradient/cispo_gradient"),
    "dro": ("policy_gradient/dro_value", "policy_gradient/dro_gradient"),
    "gspo": ("policy_gradient/gspo_value", "policy_gradient/gspo_gradient"),
}
CLIPPED = tuple(OBLIGATIONS)
CLIP = ("clip_low_threshold", "clip_high_threshold")
DEFAULTS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}
SPREADS = (0.0, 1e-2, 0.3, 1.5)  # of log-ratios
BOUNDS = ((0.8, 1.2), (0.0, 4.0), (0.5, 3.0), (0.9, 0.95), (1.1, 1.5))


@dataclass
class Sequences:
    """logprobs, sampler_logprobs, advantages and gspo's mask (B, T), as float64; the options of the loss."""

    rows: tuple[np.ndarray, np.ndarray, np.ndarray]
    mask: np.ndarray
    options: dict[str, float]

    def arguments(self, name: str) -> list[tuple[np.ndarray, ...]]:
        """For each sequence the arrays that the reference takes."""
        return list(zip(*self.rows, *([self.mask] if name == "gspo" else []), strict=True))


@st.composite
def sequences(draw: st.DrawFn, name: str, dtype: str, bounds: tuple[tuple[float, float], ...] = BOUNDS) -> Sequences:
    """On policy, near it and far off, ratios on all sides of the bounds, advantages of both signs and 0."""
    rng = np.random.default_rng((draw(SEEDS), CLIPPED.index(name), DTYPES.index(dtype)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 9)))
    options = options_of(name, bounds)
    spread, zeros, ones = (draw(sampled(*x)) for x in (SPREADS, (0.0, 0.4, 1.0), (0.0, 0.6, 1.0)))
    return made(rng, shape, dtype, (spread, zeros, ones), options[draw(st.integers(0, len(options) - 1))])


def options_of(name: str, bounds: tuple[tuple[float, float], ...] = BOUNDS) -> list[dict[str, float]]:
    """What a loss is called with: bounds, and none where it has defaults; betas of dro."""
    if name == "dro":
        return [{"beta": beta} for beta in (0.0, 0.05, 1.5)]
    given_ = [dict(zip(CLIP, pair, strict=True)) for pair in bounds]
    return given_ + ([{}] * len(given_) if name in DEFAULTS else [])


def made(
    rng: np.random.Generator,
    shape: tuple[int, int],
    dtype: str,
    parts: tuple[float, float, float],
    options: dict[str, float],
) -> Sequences:
    """Log-ratios of a deviation, a part of the advantages 0, a part of the mask 1: the three `parts`."""
    spread, zeros, ones = parts
    old = rounded(-rng.exponential(2.0, size=shape), dtype)
    new = rounded(old + rng.normal(size=shape) * spread, dtype)
    advantages = rounded(rng.normal(size=shape), dtype)
    advantages[rng.random(shape) < zeros] = 0.0
    return Sequences((new, old, advantages), (rng.random(shape) < ones).astype(float), options)


def expected_of(name: str, case: Sequences) -> tuple[float, list[np.ndarray]]:
    """The reference's value, summed over sequences, and its gradients."""
    options = {
        **dict(zip(CLIP, DEFAULTS.get(name, ()), strict=False)),
        **case.options,
    }  # written out: defaults are held
    loss, grad = getattr(reference, f"{name}_loss"), getattr(reference, f"{name}_grad")
    rows = case.arguments(name)
    return math.fsum(loss(*row, **options) for row in rows), [grad(*row, **options) for row in rows]


@pytest.mark.obligation(*itertools.chain(*OBLIGATIONS.values()))
@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_losses_of_a_service(losses: Any, device: str, name: str, dtype: str) -> None:
    loss = getattr(losses.policy_gradient, f"{name}_loss")
    closed_form = getattr(losses.policy_gradient, f"{name}_grad")
    of_value, of_gradient = OBLIGATIONS[name]

    def hold(case: Sequences) -> None:
        new, old, advantages = case.rows
        hidden = np.zeros_like(new, dtype=bool) if name == "dro" else advantages == 0.0
        if name == "gspo":
            hidden &= case.mask == 0.0
        logprobs = tensor(np.where(hidden, np.nan, new), dtype, device).requires_grad_()
        rest = [tensor(np.where(hidden, -np.inf, old), dtype, device), tensor(advantages, dtype, device)]
        if name == "gspo":
            rest.append(tensor(case.mask, dtype, device))
        result = loss(logprobs, *rest, **case.options)
        value, slopes = expected_of(name, case)
        where = f"{case.options}"
        compare(of_value, result, value, dtype=dtype, where=where)
        (gradient,) = torch.autograd.grad(2.0 * result, logprobs)  # the factor from above is passed on
        compare(of_gradient, gradient / 2.0, slopes, dtype=dtype, where=where)
        closed = closed_form(logprobs.detach(), *rest, **case.options)
        compare(of_gradient, closed, slopes, dtype=dtype, where=f"{where}, closed form")

    rng = np.random.default_rng((CLIPPED.index(name), DTYPES.index(dtype)))
    for spread, options in itertools.product(SPREADS, options_of(name)):  # each with each, whatever is drawn
        hold(made(rng, (3, 9), dtype, (spread, 0.4, 0.6), options))

    @settings(max_examples=30)
    @given(sequences(name, dtype))
    def value_and_gradients_are_the_reference_s(case: Sequences) -> None:
        hold(case)

    value_and_gradients_are_the_reference_s()


@pytest.mark.obligation("policy_gradient/clip_bounds")
@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_at_a_bound_exactly_nothing_is_clipped(losses: Any, device: str, name: str, dtype: str) -> None:
    """Ratios of 1 and a step to either side, where 1 is the lower bound, the upper one, or both."""
    step = 4.0 * torch.finfo(getattr(torch, dtype)).eps
    mask = [np.ones(1)] if name == "gspo" else []
    for bounds in ((1.0, 1.2), (0.8, 1.0), (1.0, 1.0)):
        for log_ratio, advantage in itertools.product((-step, 0.0, step), (1.0, -1.0)):
            row = [np.array([-1.0 + log_ratio]), np.array([-1.0]), np.array([advantage]), *mask]
            logprobs, *rest = (tensor(part, dtype, device) for part in row)
            result = getattr(losses.policy_gradient, f"{name}_loss")(logprobs.requires_grad_(), *rest, *bounds)
            (gradient,) = torch.autograd.grad(result, logprobs)
            clipped = (log_ratio > 0 and advantage > 0 and bounds[1] == 1.0) or (
                log_ratio < 0 and advantage < 0 and bounds[0] == 1.0
            )
            slope = 0.0 if clipped else -math.exp(log_ratio) * advantage
            where = f"{name}, bounds {bounds}, log ratio {log_ratio}, advantage {advantage}"
            compare("policy_gradient/clip_bounds", gradient, [slope], dtype=dtype, oracle="by hand", where=where)
            ours = getattr(reference, f"{name}_grad")(*row, *bounds)
            compare("policy_gradient/clip_bounds", ours, [slope], dtype="float64", oracle="by hand", where=where)


@pytest.mark.obligation("policy_gradient/clipped_oracle")
@pytest.mark.parametrize("name", CLIPPED)
def test_reference_of_the_losses_of_a_service_against_sixty_digits(name: str) -> None:
    @settings(max_examples=30)
    @given(sequences(name, "float64"))
    def the_reference_has_sixty_digits(case: Sequences) -> None:
        options = {**dict(zip(CLIP, DEFAULTS.get(name, ()), strict=False)), **case.options}
        for row, mask in zip(zip(*case.rows, strict=True), case.mask, strict=True):
            at, sampler, advantages = (oracle.numbers(part) for part in row)
            rows = {"sampler": sampler, "advantages": advantages, "mask": mask.tolist()}
            arguments = [*row, mask] if name == "gspo" else row
            labels = {"dtype": "float64", "oracle": "mpmath", "where": f"{name}, {options}"}

            def value(z: list[Any], at: list[Any] = at, rows: dict[str, list[Any]] = rows) -> Any:
                return oracle.policy_loss(name, z, at, rows, options)

            actual = getattr(reference, f"{name}_loss")(*arguments, **options)
            compare("policy_gradient/clipped_oracle", actual, oracle.as_floats(value(at)), **labels)
            slopes = getattr(reference, f"{name}_grad")(*arguments, **options)
            expected = oracle.as_floats(oracle.derivative(value, at))
            compare("policy_gradient/clipped_oracle", slopes, expected, **labels)

    the_reference_has_sixty_digits()


@pytest.mark.obligation("policy_gradient/service_oracle")
@pytest.mark.parametrize("name", CLIPPED)
def test_what_a_service_is_held_to(name: str) -> None:
    """paritygate.service.oracles: the value, and the weights with which cross-entropy has the gradient."""

    @settings(max_examples=30)
    @given(sequences(name, "float64"))
    def the_oracle_is_the_reference(case: Sequences) -> None:
        value, slopes = expected_of(name, case)
        labels = {"dtype": "float64", "where": f"{name}, {case.options}"}
        outputs = []
        for new, old, advantages, mask in zip(*case.rows, case.mask, strict=True):
            inputs = {"logprobs": old, "advantages": advantages, "sequence_ratio_mask": mask}
            outputs.append(oracles.LOSSES[name](new, inputs, case.options))
        compare("policy_gradient/service_oracle", sum(one.value for one in outputs), value, **labels)
        weights = [-one.weights for one in outputs]
        compare("policy_gradient/service_oracle", weights, slopes, **labels)

    the_oracle_is_the_reference()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("policy_gradient/constants")
def test_sampler_and_advantages_are_constants(losses: Any, device: str, dtype: str) -> None:
    new, old, advantages = (tensor(x, dtype, device).requires_grad_() for x in ([-1.0, -2], [-1.5, -1], [1.0, -0.5]))
    loss = losses.policy_gradient.importance_sampling_loss(new, old, advantages)
    leaves = (old, advantages)
    for where, gradient in zip(
        ("sampler", "advantages"), torch.autograd.grad(loss, leaves, allow_unused=True), strict=True
    ):
        reached = torch.zeros_like(new) if gradient is None else gradient
        compare("policy_gradient/constants", reached, [0.0, 0.0], dtype=dtype, where=where)
