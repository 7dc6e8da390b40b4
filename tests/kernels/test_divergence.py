"""SDPO's compiled divergences in forms that parity does not reach; the judge is the same loss on float64 logits."""

import math
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from paritygate.losses import sdpo
from paritygate.losses.buckets import Options
from paritygate.losses.engines import cpp, float64
from tests.kernels.test_rows import layouts, needs_compiler, threads

pytestmark = needs_compiler
ULP = {torch.float32: 3e-7, torch.bfloat16: 2.0**-8, torch.float16: 5e-4}
DTYPES = pytest.mark.parametrize("dtype", ULP, ids=str)
KINDS = pytest.mark.parametrize(
    ("kind", "mixture"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 1e-6), ("jsd", 1 - 1e-6)]
)


def logits(vocabulary: int, dtype: torch.dtype, noise: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(vocabulary)
    student = torch.randn(2, 5, vocabulary) * 2
    teacher = student + noise * torch.randn(2, 5, vocabulary)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 2] = False
    return student.to(dtype), teacher.to(dtype), mask


def both(
    student: Tensor, teacher: Tensor, mask: Tensor, kind: str, mixture: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """Loss and gradient."""
    leaf = student.detach().clone().requires_grad_()
    loss = sdpo.logit_loss(leaf, teacher, mask, divergence=kind, mixture=mixture, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@DTYPES
@KINDS
@pytest.mark.parametrize("noise", [1e-3, 2.0])
@pytest.mark.parametrize("vocabulary", [1, 3, 15, 17, 511, 513, 1500])
def test_any_vocabulary(vocabulary: int, noise: float, kind: str, mixture: float, dtype: torch.dtype) -> None:
    student, teacher, mask = logits(vocabulary, dtype, noise)
    assert cpp.serves(student.flatten(0, 1), teacher.flatten(0, 1))
    loss, gradient = both(student, teacher, mask, kind, mixture)
    exact, slope = both(student.double(), teacher.double(), mask, kind, mixture)
    assert float(loss) == pytest.approx(float(exact), rel=1e-6, abs=1e-12)
    allowed = ULP[dtype] * slope.abs().max() + (2.0**-25 if dtype == torch.float16 else 1e-14)
    assert (gradient.double() - slope).abs().max() <= allowed
    assert (gradient[0, 2] == 0).all()


@DTYPES
@KINDS
def test_thread_counts_and_layouts_change_no_bit(kind: str, mixture: float, dtype: torch.dtype) -> None:
    student, teacher, _ = (x.flatten(0, 1) for x in logits(700, dtype))
    row_mask, scale = torch.ones(10, dtype=torch.bool), torch.linspace(0.1, 1, 10).double()
    options = Options(kind, mixture)

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


@DTYPES
def test_the_numerics_table(dtype: torch.dtype) -> None:
    row_mask, one = torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    table = {  # kind: -inf in both, in the teacher alone, in the student alone
        "forward_kl": (math.isfinite, math.isfinite, math.isinf),
        "reverse_kl": (math.isfinite, math.isinf, math.isfinite),
        "jsd": (math.isfinite, math.isfinite, math.isfinite),
    }
    for kind, claims in table.items():
        for case, claim in enumerate(claims):
            student, teacher = torch.linspace(-2, 2, 70).to(dtype)[None], torch.linspace(3, -3, 70).to(dtype)[None]
            for logits_of, holes in ((student, (0, 2)), (teacher, (0, 1))):
                if case in holes:
                    logits_of[0, 40:50] = -math.inf
            values, saved = cpp.divergence(student, teacher, row_mask, Options(kind, 0.3))
            assert claim(float(values[0])), (kind, case)
            gradient = cpp.divergence_gradient(student, teacher, row_mask, Options(kind, 0.3), saved, one)
            finite = torch.isfinite(gradient).all()
            assert finite or (kind == "reverse_kl" and math.isinf(float(values[0])))
            if case == 0:
                assert (gradient[0, 40:50] == 0).all()


@DTYPES
def test_rows_that_are_not_read_may_hold_anything(dtype: torch.dtype) -> None:
    student, teacher, _ = (x.flatten(0, 1) for x in logits(90, dtype))
    row_mask, scale = torch.ones(10, dtype=torch.bool), torch.ones(10, dtype=torch.float64)
    row_mask[4] = row_mask[7] = False
    spoiled = student.clone()
    spoiled[4], spoiled[7] = math.nan, math.inf
    for kind in sdpo.DIVERGENCES:
        values, saved = cpp.divergence(student, teacher, row_mask, Options(kind))
        other, saved_other = cpp.divergence(spoiled, teacher, row_mask, Options(kind))
        assert torch.equal(values, other)
        gradients = [
            cpp.divergence_gradient(x, teacher, row_mask, Options(kind), k, scale)
            for x, k in ((student, saved), (spoiled, saved_other))
        ]
        assert torch.equal(*gradients)
        assert (gradients[0][[4, 7]] == 0).all()


@pytest.mark.parametrize("dtype", [*ULP, torch.float64], ids=str)
@pytest.mark.parametrize("sure", [4.0, 12.0, 20.0, 40.0, 80.0])
@pytest.mark.parametrize("vocabulary", [2, 3, 700])
def test_a_sure_student_has_the_digits_of_its_gradient(vocabulary: int, sure: float, dtype: torch.dtype) -> None:
    sure_student_holds(vocabulary, sure, dtype)


def sure_student_holds(vocabulary: int, sure: float, dtype: torch.dtype) -> None:
    """Against 50 digits: sums of p (g - g of the sure entry), each many times smaller than a divergence of 13 nats."""
    torch.manual_seed(int(sure))
    student, teacher = torch.randn(1, 1, vocabulary) - sure, torch.randn(1, 1, vocabulary) * 3
    at = vocabulary * 9 // 10  # beyond the first part of a row
    student[0, 0, at], teacher[0, 0, at] = 1.0, -10.0
    student, teacher = student.to(dtype), teacher.to(dtype)
    loss, gradient = both(student, teacher, torch.ones(1, 1, dtype=torch.bool), "reverse_kl", 0.5)
    with mpmath.workdps(50):
        a, b = ([mpmath.exp(x) for x in row.flatten().double().tolist()] for row in (student, teacher))
        p, q = ([x / mpmath.fsum(side) for x in side] for side in (a, b))
        ratios = [mpmath.log(x / y) for x, y in zip(p, q, strict=True)]
        mean = mpmath.fsum(x * r for x, r in zip(p, ratios, strict=True))
        right = torch.tensor([float(x * (r - mean)) for x, r in zip(p, ratios, strict=True)], dtype=torch.float64)
    assert float(loss) == pytest.approx(float(mean), rel=1e-6, abs=0.0)
    most = float(right.abs().max())
    allowed = (ULP.get(dtype) or 1e-12) * most + (2.0**-25 if dtype == torch.float16 else 1e-45)
    assert float((gradient.flatten().double() - right).abs().max()) <= allowed


@pytest.mark.parametrize("engine", [pytest.param(cpp, marks=needs_compiler), float64], ids=["cpp", "float64"])
@pytest.mark.parametrize("options", [Options("reverse_kl"), Options("jsd", 0.3), Options("forward_kl", top_k=9)])
def test_a_masked_row_has_no_gradient_whatever_its_scale(options: Options, engine: Any) -> None:
    """The scale of a masked row is 0 where the loss asks; the engine has the mask, and does not count on that."""
    student, teacher = torch.randn(3, 40), torch.randn(3, 40)
    row_mask, scale = torch.tensor([True, False, True]), torch.ones(3).double()
    _, saved = engine.divergence(student, teacher, row_mask, options)
    gradient = engine.divergence_gradient(student, teacher, row_mask, options, saved, scale)
    assert (gradient[1] == 0).all()
    assert (gradient[[0, 2]] != 0).any()
