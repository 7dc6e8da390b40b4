"""Mistakes in the kernels' own source (tests/mutants/kernels.py): the comparison with the reference goes red."""

from pathlib import Path

import numpy as np
import pytest
import torch

from paritygate.losses import sdpo, spod
from paritygate_reference import sdpo as reference
from tests.kernels.kernel_batches import batch
from tests.kernels.test_divergence import both, logits
from tests.kernels.test_rows import holds, needs_compiler
from tests.mutants import kernels

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def library() -> bytes:
    """One library with every mistake."""
    return kernels.switched_library()


def spod_holds() -> None:
    """Every branch of the gate, both sides of the floor, nearly equal and equal rows, entries of -inf."""
    for sure, noise in ((0.0, 2.0), (6.0, 2.0), (30.0, 2.0), (2.0, 1e-3)):
        data = batch([[1, 3], [9, 2], [2, 1], [17]], 67, torch.float32, sure=sure, noise=noise)
        if noise > 1:
            data["actions"].clamp_(max=40)
            data["student_logits"][:, 60:] = data["teacher_logits"][:, 50:] = -torch.inf
        result, gradient = spod.success_preserving_loss_and_grad(**data, tau0=0.4, floor_weight=0.7)
        holds(data, result, gradient, tau0=0.4, floor_weight=0.7)
        data["teacher_logits"], data["success"][:] = data["student_logits"].clone(), True
        result, gradient = spod.success_preserving_loss_and_grad(**data)
        assert not result.gate.any()
        assert (gradient == 0).all()
    index = torch.zeros(2, dtype=torch.int64)
    for x in (1e-12, -1e-12):  # beside a row of -100,000 nats, where a total has an ulp of 1e-11
        student = torch.tensor([[-1e5, 0.0], [0.0, 0.0]])
        teacher = torch.tensor([[-1e5, 0.0], [-x, 0.0]])
        success = torch.ones(1, dtype=torch.bool)
        _, gradient = spod.success_preserving_loss_and_grad(student, teacher, index, index, index[:1], success)
        assert (float(gradient[1, 0]) < -0.1) == (x > 0)  # the floor's -1/4, else the KL's 1e-13


def divergences_hold(ks: tuple[int | None, ...]) -> None:
    """Each divergence against the reference, with ties; a top k whose tail is under the cap."""
    for kind, k in ((kind, k) for kind in sdpo.DIVERGENCES for k in ks):
        student, teacher, mask = logits(67, torch.float32)
        student, teacher = student.round(), teacher - student.round()
        student[0, 0, :3] += 60
        options = {"divergence": kind, "mixture": 0.3, "top_k": k}
        arrays = (student.double().numpy(), teacher.double().numpy(), mask.numpy())
        loss, gradient = both(student, teacher, mask, kind, 0.3, top_k=k)
        slope = reference.logit_loss_grad(*arrays, **options)
        assert float(loss) == pytest.approx(reference.logit_loss(*arrays, **options), rel=1e-6, abs=1e-12)
        assert np.abs(gradient.double().numpy() - slope).max() <= 3e-7 * np.abs(slope).max() + 1e-14
    student, teacher = (torch.tensor([[[-1e30, -1, 0], [-1e30, -1, -1]]]) for _ in range(2))
    teacher[0, :, 0], teacher[0, :, 2] = 1e30, teacher[0, :, 2] + 1
    for k in {None if k is None else 2 for k in ks}:  # -1 and 0 count beside 1e30, and beside each other
        options = {"top_k": k, "divergence": "reverse_kl", "aggregation": "token_sum"}
        slope = reference.logit_loss_grad(*(x.double().numpy() for x in (student, teacher)), np.ones((1, 2)), **options)
        got = sdpo.logit_loss_grad(student, teacher, torch.ones(1, 2), **options).double().numpy()
        assert np.abs(slope).max() > 0.1
        assert np.abs(got - slope).max() <= 1e-6


COMPARISONS = {
    "spod.cpp": spod_holds,
    "rows.hpp": spod_holds,
    "divergence.cpp": lambda: divergences_hold((None,)),
    "truncated.cpp": lambda: divergences_hold((1, 3, 20)),
}


def test_the_comparisons_are_green_without_a_mistake(library: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.use(library, 0, monkeypatch)
    for comparison in COMPARISONS.values():
        comparison()


@pytest.mark.parametrize("number", range(len(kernels.MUTANTS)), ids=lambda number: kernels.MUTANTS[number].name)
def test_the_comparison_goes_red(number: int, library: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.use(library, number + 1, monkeypatch)
    with pytest.raises(AssertionError):
        COMPARISONS[Path(kernels.MUTANTS[number].file).name]()
