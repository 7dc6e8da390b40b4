"""One loss in its forms: any number of leading dimensions, any factor from above, the series at its end."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from paritygate.losses import sdpo, spod
from paritygate_reference import sdpo as reference


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("lead", [(), (1,), (2, 2), (2, 1, 2)])
@pytest.mark.parametrize("aggregation", sdpo.AGGREGATIONS)
def test_logit_loss_of_any_leading_dimensions(lead: tuple[int, ...], aggregation: str) -> None:
    """(..., T, V): a sequence alone is a batch of one, more dimensions are a batch of their product."""
    student, teacher = normal(*lead, 3, 5), normal(*lead, 3, 5, seed=1)
    mask, ratio = torch.ones(*lead, 3), torch.rand(*lead, 3, generator=torch.Generator().manual_seed(2)) + 0.1
    mask[..., 0] = 0
    options: dict[str, Any] = {"aggregation": aggregation, "top_k": 3}
    leaf = student.requires_grad_()
    loss = sdpo.logit_loss(leaf, teacher, mask, importance_ratio=ratio, **options)
    rows = [x.detach().reshape(-1, *x.shape[len(lead) :]).numpy() for x in (student, teacher, mask)]
    options["importance_ratio"] = ratio.reshape(-1, 3).numpy()
    assert loss.item() == pytest.approx(reference.logit_loss(*rows, **options), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, leaf)
    expected = reference.logit_loss_grad(*rows, **options)
    np.testing.assert_allclose(gradient.reshape(-1, 3, 5), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("make", [sdpo.ema, sdpo.trust_region])
def test_a_teacher_at_an_end_of_its_rate_does_not_read_the_other(make: Any) -> None:
    """0 times -inf is NaN: an entry that one side excludes leaves the other side's logits alone."""
    initial, student = torch.tensor([1.0, -torch.inf, 2.0]), torch.tensor([-torch.inf, 0.5, 3.0])
    assert torch.equal(make(initial, student, 0.0), initial)
    assert torch.equal(make(initial, student, 1.0), student)


INDICES = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0]), torch.tensor([False])


def heads() -> list[torch.Tensor]:
    """Hidden states and heads of student and teacher, whose widths differ."""
    return [normal(4, 3), normal(5, 3, seed=1), normal(4, 2, seed=2), normal(5, 2, seed=3)]


@pytest.mark.parametrize("factor", [0.0, 1.0, -2.5])
def test_fused_spod_under_any_factor(factor: float) -> None:
    gradients = []
    for scale in (1.0, factor):
        leaves = [x.requires_grad_() for x in heads()[:2]]
        loss = spod.fused_linear_success_preserving_loss(*leaves, *heads()[2:], *INDICES).loss
        gradients.append(torch.autograd.grad(loss * scale, leaves))
    for one, scaled in zip(*gradients, strict=True):
        torch.testing.assert_close(one * factor, scaled, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("place", "shape"),
    [(0, (4, 2)), (1, (5, 2)), (2, (4, 3)), (3, (5, 3)), (3, (6, 2)), (2, (3, 2)), (0, (4,)), (1, (5, 3, 1))],
)
def test_fused_spod_of_shapes_that_do_not_fit(place: int, shape: tuple[int, ...]) -> None:
    given = heads()
    given[place] = normal(*shape)
    with pytest.raises(ValueError, match="shapes differ"):
        spod.fused_linear_success_preserving_loss(*given, *INDICES)


@pytest.mark.parametrize("gap", [0.0199, 0.0201, 0.001])
def test_a_kl_has_its_digits_on_both_sides_of_the_series(gap: float) -> None:
    """Two entries whose log-ratios are about +gap and -gap, where the plain form and its series meet."""
    for sign, mass in itertools.product((1, -1), (0.5, 0.3)):
        student = np.log([mass, 1 - mass])
        teacher = student + np.array([gap, -gap * mass / (1 - mass)]) * sign
        exact = oracle.divergence(oracle.numbers(student), oracle.numbers(teacher), "forward_kl")
        pair = [torch.tensor(x)[None, None] for x in (student, teacher)]
        loss = sdpo.logit_loss(*pair, torch.ones(1, 1), divergence="forward_kl", top_k=2)
        assert loss.item() == pytest.approx(float(exact), rel=2e-12, abs=0.0)
