"""The loss inside torch.compile, without validation, and, where there is a CUDA device, the same rows on it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paritygate
from paritygate.losses import sdpo, spod
from paritygate.losses.spod import row_ops
from tests.counts import SOAK
from tests.kernels.kernel_batches import batch
from tests.kernels.test_rows import HALF_ULP, RAGGED, holds

DTYPES = pytest.mark.parametrize("dtype", HALF_ULP, ids=str)


def traced(backend: str) -> Any:
    """Loss and gradient as one graph without a break: no value is read back, or dynamo would refuse."""

    def step(student: Tensor, rest: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        result = spod.success_preserving_loss(student, **rest, validate=False)
        return result.loss, result.gate

    return torch.compile(step, backend=backend, fullgraph=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # dynamo's own, as it looks into autograd.Function
@DTYPES
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_the_same_bits(dtype: torch.dtype, backend: str) -> None:
    torch._dynamo.reset()
    data = batch(RAGGED, 130, dtype, sure=4.0)
    student = data.pop("student_logits")
    expected = spod.success_preserving_loss(student, **data)
    gradient = spod.success_preserving_loss_and_grad(student, **data)[1]
    leaf = student.clone().requires_grad_()
    loss, gate = traced(backend)(leaf, data)
    loss.backward()
    assert torch.equal(loss.detach(), expected.loss)
    assert torch.equal(gate, expected.gate)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_operators_without_data_have_the_shapes_of_those_with(dtype: torch.dtype) -> None:
    """What torch.compile plans with; backends that run the operator itself do not notice a mistake in it."""
    student, teacher = torch.zeros(6, 4, dtype=dtype), torch.ones(6, 4, dtype=dtype)
    actions, weights = torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.float64)
    row_stats = row_ops.statistics(student, teacher, actions)
    for operator, given in (
        (row_ops.statistics_operator, (student, teacher, actions)),
        (row_ops.gradient_operator, (student, teacher, actions, row_stats, weights, weights)),
    ):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.skipif(not SOAK, reason="inductor compiles for a minute")
@pytest.mark.parametrize("top_k", [None, 7])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_inductor_the_same_loss_and_gradient(kind: str, top_k: int | None) -> None:
    """SPOD and the divergences amid operations that inductor fuses: one graph, the same bits for SPOD."""
    torch._dynamo.reset()
    data = batch(RAGGED, 130, torch.float32, sure=4.0)
    student, teacher, mask = data.pop("student_logits"), data["teacher_logits"], torch.ones(len(data["actions"]))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = 1.5 * x + 0.25
        options = {"divergence": kind, "top_k": top_k, "validate": False}
        return (
            spod.success_preserving_loss(logits, **data, validate=False).loss,
            sdpo.logit_loss(logits[None], teacher[None], mask[None], **options),
        )

    results = []
    for run in (step, torch.compile(step, backend="inductor", fullgraph=True)):
        leaf = student.clone().requires_grad_()
        losses = run(leaf)
        sum(losses).backward()
        assert leaf.grad is not None
        results.append((*(x.detach() for x in losses), leaf.grad))
    (packed, other, slope), (packed_again, other_again, slope_again) = results
    assert torch.equal(packed, packed_again)
    assert torch.allclose(other, other_again, rtol=1e-6, atol=0)
    assert (slope - slope_again).abs().max() <= 3e-7 * slope.abs().max()


def moved(data: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in data.items()}


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 3, 127, 4096, 4097, 20011])
@pytest.mark.parametrize("noise", [1e-3, 2.0])
def test_rows_on_the_device(vocabulary: int, noise: float, dtype: torch.dtype, device: str) -> None:
    """Against the reference: ragged actions, protected and not, fresh and in place, the same bits every time."""
    data = batch(RAGGED, vocabulary, dtype, noise=noise, sure=5.0)
    there = moved(data, device)
    result, gradient = spod.success_preserving_loss_and_grad(**there)
    holds(data, type(result)(*(x.cpu() for x in result)), gradient.cpu())
    for _ in range(3):
        in_place = there["student_logits"].clone()
        spod.success_preserving_loss_and_grad(**{**there, "student_logits": in_place}, out=in_place)
        assert torch.equal(in_place, gradient)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize(("k", "tail"), [(None, True), (1, True), (100, True), (100, False), (3000, True)])
def test_divergences_on_the_device(k: int | None, tail: bool, kind: str, dtype: torch.dtype, device: str) -> None:
    """Against the same loss of float64 logits on the CPU, with ties."""
    torch.manual_seed(0)
    student, teacher = ((torch.randn(2, 4, 3000) * 8).round().div(4).to(dtype) for _ in range(2))
    mask = torch.ones(2, 4, dtype=torch.bool)
    options = {"divergence": kind, "top_k": k, "tail": tail}
    exact = sdpo.logit_loss(student.double(), teacher.double(), mask, **options)
    slope = sdpo.logit_loss_grad(student.double(), teacher.double(), mask, **options)
    there = (student.to(device), teacher.to(device), mask.to(device))
    assert float(sdpo.logit_loss(*there, **options)) == pytest.approx(float(exact), rel=1e-6, abs=1e-12)
    gradient = sdpo.logit_loss_grad(*there, **options).cpu().double()
    assert (gradient - slope).abs().max() <= HALF_ULP[dtype] * slope.abs().max() + 2.0**-25


@pytest.mark.gpu
def test_without_validation_nothing_waits_for_the_device(device: str) -> None:
    there = moved(batch(RAGGED, 5000, torch.bfloat16), device)
    leaf = there.pop("student_logits").requires_grad_()
    spod.success_preserving_loss(leaf, **there, validate=False).loss.backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = spod.success_preserving_loss(leaf, **there, validate=False).loss
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_no_second_buffer_of_the_logits(device: str) -> None:
    there = moved(batch([[64]] * 4, 50000, torch.bfloat16), device)
    in_place = there["student_logits"]
    spod.success_preserving_loss_and_grad(**there, out=in_place)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    spod.success_preserving_loss_and_grad(**there, out=in_place, validate=False)
    assert torch.cuda.max_memory_allocated(device) - held <= 0.05 * in_place.numel() * in_place.element_size()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_on_the_device(dtype: torch.dtype, device: str) -> None:
    there = moved(batch(RAGGED, 777, dtype), device)
    torch.manual_seed(3)
    hidden, head, of_teacher, teacher = (
        torch.randn(n, 64, device=device).to(dtype) * 0.4 for n in (len(there["actions"]), 777) * 2
    )
    rest = {name: there[name] for name in ("actions", "action_index", "episode_index", "success")}
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    fused = spod.fused_linear_success_preserving_loss(*leaves, of_teacher, teacher, **rest, chunk_tokens=16)
    whole = spod.success_preserving_loss((hidden @ head.t()).detach(), of_teacher @ teacher.t(), **rest)
    fused.loss.backward()
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert float(fused.loss.detach()) == pytest.approx(float(whole.loss), rel=limit)
    assert torch.isfinite(leaves[1].grad).all()


def test_what_is_asked_of_a_device_holds_on_the_cpu() -> None:
    """One case of each test above that needs a device but no call of CUDA's: what it checks can be met."""
    test_rows_on_the_device(127, 2.0, torch.float32, "cpu")
    test_divergences_on_the_device(100, True, "jsd", torch.float32, "cpu")
    test_fused_on_the_device(torch.float32, "cpu")


def test_a_plain_call_imports_no_compiler_of_torch() -> None:
    """torch._dynamo takes seconds to import; nothing but torch.compile needs it."""
    program = """
import sys; sys.path.insert(0, sys.argv[1])
import torch
from paritygate.losses import sdpo, spod
for dtype in (torch.float64, torch.float32):
    x = torch.eye(2, 5, dtype=dtype).requires_grad_()
    i, e, s = torch.tensor([0, 0]), torch.tensor([0]), torch.tensor([True])
    loss = spod.success_preserving_loss(x, x.detach() * 2, i, i, e, s).loss + sdpo.logit_loss(x, x * 3, i == 0)
    torch.autograd.grad(loss, x)
    spod.success_preserving_loss_and_grad(x, x.detach() * 2, i, i, e, s)
    spod.fused_linear_success_preserving_loss(x, x.detach(), x, x.detach(), i, i, e, s).loss.backward()
print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))))
"""
    command = [sys.executable, "-c", program, str(Path(paritygate.__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"
