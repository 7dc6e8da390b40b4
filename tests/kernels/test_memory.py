"""Memory of gradients that died serves again, and only then."""

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from paritygate.losses import sdpo, spod
from paritygate.losses.engines import memory
from tests.kernels.kernel_batches import batch
from tests.kernels.test_fused import heads
from tests.kernels.test_rows import needs_compiler


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_kept", [])


def pages_at(pages: mmap.mmap) -> int:
    """Where they are."""
    return torch.frombuffer(pages, dtype=torch.uint8).data_ptr()


def of_head(scale: float = 1.0) -> list[Tensor]:
    """The fused loss's gradients: its tiles and the head's gradient lie in such memory."""
    student, teacher, rest = heads(torch.float32)
    leaves = [(torch.nn.functional.pad(x, (0, 1 << 12)) * scale).requires_grad_() for x in student]
    spod.fused_linear_success_preserving_loss(*leaves, *teacher, **rest, chunk_tokens=8).loss.backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None][::-1]


def of_logits(scale: float = 1.0) -> list[Tensor]:
    """SPOD's gradient of logits, through autograd."""
    data = batch([[1, 3, 2], [4]], 3001, torch.float32)
    leaf = (data["student_logits"] * scale).requires_grad_()
    spod.success_preserving_loss(**{**data, "student_logits": leaf}).loss.backward()
    assert leaf.grad is not None
    return [leaf.grad]


def of_rows(scale: float = 1.0) -> list[Tensor]:
    """The same, without autograd."""
    data = batch([[1, 3, 2], [4]], 3001, torch.float32)
    data["student_logits"] *= scale
    return [spod.success_preserving_loss_and_grad(**data)[1]]


def of_divergence(scale: float = 1.0) -> list[Tensor]:
    """SDPO's gradient of logits."""
    data = batch([[1, 3, 2], [4]], 3001, torch.float32)
    mask = torch.ones(1, len(data["actions"]), dtype=torch.bool)
    return [sdpo.logit_loss_grad(data["student_logits"][None] * scale, data["teacher_logits"][None], mask)]


@pytest.mark.parametrize("gradients", [of_head, of_logits, of_rows, pytest.param(of_divergence, marks=needs_compiler)])
def test_memory_is_used_again_only_when_nobody_has_it(gradients: Callable[..., list[Tensor]]) -> None:
    """Gradients that are kept stay what they were; freed, their memory serves again; four threads get the same bits."""
    first = gradients()
    copies = [x.clone() for x in first]
    place = first[0].data_ptr()
    view, others = first[0].view(-1).numpy()[3:], gradients(0.5)
    assert others[0].data_ptr() != place
    assert not torch.equal(others[0], copies[0])
    assert all(torch.equal(a, b) for a, b in zip(first, copies, strict=True))
    del first  # the view still lies there
    assert gradients()[0].data_ptr() != place
    assert (view == copies[0].view(-1).numpy()[3:]).all()
    del view, others
    again = gradients()
    assert again[0].data_ptr() in {pages_at(x) for x in memory._kept}
    assert all(torch.equal(a, b) for a, b in zip(again, copies, strict=True))
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(lambda _: gradients(), range(12)):
            assert all(torch.equal(a, b) for a, b in zip(actual, copies, strict=True))
    del again, actual
    gradients()
    assert len(memory._kept) <= memory.KEPT, "the memory of one evaluation, however many there were"


def test_a_freed_gradient_is_the_next_ones_memory() -> None:
    place = of_logits()[0].data_ptr()
    assert [of_logits()[0].data_ptr() for _ in range(3)] == [place] * 3


def test_a_graph_that_is_kept_holds_its_gradient() -> None:
    """What a product with our gradient saved for its own backward is not written over."""
    (gradient,) = of_logits()
    right, place = gradient.sum(0), gradient.data_ptr()
    factor = torch.ones(gradient.shape[1], requires_grad=True)
    product = (gradient * factor).sum()
    del gradient
    assert of_logits(0.5)[0].data_ptr() != place
    product.backward()
    assert factor.grad is not None
    assert torch.equal(factor.grad, right)


def test_what_is_kept_is_of_the_size_that_is_asked_for() -> None:
    like = torch.empty(0)

    def place(rows: int) -> int:
        return memory.buffer(torch.Size([rows, 4096]), like, torch.float32).data_ptr()

    held = memory.buffer(torch.Size([9, 4096]), like, torch.float32)
    first = place(16)
    assert place(8) == first, "half of it is enough"
    assert place(7) != first
    assert len(memory._kept) == 2, "what is held, and the last"
    assert held.data_ptr() in {pages_at(x) for x in memory._kept}


def test_large_memory_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGEST", 1 << 16)
    kept = list(memory._kept)
    assert memory.buffer(torch.Size([1 << 15]), torch.empty(0), torch.float32).shape == (1 << 15,)
    assert memory._kept == kept
