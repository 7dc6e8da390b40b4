"""First and second derivatives against finite differences, in float64."""

import itertools

import pytest
import torch

from paritygate.losses import averaging, grpo, policy_gradient, sdpo, spod


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

    def mean(values: torch.Tensor) -> torch.Tensor:
        return averaging.three_level_mean(values, index, torch.tensor([0, 0, 1]))

    assert torch.autograd.gradcheck(mean, values)
    assert torch.autograd.gradgradcheck(mean, values)


@pytest.mark.parametrize("tau0", [1.0, 1e-9])
def test_padded_spod(tau0: float) -> None:
    mask = torch.tensor([[[1, 1, 0], [0, 0, 0]], [[0, 1, 1], [1, 0, 0]]])
    teacher, actions = normal(2, 2, 3, 4, seed=3), torch.tensor([0, 1, 2] * 4).view(2, 2, 3)

    def loss(student: torch.Tensor) -> torch.Tensor:
        return spod.success_preserving_loss_padded(
            student, teacher, actions, mask, torch.tensor([True, False]), tau0=tau0, floor_weight=0.7
        ).loss

    student = normal(2, 2, 3, 4, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(loss, student)
    assert torch.autograd.gradgradcheck(loss, student)


@pytest.mark.parametrize(("success", "tau0"), list(itertools.product([True, False], [1.0, 1e-9])))
def test_fused_spod(success: bool, tau0: float) -> None:
    """It hands its gradients over once, so they are set beside differences of its own loss."""
    index, actions, episodes = (
        torch.tensor([0, 0, 1, 2, 2, 2]),
        torch.tensor([0, 1, 2, 3, 4, 0]),
        torch.tensor([0, 0, 1]),
    )
    teacher = normal(6, 3, seed=1), normal(5, 3, seed=2)
    leaves = [normal(6, 3, seed=3).requires_grad_(), normal(5, 3, seed=4).requires_grad_()]

    def loss(*student: torch.Tensor) -> torch.Tensor:
        return spod.fused_linear_success_preserving_loss(
            *student, *teacher, actions, index, episodes, torch.tensor([success] * 2), tau0=tau0, floor_weight=0.7
        ).loss

    gradients = torch.autograd.grad(loss(*leaves), leaves)
    for which, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        for at in itertools.product(*map(range, leaf.shape)):
            values = []
            for step in (1e-5, -1e-5):
                moved = [x.detach().clone() for x in leaves]
                moved[which][at] += step
                values.append(loss(*moved).item())
            assert gradient[at].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6, abs=1e-9)


def test_advantages_are_constants() -> None:
    """No gradient flows through what an advantage, a teacher or a weight was made of."""
    teacher, student, mask = -normal(3, 4).abs(), -normal(3, 4, seed=1).abs(), torch.ones(3, 4)
    leaves = [teacher.requires_grad_(), student.requires_grad_()]
    rows = [x.log_softmax(-1) for x in leaves]
    made = [
        grpo.group_mean_advantage(leaves[0]),
        sdpo.token_advantage(*leaves, mask),
        sdpo.sequence_advantage(*leaves, mask),
        sdpo.hybrid_advantage(*leaves, 0.9),
        sdpo.ema(*leaves, 0.3),
        sdpo.trust_region(*leaves, 0.3),
        sdpo.frozen_initial(*leaves),
        sdpo.current(*leaves),
        *(sdpo.cross_entropy_weights(*rows, divergence=kind).weights for kind in sdpo.DIVERGENCES),
    ]
    assert not any(x.requires_grad for x in made)
    index = torch.tensor([0, 0, 1])
    weights = spod.success_preserving_weights(
        *rows, rows[0][:, 0], rows[1][:, 0], index, torch.tensor([0, 0]), torch.tensor([True])
    )
    assert not any(x.requires_grad for x in weights)


def test_a_teacher_is_another_tensor_than_what_it_was_made_of() -> None:
    """An optimiser that writes to the student in place does not move the teacher, at either end of the rate too."""
    initial, student = normal(2, 3), normal(2, 3, seed=1)
    for make in (
        sdpo.frozen_initial,
        sdpo.current,
        *(lambda a, b, r=r: sdpo.ema(a, b, r) for r in (0.0, 0.3, 1.0)),
        *(lambda a, b, r=r: sdpo.trust_region(a, b, r) for r in (0.0, 0.3, 1.0)),
    ):
        pair = initial.clone(), student.clone()
        teacher = make(*pair)
        before = teacher.clone()
        assert torch.equal(pair[0], initial)
        assert torch.equal(pair[1], student)
        for x in pair:
            x.fill_(7.0)
        assert torch.equal(teacher, before)


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
