"""SDPO over the student's top k by the compiled kernels; judges: the loss of float64 logits, and the reference."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paritygate.losses import engines, sdpo
from paritygate.losses.buckets import Options
from paritygate.losses.engines import cpp
from paritygate_reference import sdpo as reference
from tests.kernels.test_divergence import DTYPES, KINDS, ULP, both, logits
from tests.kernels.test_rows import layouts, needs_compiler, threads

pytestmark = needs_compiler
TAILS = pytest.mark.parametrize("tail", [True, False])
SIZES = [(1, 1), (2, 1), (3, 3), (17, 5), (33, 33), (127, 128 - 1), (130, 100), (513, 1), (513, 200), (2100, 100)]


def holds(student: Tensor, teacher: Tensor, mask: Tensor, **options: Any) -> None:
    """Value and gradient are those of float64 logits, by torch: to the tolerances of spec/losses.json."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "choose", lambda *_: engines.float64)
        exact, slope = both(student.double(), teacher.double(), mask, **options)
    loss, gradient = both(student, teacher, mask, **options)
    assert float(loss) == pytest.approx(float(exact), rel=1e-6, abs=1e-12)
    largest = slope.nan_to_num(0.0).abs().max()
    allowed = ULP[student.dtype] * largest + (2.0**-25 if student.dtype == torch.float16 else 1e-14)
    assert torch.equal(gradient.isnan(), slope.isnan())
    assert (gradient.double() - slope).nan_to_num(0.0).abs().max() <= allowed


@DTYPES
@KINDS
@TAILS
@pytest.mark.parametrize("noise", [1e-3, 2.0])
def test_any_vocabulary_and_any_k(noise: float, tail: bool, kind: str, mixture: float, dtype: torch.dtype) -> None:
    for vocabulary, k in SIZES:
        student, teacher, mask = logits(vocabulary, dtype, noise)
        assert engines.choose("divergences", student.flatten(0, 1), teacher.flatten(0, 1)) is cpp
        holds(student, teacher, mask, kind=kind, mixture=mixture, top_k=k, tail=tail)


@DTYPES
@KINDS
@TAILS
def test_against_the_reference(tail: bool, kind: str, mixture: float, dtype: torch.dtype) -> None:
    for vocabulary, k in ((7, 3), (150, 20), (150, 150)):
        student, teacher, mask = logits(vocabulary, dtype)
        arrays = (student.double().numpy(), teacher.double().numpy(), mask.numpy())
        options = {"divergence": kind, "mixture": mixture, "top_k": k, "tail": tail}
        loss, gradient = both(student, teacher, mask, kind, mixture, top_k=k, tail=tail)
        assert float(loss) == pytest.approx(reference.logit_loss(*arrays, **options), rel=1e-6, abs=1e-12)
        slope = reference.logit_loss_grad(*arrays, **options)
        worst = np.abs(gradient.double().numpy() - slope).max()
        assert worst <= ULP[dtype] * np.abs(slope).max() + (2.0**-25 if dtype == torch.float16 else 1e-14)


def chosen(student: Tensor, k: int) -> list[list[int]]:
    """The indices that the kernel keeps of each row."""
    row_mask = torch.ones(len(student), dtype=torch.bool)
    return cpp.divergence(student, student, row_mask, Options("forward_kl", top_k=k))[1][1].tolist()


@DTYPES
def test_the_k_largest_ties_to_the_lowest_index(dtype: torch.dtype) -> None:
    """Against a stable sort: rows full of ties, rising, falling, constant, with both zeros and with -inf."""
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (1, 2, 15, 129, 1000, 5003):
        few = torch.randint(0, 4, (vocabulary,), generator=generator).float()
        holes = torch.where(torch.rand(vocabulary, generator=generator) < 0.9, -math.inf, few)
        holes[vocabulary // 2] = 0.0
        zeros = torch.where(few > 1, 0.0, -0.0)
        rising = torch.arange(vocabulary).float() / 64
        normal = torch.randn(vocabulary, generator=generator)
        rows = torch.stack([few, holes, zeros, rising, rising.flip(0), few * 0, normal]).to(dtype)
        for k in {1, 2, 100, vocabulary // 2, vocabulary - 1, vocabulary} & set(range(1, vocabulary + 1)):
            expected = [sorted(sorted(range(vocabulary), key=lambda j, row=row: -row[j])[:k]) for row in rows.tolist()]
            assert chosen(rows, k) == expected, (vocabulary, k)


@DTYPES
@KINDS
@TAILS
def test_ties_at_the_edge_of_the_top_k(tail: bool, kind: str, mixture: float, dtype: torch.dtype) -> None:
    student, teacher, mask = logits(300, dtype)
    for k in (1, 7, 299):
        holds(student.round(), teacher, mask, kind=kind, mixture=mixture, top_k=k, tail=tail)


@DTYPES
@KINDS
@TAILS
def test_entries_of_minus_infinity(tail: bool, kind: str, mixture: float, dtype: torch.dtype) -> None:
    """Padding, one side alone, more kept than there are finite entries: NaN of a gradient just where torch has it."""
    for k, holes in itertools.product((1, 30, 45, 70), ("both", "teacher", "student")):
        student, teacher, mask = logits(70, dtype)
        for side, name in ((student, "teacher"), (teacher, "student")):
            if holes != name:
                side[..., 40:] = -math.inf
        student[..., 3] += 9
        try:
            holds(student, teacher, mask, kind=kind, mixture=mixture, top_k=k, tail=tail)
        except ValueError as error:
            assert "among the student's top_k" in str(error)  # noqa: PT017
            assert not tail


@DTYPES
@KINDS
@TAILS
def test_both_ends_of_float16(tail: bool, kind: str, mixture: float, dtype: torch.dtype) -> None:
    top = 65280.0 if dtype == torch.bfloat16 else 65504.0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        values = torch.tensor([top, -top, 0.0, 30.0, -120.0])
        student, teacher = (values[torch.randint(0, 5, (1, 3, 19), generator=generator)].to(dtype) for _ in range(2))
        for k in (1, 5, 19):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engines, "choose", lambda *_: engines.float64)
                mask = torch.ones(1, 3, dtype=torch.bool)
                exact, slope = both(student.double(), teacher.double(), mask, kind, mixture, top_k=k, tail=tail)
            loss, gradient = both(student, teacher, mask, kind, mixture, top_k=k, tail=tail)
            assert float(loss) == pytest.approx(float(exact), rel=1e-6, abs=1e-12)
            allowed = ULP[dtype] * slope.abs().max() + (2.0**-25 if dtype == torch.float16 else 6e-11)
            assert (gradient.double() - slope).abs().max() <= allowed


@DTYPES
@TAILS
def test_masked_rows_may_hold_anything(tail: bool, dtype: torch.dtype) -> None:
    student, teacher, _ = (x.flatten(0, 1) for x in logits(90, dtype))
    row_mask, scale = torch.ones(10, dtype=torch.bool), torch.ones(10, dtype=torch.float64)
    row_mask[4] = row_mask[7] = False
    spoiled = student.clone()
    spoiled[4], spoiled[7] = math.nan, math.inf
    for kind in sdpo.DIVERGENCES:
        options = Options(kind, 0.5, 9, tail)
        values, saved = cpp.divergence(student, teacher, row_mask, options)
        other, saved_other = cpp.divergence(spoiled, teacher, row_mask, options)
        assert torch.equal(values, other)
        gradients = [
            cpp.divergence_gradient(x, teacher, row_mask, options, k, scale)
            for x, k in ((student, saved), (spoiled, saved_other))
        ]
        assert torch.equal(*gradients)
        assert (gradients[0][[4, 7]] == 0).all()


@DTYPES
@pytest.mark.parametrize("value", [math.nan, math.inf, None])
@pytest.mark.parametrize("side", [0, 1])
def test_a_bad_row_that_is_not_validated_is_nan(side: int, value: float | None, dtype: torch.dtype) -> None:
    for kind, k in itertools.product(sdpo.DIVERGENCES, (1, 20, 90)):
        pair = [x.flatten(0, 1).clone() for x in logits(90, dtype)[:2]]
        pair[side][2] = -math.inf if value is None else pair[side][2]
        pair[side][2, 80] = -math.inf if value is None else value
        options = Options(kind, top_k=k)
        values, saved = cpp.divergence(*pair, torch.ones(10, dtype=torch.bool), options)
        assert values.isnan().nonzero().flatten().tolist() == [2]
        everything = torch.ones(10, dtype=torch.float64)
        gradient = cpp.divergence_gradient(*pair, everything.bool(), options, saved, everything)
        assert torch.isfinite(gradient[[0, 1, 3]]).all()


@DTYPES
@KINDS
@TAILS
def test_thread_counts_and_layouts_change_no_bit(tail: bool, kind: str, mixture: float, dtype: torch.dtype) -> None:
    student, teacher, _ = (x.flatten(0, 1) for x in logits(700, dtype))
    row_mask, scale = torch.ones(10, dtype=torch.bool), torch.linspace(0.1, 1, 10).double()
    options = Options(kind, mixture, 50, tail)

    def run(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        values, saved = cpp.divergence(p, q, row_mask, options)
        return values, cpp.divergence_gradient(p, q, row_mask, options, saved, scale)

    with threads(1):
        expected = run(student, teacher)
    with threads(3):
        results = [run(student, teacher)]
    for name, moved in layouts(student).items():
        results.append(run(moved, layouts(teacher)[name]))
    assert all(torch.equal(a, b) for pair in results for a, b in zip(pair, expected, strict=True))


def test_the_gradient_is_differentiable_where_asked() -> None:
    student, teacher, mask = logits(30, torch.float32)
    leaf = student.requires_grad_()
    loss = sdpo.logit_loss(leaf, teacher, mask, top_k=5)
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), leaf)
    assert torch.isfinite(second).all()
    assert second.abs().max() > 0
