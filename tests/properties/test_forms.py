"""One loss in its forms: any leading dimensions, any factor from above, what does not fit, the series at its end."""

import itertools
import math
import re
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from paritygate.losses import grpo, numerics, policy_gradient, sdpo, spod
from paritygate.losses.spod import fused, row_ops
from paritygate_reference import sdpo as reference
from paritygate_reference import spod as spod_reference
from tests import oracle


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OPTIONS: list[dict[str, Any]] = [
    *({"divergence": kind, "mixture": 0.3} for kind in sdpo.DIVERGENCES),
    {"top_k": 2},
    {"top_k": 2, "tail": False},
    *({"aggregation": aggregation} for aggregation in sdpo.AGGREGATIONS),
]


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
    assert loss.item() == pytest.approx(reference.logit_loss(*rows, **options), rel=1e-12, abs=0.0)
    (gradient,) = torch.autograd.grad(loss, leaf)
    expected = reference.logit_loss_grad(*rows, **options)
    np.testing.assert_allclose(gradient.reshape(-1, 3, 5), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("factor", [1.0, -1.0, -2.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logit_loss_under_any_factor(dtype: torch.dtype, factor: float, again: bool) -> None:
    """A ratio of 0 leaves a position out though its divergence is +inf; `again`: the gradient that has one itself."""
    student, teacher = normal(1, 3, 5).to(dtype).requires_grad_(), normal(1, 3, 5, seed=1).to(dtype)
    teacher[0, 1, 2] = -torch.inf
    options: Any = {"importance_ratio": torch.tensor([[1.0, 0.0, 0.5]]), "aggregation": "token_sum"}
    loss = sdpo.logit_loss(student, teacher, torch.ones(1, 3), **options)
    (gradient,) = torch.autograd.grad(loss * factor, student, create_graph=again)
    expected, value = torch.zeros(3, 5, dtype=torch.float64), 0.0
    for row, ratio in ((0, 1.0), (2, 0.5)):
        pair = [x.detach()[:, row : row + 1].double().numpy() for x in (student, teacher)]
        slopes = reference.logit_loss_grad(*pair, np.ones((1, 1)), aggregation="token_sum")
        expected[row] = factor * ratio * torch.as_tensor(slopes)[0, 0]
        value += ratio * reference.logit_loss(*pair, np.ones((1, 1)), aggregation="token_sum")
    assert loss.item() == pytest.approx(value, rel=1e-12 if dtype == torch.float64 else 1e-6, abs=0.0)
    torch.testing.assert_close(gradient[0].double(), expected, rtol=0, atol=1e-15 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_gradient_of_the_logit_loss_by_itself(options: dict[str, Any]) -> None:
    """`logit_loss_grad` hands every option on, is a constant, and asks for no graph around it."""
    student, teacher = normal(2, 3, 5).requires_grad_(), normal(2, 3, 5, seed=1)
    mask, ratio = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[0.5, 2.0, 1.0], [3.0, 1.0, 1.0]])
    with torch.no_grad():
        gradient = sdpo.logit_loss_grad(student, teacher, mask, importance_ratio=ratio, **options)
    sides = [x.detach().numpy() for x in (student, teacher, mask)]
    expected = reference.logit_loss_grad(*sides, importance_ratio=ratio.numpy(), **options)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=1e-15)
    assert not gradient.requires_grad
    assert student.grad is None


def test_the_gradient_of_the_logit_loss_by_itself_without_validation() -> None:
    pair, masked = (normal(2, 3, 5), normal(2, 3, 5, seed=1)), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="masked"):
        sdpo.logit_loss_grad(*pair, masked)
    assert not sdpo.logit_loss_grad(*pair, masked, validate=False).any()


@pytest.mark.parametrize("make", [sdpo.ema, sdpo.trust_region])
def test_a_teacher_at_an_end_of_its_rate_does_not_read_the_other(make: Any) -> None:
    """0 times -inf is NaN: an entry that one side excludes leaves the other side's logits alone."""
    initial, student = torch.tensor([1.0, -torch.inf, 2.0]), torch.tensor([-torch.inf, 0.5, 3.0])
    assert torch.equal(make(initial, student, 0.0), initial)
    assert torch.equal(make(initial, student, 1.0), student)


@pytest.mark.parametrize(
    ("dtype", "result", "teacher"),
    [
        (torch.float64, torch.float64, torch.float64),
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.float32, torch.float16),
        (torch.int64, torch.float64, torch.float64),
    ],
)
def test_dtypes_of_what_is_made(dtype: torch.dtype, result: torch.dtype, teacher: torch.dtype) -> None:
    """No advantage is of half precision, none is widened; a teacher is of the dtype of what it was made of."""
    pair, mask = (torch.full((2, 3), -2).to(dtype), torch.full((2, 3), -1).to(dtype)), torch.ones(2, 3)
    for made in (
        sdpo.token_advantage(*pair, mask),
        sdpo.sequence_advantage(*pair, mask),
        sdpo.hybrid_advantage(*pair, 0.5),
        policy_gradient.importance_sampling_loss(*pair, pair[0]),
    ):
        assert made.dtype == result
    assert grpo.group_mean_advantage(pair[0]).dtype == torch.float64
    for rate in (0.0, 0.5, 1.0):
        assert sdpo.ema(*pair, rate).dtype == teacher
        assert sdpo.trust_region(*pair, rate).dtype == teacher


def test_nobody_is_his_own_sibling_in_a_large_group() -> None:
    """Beyond 256 equal indices are no longer the same object."""
    assert sdpo.select_sibling([0.0] * 300 + [1.0, 0.9], 300) == 301
    assert sdpo.select_sibling([0.0] * 300 + [1.0], 300) is None


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
    [
        *((0, (4, 2)), (1, (5, 2)), (2, (4, 3)), (3, (5, 3)), (3, (6, 2)), (2, (3, 2)), (0, (4,)), (1, (5, 3, 1))),
        *((4, (3,)), (4, (5,)), (7, ()), (7, (1, 1))),
    ],
)
def test_fused_spod_of_shapes_that_do_not_fit(place: int, shape: tuple[int, ...]) -> None:
    given: list[Any] = [*heads(), *INDICES]
    given[place] = torch.zeros(shape)
    shapes = [tuple(x.shape) for x in given[:5]]
    words = f"student {shapes[0]} and {shapes[1]}, teacher {shapes[2]} and {shapes[3]}, actions {shapes[4]};"
    with pytest.raises(ValueError, match=re.escape(f"spod: shapes differ: {words}")):
        spod.fused_linear_success_preserving_loss(*given)


@pytest.mark.parametrize(
    ("student", "teacher", "actions", "success"),
    [
        ((3,), (3,), (3,), (2,)),
        ((3, 4, 1), (3, 4, 1), (3,), (2,)),
        ((3, 4), (3, 5), (3,), (2,)),
        ((3, 4), (3, 3), (3,), (2,)),
        ((3, 4), (3, 4), (2,), (2,)),
        ((3, 4), (3, 4), (4,), (2,)),
        ((3, 4), (3, 4), (3, 1), (2,)),
        ((3, 4), (3, 4), (3,), ()),
        ((3, 4), (3, 4), (3,), (2, 1)),
    ],
)
def test_packed_spod_of_shapes_that_do_not_fit(student: Any, teacher: Any, actions: Any, success: Any) -> None:
    index = torch.tensor([0, 0, 1]), torch.tensor([0, 1])
    given: Any = torch.zeros(student), torch.zeros(teacher), torch.zeros(actions, dtype=torch.int64), *index
    with pytest.raises(ValueError, match=r"spod: shapes differ: student_logits.*\(N, V\), \(N, V\), \(N,\), \(E,\)"):
        spod.success_preserving_loss(*given, torch.ones(success, dtype=torch.bool))


@pytest.mark.parametrize("whole", [0, 1])
def test_logits_of_whole_numbers_are_refused(whole: int) -> None:
    pair = [torch.zeros(4, 3), torch.zeros(4, 3)]
    pair[whole] = pair[whole].long()
    with pytest.raises(ValueError, match=r"spod: logits are .*int64.*floating point is expected"):
        spod.success_preserving_loss(*pair, torch.zeros(4, dtype=torch.int64), *INDICES[1:])


@pytest.mark.parametrize(
    ("place", "shape", "expected"),
    [
        ((0, 1), (2, 1, 3), r"\(E, S, T, V\) and \(E, S, T\)"),
        ((0, 1), (2, 1, 3, 4, 1), r"\(E, S, T, V\) and \(E, S, T\)"),
        ((2,), (2, 1, 2), r"\(E, S, T, V\) and \(E, S, T\)"),
        ((2,), (2, 1, 4), r"\(E, S, T, V\) and \(E, S, T\)"),
        ((3,), (2, 1, 2), r"mask \(2, 1, 2\); \(2, 1, 3, 4\) and \(2, 1, 3\) are"),
        ((3,), (2, 1, 4), r"mask \(2, 1, 4\); \(2, 1, 3, 4\) and \(2, 1, 3\) are"),
        ((1,), (2, 1, 3, 3), r"teacher_logits \(2, 1, 3, 3\), mask"),
        ((1,), (2, 1, 3, 5), r"teacher_logits \(2, 1, 3, 5\), mask"),
    ],
)
def test_padded_spod_of_shapes_that_do_not_fit(place: tuple[int, ...], shape: tuple[int, ...], expected: str) -> None:
    given: Any = [torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3).long(), torch.ones(2, 1, 3)]
    for i in place:
        given[i] = given[i].new_zeros(shape)
    with pytest.raises(ValueError, match=f"spod: shapes differ: .*{expected}"):
        spod.success_preserving_loss_padded(*given, torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("rows", "vocabulary", "bounds"),
    [
        (10, 1 << 19, [(0, 4), (4, 8), (8, 10)]),
        (2, 1 << 22, [(0, 1), (1, 2)]),
        ((1 << 21) + 1, 1, [(0, 1 << 21), (1 << 21, (1 << 21) + 1)]),
        (3, 0, [(0, 3)]),
        (0, 5, []),
    ],
)
def test_blocks_in_float64_hold_two_million_entries(rows: int, vocabulary: int, bounds: list[tuple[int, int]]) -> None:
    """Of rows that are wider, one at a time."""
    assert list(numerics.chunk_rows(torch.empty(rows, vocabulary, device="meta"))) == bounds


def test_a_fused_chunk_is_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default TILE bytes of logits are held: 16 rows of a vocabulary of 1000, where a width of 2 would allow all."""
    monkeypatch.setattr(fused, "TILE", 20 * 1000 * 8)
    statistics, seen = row_ops.statistics, []

    def watched(p: torch.Tensor, q: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        seen.append(p.shape[0])
        return statistics(p, q, actions)

    monkeypatch.setattr(row_ops, "statistics", watched)
    pair = normal(50, 2), normal(1000, 2, seed=1), normal(50, 300, seed=2), normal(1000, 300, seed=3)
    rows = torch.arange(50)
    spod.fused_linear_success_preserving_loss(*pair, rows, rows, torch.zeros_like(rows), torch.tensor([True]))
    assert seen == [20, 20, 10]


@pytest.mark.parametrize("factor", [1.0, -2.5])
@pytest.mark.parametrize(("success", "tau0"), [(False, 0.5), (True, 1.0), (True, 1e-9)])
def test_a_spod_gradient_made_to_be_differentiated_is_the_gradient(factor: float, success: bool, tau0: float) -> None:
    """With `create_graph` other code makes it; a check of second derivatives only asks whether that fits itself."""
    index, actions = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([0, 1, 2, 3, 4, 0])
    leaf, teacher = normal(6, 5, seed=4).requires_grad_(), normal(6, 5, seed=3)
    options: Any = {"tau0": tau0, "floor_weight": 0.7}
    given = leaf, teacher, actions, index, torch.tensor([0, 0, 1]), torch.tensor([success] * 2)
    loss = spod.success_preserving_loss(*given, **options).loss
    (gradient,) = torch.autograd.grad(loss * factor, leaf, create_graph=True)
    sides = leaf.detach().numpy(), teacher.numpy(), actions.numpy()
    names = "student_logits", "teacher_logits", "tokens"
    ragged_actions = [dict(zip(names, (x[a:b] for x in sides), strict=True)) for a, b in ((0, 2), (2, 3), (3, 6))]
    episodes = [
        {"success": success, "actions": ragged_actions[:2]},
        {"success": success, "actions": ragged_actions[2:]},
    ]
    slopes = spod_reference.success_preserving_grad(episodes, **options)
    expected = np.concatenate([rows for episode in slopes for rows in episode])
    np.testing.assert_allclose(gradient.detach().numpy(), factor * expected, rtol=0, atol=1e-15)


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


@pytest.mark.parametrize("gap", [163, -163, 20, -5])
def test_the_series_of_a_kl_to_its_last_coefficient(gap: int) -> None:
    """One entry, its two logarithms exact in binary: a (d - 1 + exp(-d)), half a d^2, keeps its digits."""
    d = gap / 8192
    term = numerics.kl_divergence(torch.tensor([[-0.5]]).double(), torch.tensor([[-0.5 - d]]).double())
    exact = mpmath.exp(mpmath.mpf(-0.5)) * (mpmath.mpf(d) - 1 + mpmath.exp(-mpmath.mpf(d)))
    assert term.item() == pytest.approx(float(exact), rel=1e-14, abs=0.0)


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (1, 3), (3, 3), (2,), (2, 3, 1)])
def test_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    words = re.escape(f"mask has shape {shape}; (2, 3) is expected")
    with pytest.raises(ValueError, match=words):
        sdpo.logit_loss(normal(2, 3, 5), normal(2, 3, 5), torch.ones(shape))


@pytest.mark.parametrize("value", [-1.0, 2.0, 0.5, math.nan, -math.inf])
def test_a_mask_of_other_numbers(value: float) -> None:
    mask = torch.tensor([[1.0, 0.0, value], [1.0, 1.0, 1.0]])
    with pytest.raises(
        ValueError, match=re.escape(f"logit_loss: the mask at position (0, 2) is {value}; it is 0 or 1")
    ):
        sdpo.logit_loss(normal(2, 3, 5), normal(2, 3, 5), mask)
    with pytest.raises(ValueError, match=re.escape(f"token_advantage: the mask at position (0, 2) is {value}")):
        sdpo.token_advantage(-normal(2, 3).abs(), -normal(2, 3).abs(), mask)


@pytest.mark.parametrize("shapes", [((5,), (5,)), ((2, 3, 5), (2, 3, 4)), ((2, 3, 5), (2, 3, 6)), ((2, 3, 5), (3, 5))])
def test_logits_that_do_not_fit(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="logit_loss: shapes differ: student_logits"):
        sdpo.logit_loss(*map(torch.zeros, shapes), torch.ones(shapes[0][:-1]))


@pytest.mark.parametrize("top_k", [0, 6, -1, 2.0])
def test_a_top_k_outside_of_the_vocabulary(top_k: Any) -> None:
    words = re.escape(f"top_k is {top_k}; it is a whole number in [1, 5], the vocabulary")
    with pytest.raises(ValueError, match=words):
        sdpo.logit_loss(normal(2, 3, 5), normal(2, 3, 5), torch.ones(2, 3), top_k=top_k)


@pytest.mark.parametrize("whole", [0, 1])
def test_distillation_of_whole_numbers_is_refused(whole: int) -> None:
    pair = [torch.zeros(2, 3, 5), torch.zeros(2, 3, 5)]
    pair[whole] = pair[whole].long()
    with pytest.raises(ValueError, match=r"logit_loss: logits are .*int64.*floating point is expected"):
        sdpo.logit_loss(*pair, torch.ones(2, 3))


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_service_weights_where_the_teacher_excludes_an_entry(divergence: str, tail: bool) -> None:
    """Only the reverse KL is +inf there; the others have a gradient, and the weights are to have it too."""
    student, teacher = normal(1, 6), normal(1, 6, seed=1)
    kept = student[0].topk(4).indices
    teacher[0, kept[1]] = -torch.inf
    options: Any = {"divergence": divergence, "mixture": 0.3, "tail": tail}
    pair = (x.log_softmax(-1)[:, kept] for x in (student, teacher))
    weights = sdpo.cross_entropy_weights(*pair, **options).weights
    leaf = student.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(-(weights * leaf.log_softmax(-1)[:, kept]).sum(), leaf)
    sides = student[None].numpy(), teacher[None].numpy()
    expected = reference.logit_loss_grad(*sides, np.ones((1, 1)), top_k=4, **options)
    np.testing.assert_allclose(gradient.numpy()[None], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", [(2, 4), (2, 2), (3, 3), (1, 3)])
def test_service_weights_of_rows_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"shapes are (2, 3) and {shape};")):
        sdpo.cross_entropy_weights(torch.full((2, 3), -2.0), torch.full(shape, -2.0))


@pytest.mark.parametrize("shape", [(1, 3), (1, 4), (3, 4)])
def test_service_weights_of_spod_of_rows_that_do_not_fit(shape: tuple[int, int]) -> None:
    """A single row would be taken for all of them."""
    rows, sampled, index = torch.full(shape, -2.0), torch.tensor([-1.0, -1.0]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=f"{shape[0]} rows of log-probabilities, 2 sampled tokens"):
        spod.success_preserving_weights(rows, rows, sampled, sampled, index, index, torch.tensor([True, True]))


@pytest.mark.parametrize(("student", "weight"), [(-0.75, 0.7), (math.log(0.5), 0.0), (-0.5, 0.0)])
def test_service_weights_of_spod_at_its_floor(student: float, weight: float) -> None:
    """Where the student is at tau0 already nothing holds it up: the floor acts below."""
    rows, index = torch.full((1, 3), -2.0), torch.tensor([0])
    sampled, teacher = torch.tensor([student], dtype=torch.float64), torch.tensor([-2.0])
    given = rows, rows, sampled, teacher, index, index, torch.tensor([True])
    weights = spod.success_preserving_weights(*given, tau0=0.5, floor_weight=0.7)
    assert weights.gate.tolist() == [True]
    assert weights.sampled.tolist() == [weight]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_a_kl_does_not_look_at_the_mixture(divergence: str) -> None:
    pair, rows = (normal(1, 2, 5), normal(1, 2, 5, seed=1)), [normal(2, 5).log_softmax(-1)] * 2
    losses = [sdpo.logit_loss(*pair, torch.ones(1, 2), divergence=divergence, mixture=a) for a in (0.5, 0.0, 7.0)]
    assert losses[0] == losses[1] == losses[2]
    weights = [sdpo.cross_entropy_weights(*rows, divergence=divergence, mixture=a).weights for a in (0.5, 0.0, 7.0)]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_without_validation_a_teacher_outside_of_the_top_k_is_nan() -> None:
    teacher = torch.tensor([[[-torch.inf, -torch.inf, 0.0]]])
    loss = sdpo.logit_loss(
        torch.tensor([[[2.0, 1.0, 0.0]]]), teacher, torch.ones(1, 1), top_k=2, tail=False, validate=False
    )
    assert loss.isnan()
