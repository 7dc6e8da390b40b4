"""First and second derivatives against finite differences, in float64."""

import itertools

import pytest
import torch

from paritygate.losses import averaging, policy_gradient, sdpo, spod


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("divergence", sdpo.DIVERGENCES)
@pytest.mark.parametrize(("top_k", "tail"), [(None, True), (2, True), (2, False), (4, True)])
def test_logit_loss(divergence: str, top_k: int | None, tail: bool) -> None:
    teacher, mask = normal(2, 2, 4, seed=1), torch.tensor([[1, 0], [1, 1]])
    ratio = torch.rand(2, 2, generator=torch.Generator().manual_seed(2))

    def loss(student: torch.Tensor) -> torch.Tensor:
        options = {"divergence": divergence, "mixture": 0.3, "top_k": top_k, "tail": tail}
        return sdpo.logit_loss(student, teacher, mask, importance_ratio=ratio, aggregation="sequence_mean", **options)

    student = (normal(2, 2, 4) * 2).requires_grad_()
    assert torch.autograd.gradcheck(loss, student)
    assert torch.autograd.gradgradcheck(loss, student)


@pytest.mark.parametrize("divergence", sdpo.DIVERGENCES)
def test_logit_loss_of_equal_rows(divergence: str) -> None:
    """At its minimum, where the halves of the mixture meet."""
    teacher = normal(1, 2, 5)
    student = teacher.clone().requires_grad_()

    def loss(student: torch.Tensor) -> torch.Tensor:
        return sdpo.logit_loss(student, teacher, torch.ones(1, 2), divergence=divergence, mixture=0.3)

    assert not torch.autograd.grad(loss(student), student)[0].abs().max() > 1e-15
    assert torch.autograd.gradcheck(loss, student)
    assert torch.autograd.gradgradcheck(loss, student)


@pytest.mark.parametrize("divergence", sdpo.DIVERGENCES)
def test_logit_loss_of_a_padded_vocabulary(divergence: str) -> None:
    teacher, student = normal(1, 2, 5, seed=1), normal(1, 2, 5)
    padding = torch.tensor([False, False, True, False, True])
    teacher[..., padding] = -torch.inf

    def loss(entries: torch.Tensor) -> torch.Tensor:
        whole = torch.full((1, 2, 5), -torch.inf, dtype=torch.float64)
        whole[..., ~padding] = entries
        return sdpo.logit_loss(whole, teacher, torch.ones(1, 2), divergence=divergence, mixture=0.3)

    entries = student[..., ~padding].clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, entries)
    assert torch.autograd.gradgradcheck(loss, entries)


@pytest.mark.parametrize(("success", "tau0"), list(itertools.product([True, False], [0.5, 1.0, 1e-9])))
def test_spod(success: bool, tau0: float) -> None:
    """Open, protected under the floor, protected above it."""
    index = torch.tensor([0, 0, 1, 2, 2, 2])
    teacher, actions = normal(6, 5, seed=3), torch.tensor([0, 1, 2, 3, 4, 0])

    def loss(student: torch.Tensor) -> torch.Tensor:
        return spod.success_preserving_loss(
            student,
            teacher,
            actions,
            index,
            torch.tensor([0, 0, 1]),
            torch.tensor([success, success]),
            tau0=tau0,
            floor_weight=0.7,
        ).loss

    student = (normal(6, 5, seed=4)).requires_grad_()
    assert torch.autograd.gradcheck(loss, student)
    assert torch.autograd.gradgradcheck(loss, student)


def test_importance_sampling() -> None:
    sampler, advantages = -normal(3, 4, seed=1).abs(), normal(3, 4, seed=2)
    advantages[:, 0] = 0.0

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return policy_gradient.importance_sampling_loss(logprobs, sampler, advantages)

    logprobs = (-normal(3, 4).abs()).requires_grad_()
    assert torch.autograd.gradcheck(loss, logprobs)
    assert torch.autograd.gradgradcheck(loss, logprobs)
    closed = policy_gradient.importance_sampling_grad(logprobs, sampler, advantages)
    torch.testing.assert_close(torch.autograd.grad(loss(logprobs), logprobs)[0], closed, rtol=1e-15, atol=0)
    assert not closed.requires_grad


def test_three_level_mean() -> None:
    index = torch.tensor([0, 0, 1, 2, 2, 2])
    values = normal(6).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: averaging.three_level_mean(v, index, torch.tensor([0, 0, 1])), values)


def test_the_micro_batch_of_a_step_accumulates() -> None:
    """Two backward passes of weighted halves leave the gradient of the whole in .grad."""
    teacher, mask = normal(4, 3, 6, seed=1), torch.ones(4, 3)
    whole = normal(4, 3, 6).requires_grad_()
    sdpo.logit_loss(whole, teacher, mask).backward()
    halves = whole.detach().clone().requires_grad_()
    for part in (slice(0, 1), slice(1, 4)):
        loss = sdpo.logit_loss(halves[part], teacher[part], mask[part], aggregation="token_sum") / mask.sum()
        loss.backward()
    torch.testing.assert_close(halves.grad, whole.grad, rtol=1e-12, atol=1e-15)
