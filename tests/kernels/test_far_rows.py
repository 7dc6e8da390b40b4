"""Offsets beyond 2^31 entries: a row number times a stride, or times a vocabulary, is no 32-bit number."""

import pytest
import torch

from paritygate.losses import engines, spod
from paritygate.losses.buckets import DIVERGENCES, Options
from paritygate.losses.engines import cpp, float32
from tests.kernels.far_rows import far_apart
from tests.kernels.kernel_batches import batch
from tests.kernels.test_rows import needs_compiler

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALF
@pytest.mark.parametrize("engine", [pytest.param(cpp, marks=needs_compiler), float32], ids=["cpp", "float32"])
@pytest.mark.parametrize("lengths", [[[3]], [[1, 2]], [[1], [1], [1]]], ids=str)
def test_spod(lengths: list[list[int]], engine: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "choose", lambda *_: engine)
    data = batch(lengths, 130, dtype)
    for success in (False, True):
        data["success"][:] = success
        expected, gradient = spod.success_preserving_loss_and_grad(**data)
        far = {**data, **{side: far_apart(data[side]) for side in ("student_logits", "teacher_logits")}}
        result, out = spod.success_preserving_loss_and_grad(**far, out=far_apart(torch.zeros_like(gradient)))
        assert torch.equal(out, gradient)
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))
        leaf = far["student_logits"].requires_grad_()
        separate = spod.success_preserving_loss(**{**far, "student_logits": leaf})
        (once,) = torch.autograd.grad(separate.loss, leaf)
        assert torch.equal(once, gradient)


@needs_compiler
@HALF
@pytest.mark.parametrize("top_k", [None, 9])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_divergences(kind: str, top_k: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient's rows as well, which are beside each other in every buffer but this."""
    data = batch([[3]], 130, dtype)
    pair = data["student_logits"], data["teacher_logits"]
    mask, scale, options = torch.ones(3, dtype=torch.bool), torch.ones(3).double(), Options(kind, 0.3, top_k)
    answers = []
    for student, teacher in (pair, tuple(map(far_apart, pair))):
        values, saved = cpp.divergence(student, teacher, mask, options)
        if answers:
            monkeypatch.setattr(
                cpp.memory, "buffer", lambda shape, _, dtype: far_apart(torch.zeros(shape, dtype=dtype))
            )
        answers.append((values, cpp.divergence_gradient(student, teacher, mask, options, saved, scale)))
    (values, gradient), (far_values, far_gradient) = answers
    assert torch.equal(far_values, values)
    assert torch.equal(far_gradient, gradient)
