"""What must not matter: the order of things, what is masked, how a batch is split, a constant added to logits."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paritygate.losses import averaging, policy_gradient, sdpo, spod
from tests.cases import LogitCase, SpodCase, logit_cases, spod_cases
from tests.counts import soak

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
FINITE = ("ordinary", "near_equal")


def value_and_gradient(case: LogitCase, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of a case on the CPU, some arguments changed."""
    arguments = {**case.arguments("cpu"), **changes}
    arguments["student_logits"] = arguments["student_logits"].detach().requires_grad_()
    loss = sdpo.logit_loss(**arguments)
    return loss.detach(), torch.autograd.grad(loss, arguments["student_logits"])[0]


def spod_of(arguments: dict[str, Any]) -> tuple[spod.SpodLoss, torch.Tensor]:
    """Result and gradient through autograd."""
    arguments = {**arguments, "student_logits": arguments["student_logits"].detach().requires_grad_()}
    result = spod.success_preserving_loss(**arguments)
    return result, torch.autograd.grad(result.loss, arguments["student_logits"])[0]


@settings(max_examples=soak(quick=30, full=500))
@given(logit_cases("float64", "ordinary"))
def test_a_mask_is_dropping_the_positions(case: LogitCase) -> None:
    """One sequence: its masked positions cut out give the same loss and the same gradient elsewhere."""
    case.mask[1:] = 0
    case.mask[0, 0] = 1
    loss, gradient = value_and_gradient(case)
    kept = torch.tensor(case.mask[0] == 1)
    arguments = case.arguments("cpu")
    cut = {name: arguments[name][:1, kept] for name in ("student_logits", "teacher_logits", "mask")}
    ratio = arguments["importance_ratio"]
    alone, slopes = value_and_gradient(case, importance_ratio=None if ratio is None else ratio[:1, kept], **cut)
    torch.testing.assert_close(loss, alone, **CLOSE)
    torch.testing.assert_close(gradient[:1, kept], slopes, **CLOSE)
    assert not gradient[:1, ~kept].any()
    assert not gradient[1:].any()


@settings(max_examples=soak(quick=30, full=500))
@given(logit_cases("float32", "ordinary"), st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, -6e4]))
def test_anything_at_a_masked_position_changes_no_bit(case: LogitCase, poison: float) -> None:
    hidden = torch.tensor(case.mask == 0)
    arguments = case.arguments("cpu")
    clean = {
        name: torch.where(hidden[..., None], 0.0, arguments[name]) for name in ("student_logits", "teacher_logits")
    }
    dirty = {name: torch.where(hidden[..., None], poison, arguments[name]) for name in clean}
    ratio = arguments["importance_ratio"]
    if ratio is not None:
        dirty["importance_ratio"] = torch.where(hidden, poison, ratio)
    for validate in (True, False):
        loss, gradient = value_and_gradient(case, validate=validate, **clean)
        again, slopes = value_and_gradient(case, validate=validate, **dirty)
        assert torch.equal(loss, again)
        assert torch.equal(gradient, slopes)
        assert torch.equal(torch.signbit(gradient), torch.signbit(slopes))


@settings(max_examples=soak(quick=30, full=500))
@given(logit_cases("float64", "ordinary"), st.integers(0, 2**32 - 1))
def test_the_vocabulary_has_no_order(case: LogitCase, seed: int) -> None:
    """Permuted entries, permuted gradient; without ties, which go to the lowest index by definition."""
    case.student = case.student + np.random.default_rng(seed).normal(size=case.student.shape) * 1e-6
    order = np.random.default_rng(seed).permutation(case.student.shape[-1])
    loss, gradient = value_and_gradient(case)
    case.student, case.teacher = case.student[..., order], case.teacher[..., order]
    again, slopes = value_and_gradient(case)
    torch.testing.assert_close(loss, again, **CLOSE)
    torch.testing.assert_close(gradient[..., torch.tensor(order)], slopes, **CLOSE)


@pytest.mark.parametrize("regime", FINITE)
def test_a_constant_added_to_logits_changes_nothing(regime: str) -> None:
    @settings(max_examples=soak(quick=30, full=500))
    @given(logit_cases("float64", regime), st.sampled_from([-3.0, 0.5, 64.0]))
    def value_and_gradient_stay(case: LogitCase, constant: float) -> None:
        case.student = np.round(case.student * 1024) / 1024  # so that adding is exact
        loss, gradient = value_and_gradient(case)
        case.student = case.student + constant
        again, slopes = value_and_gradient(case)
        torch.testing.assert_close(loss, again, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(gradient, slopes, rtol=1e-9, atol=1e-13)

    value_and_gradient_stay()


@settings(max_examples=soak(quick=30, full=500))
@given(logit_cases("float64", "ordinary"))
def test_the_gradient_of_a_row_sums_to_zero(case: LogitCase) -> None:
    """Only differences of logits are read. A capped tail is a constant of 1e-7 and may leave that much."""
    _, gradient = value_and_gradient(case)
    assert gradient.sum(-1).abs().max() <= 1e-6 * max(float(gradient.abs().max()), 1e-30) + 1e-14


@settings(max_examples=soak(quick=30, full=500))
@given(logit_cases("float64", "ordinary"), st.integers(1, 3))
def test_micro_batches_change_nothing(case: LogitCase, rows: int) -> None:
    """Each aggregation from the token sums of any split, because the weights are those of the whole batch."""
    loss, gradient = value_and_gradient(case)
    arguments = case.arguments("cpu")
    counts = arguments["mask"].sum(1)
    weights = {
        "token_mean": torch.full_like(counts, 1.0, dtype=torch.float64) / counts.sum(),
        "sequence_mean": 1.0 / (counts.clamp(min=1) * (counts > 0).sum()).double(),
        "sequence_sum": torch.ones_like(counts, dtype=torch.float64) / (counts > 0).sum(),
        "token_sum": torch.ones_like(counts, dtype=torch.float64),
    }[case.options["aggregation"]]
    ratio = torch.ones_like(arguments["mask"], dtype=torch.float64)
    ratio = (ratio if case.ratio is None else arguments["importance_ratio"]) * weights[:, None]
    total, slopes = torch.zeros((), dtype=torch.float64), []
    for start in range(0, len(counts), rows):
        part = {name: arguments[name][start : start + rows] for name in ("student_logits", "teacher_logits", "mask")}
        part["importance_ratio"], part["aggregation"] = ratio[start : start + rows], "token_sum"
        piece, slope = value_and_gradient(case, **part)
        total, slopes = total + piece, [*slopes, slope]
    torch.testing.assert_close(loss, total, **CLOSE)
    torch.testing.assert_close(gradient, torch.cat(slopes), **CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_spod_has_no_order_of_episodes_actions_or_vocabulary(dtype: str) -> None:
    close = CLOSE if dtype == "float64" else {"rtol": 2e-6, "atol": 2e-7}

    @settings(max_examples=soak(quick=30, full=500))
    @given(spod_cases(dtype, "ordinary"), st.integers(0, 2**32 - 1))
    def parts_and_gradient_are_permuted_alike(case: SpodCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        result, gradient = spod_of(case.arguments("cpu"))
        episodes = rng.permutation(len(case.success))
        actions = np.concatenate([rng.permutation(np.flatnonzero(case.episode_index == e)) for e in episodes])
        rows = np.concatenate([np.flatnonzero(case.action_index == a) for a in actions])
        entries = rng.permutation(case.student.shape[1])
        lengths = np.bincount(case.action_index)
        shuffled = SpodCase(
            dtype,
            case.regime,
            case.student[rows][:, entries],
            case.teacher[rows][:, entries],
            np.argsort(entries)[case.actions[rows]],
            np.repeat(np.arange(len(actions)), lengths[actions]),
            np.repeat(np.arange(len(episodes)), np.bincount(case.episode_index)[episodes]),
            case.success[episodes],
            case.options,
        )
        again, slopes = spod_of(shuffled.arguments("cpu"))
        torch.testing.assert_close(result.loss, again.loss, **close)
        assert torch.equal(result.gate[actions], again.gate)
        torch.testing.assert_close(gradient[rows][:, entries], slopes, **close)

    parts_and_gradient_are_permuted_alike()


@settings(max_examples=soak(quick=30, full=500))
@given(spod_cases("float64", "ordinary"))
def test_spod_of_micro_batches_of_episodes(case: SpodCase) -> None:
    """Episode by episode, each weighted by 1/E, gives the loss and the gradient of the whole batch."""
    arguments = case.arguments("cpu")
    result, gradient = spod_of(arguments)
    total, slopes = torch.zeros((), dtype=torch.float64), []
    for e in range(len(case.success)):
        actions = np.flatnonzero(case.episode_index == e)
        rows = np.isin(case.action_index, actions)
        part = {
            **arguments,
            **{name: arguments[name][rows] for name in ("student_logits", "teacher_logits", "actions")},
            "action_index": arguments["action_index"][rows] - int(actions[0]),
            "episode_index": torch.zeros(len(actions), dtype=torch.int64),
            "success": arguments["success"][e : e + 1],
        }
        piece, slope = spod_of(part)
        total = total + piece.loss.detach() / len(case.success)
        slopes.append(slope / len(case.success))
    torch.testing.assert_close(result.loss.detach(), total, **CLOSE)
    torch.testing.assert_close(gradient, torch.cat(slopes), **CLOSE)


@settings(max_examples=soak(quick=30, full=500))
@given(spod_cases("float64", "ordinary"))
def test_spod_repeats_to_the_bit(case: SpodCase) -> None:
    first, gradient = spod_of(case.arguments("cpu"))
    again, slopes = spod_of(case.arguments("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(gradient, slopes)


def test_the_teacher_is_never_differentiated() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(1, 3, 5, generator=generator).requires_grad_() for _ in range(2))
    for divergence in sdpo.DIVERGENCES:
        loss = sdpo.logit_loss(student, teacher, torch.ones(1, 3), divergence=divergence)
        assert torch.autograd.grad(loss, teacher, allow_unused=True)[0] is None
    index = torch.zeros(3, dtype=torch.int64)
    loss = spod.success_preserving_loss(student[0], teacher[0], index, index, index[:1], torch.tensor([True])).loss
    assert torch.autograd.grad(loss, teacher, allow_unused=True)[0] is None
    ratio = torch.ones(1, 3, requires_grad=True)
    loss = sdpo.logit_loss(student, teacher, torch.ones(1, 3), importance_ratio=ratio)
    assert torch.autograd.grad(loss, ratio, allow_unused=True)[0] is None
    logprobs, sampler, advantages = (torch.zeros(4, requires_grad=True) for _ in range(3))
    loss = policy_gradient.importance_sampling_loss(logprobs, sampler, advantages + 1.0)
    assert torch.autograd.grad(loss, [sampler, advantages], allow_unused=True) == (None, None)


def test_a_fully_masked_sum_is_zero_and_attached() -> None:
    student = torch.full((2, 3, 5), float("nan"), requires_grad=True)
    loss = sdpo.logit_loss(student, student.detach(), torch.zeros(2, 3), aggregation="token_sum")
    assert loss.item() == 0.0
    assert torch.equal(torch.autograd.grad(loss, student)[0], torch.zeros(2, 3, 5))


@settings(max_examples=soak(quick=30, full=500))
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_averaging_a_constant_gives_it_and_flat_means_differ(lengths: list[list[int]]) -> None:
    action_index = torch.tensor([a for a, n in enumerate(n for ep in lengths for n in ep) for _ in range(n)])
    episode_index = torch.tensor([e for e, ep in enumerate(lengths) for _ in ep])
    constant = torch.full((len(action_index),), 0.3, dtype=torch.float64)
    torch.testing.assert_close(
        averaging.three_level_mean(constant, action_index, episode_index), constant[0], rtol=1e-14, atol=0
    )
    first = (action_index == 0).double()
    expected = 1.0 / (len(lengths[0]) * len(lengths))
    mean = averaging.three_level_mean(first, action_index, episode_index)
    torch.testing.assert_close(mean, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
