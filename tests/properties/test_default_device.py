"""torch's default device, whatever a program has set it to, moves nothing: results lie where their inputs lie."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paritygate
from paritygate.losses import averaging, engines, policy_gradient, sdpo, spod

IMPL = Path(paritygate.__file__).parent
FACTORIES = {"empty", "zeros", "ones", "full", "arange", "tensor", "linspace", "eye", "rand", "randn", "randint"}
FILES = [*(IMPL / "losses").rglob("*.py"), IMPL / "server/model/products.py"]


def batch(dtype: torch.dtype) -> dict[str, Tensor]:
    """Three actions in two episodes: protected under the floor, not protected, of an episode that failed."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(6, 300, generator=generator)
    return {
        "student_logits": student.to(dtype),
        "teacher_logits": (student + torch.randn(6, 300, generator=generator)).to(dtype),
        "actions": torch.tensor([1, 2, 3, 4, 5, 6]),
        "action_index": torch.tensor([0, 0, 1, 1, 2, 2]),
        "episode_index": torch.tensor([0, 0, 1]),
        "success": torch.tensor([True, False]),
    }


def packed(dtype: torch.dtype) -> list[Tensor]:
    data = batch(dtype)
    leaf = data["student_logits"].requires_grad_()
    result = spod.success_preserving_loss(**data)
    return [*(x.detach() for x in result), *torch.autograd.grad(result.loss, leaf)]


def packed_and_grad(dtype: torch.dtype) -> list[Tensor]:
    result, gradient = spod.success_preserving_loss_and_grad(**batch(dtype))
    return [*result, gradient]


def fused(dtype: torch.dtype) -> list[Tensor]:
    data = batch(dtype)
    student, teacher = (data.pop(f"{side}_logits")[:, :40].contiguous() for side in ("student", "teacher"))
    head = torch.arange(300 * 40, device="cpu").view(300, 40).sin().to(dtype)
    leaf = student.requires_grad_()
    heads = {"student_head": head, "teacher_hidden": teacher, "teacher_head": head.flip(0)}
    result = spod.fused_linear_success_preserving_loss(leaf, **heads, **data, chunk_tokens=2)
    return [*(x.detach() for x in result), *torch.autograd.grad(result.loss, leaf)]


def logit(dtype: torch.dtype, **options: Any) -> list[Tensor]:
    data = batch(dtype)
    logits = [data[f"{side}_logits"].view(2, 3, 300) for side in ("student", "teacher")]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device="cpu")
    return [sdpo.logit_loss(*logits, mask, **options), sdpo.logit_loss_grad(*logits, mask, **options)]


def by_weights(dtype: torch.dtype) -> list[Tensor]:
    data = batch(dtype)
    p, q = (data[f"{side}_logits"].double().log_softmax(-1)[:, :5] for side in ("student", "teacher"))
    levels = (data["action_index"], data["episode_index"])
    weights = spod.success_preserving_weights(p, q, p[:, 0], q[:, 0], *levels, data["success"])
    policy = policy_gradient.importance_sampling_loss(p[:, 0], q[:, 0], p[:, 1])
    return [*weights, averaging.three_level_mean(p[:, 0], *levels), policy, *sdpo.cross_entropy_weights(p, q)]


CALLS: dict[str, Callable[[torch.dtype], list[Tensor]]] = {
    "packed": packed,
    "packed_and_grad": packed_and_grad,
    "fused": fused,
    "reverse_kl": logit,
    "jsd": lambda dtype: logit(dtype, divergence="jsd"),
    "top_k": lambda dtype: logit(dtype, top_k=7),
    "weights": by_weights,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("engine", ["as it is", "without a compiler"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_another_default_device_changes_no_bit(
    dtype: torch.dtype, engine: str, call: Callable[[torch.dtype], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for any other device: a tensor made there without a thought has no memory to read."""
    if engine == "without a compiler":
        monkeypatch.setattr(engines.cpp, "serves", lambda *_: False)
    with torch.device("cpu"):
        expected = call(dtype)
    make = batch(dtype)
    monkeypatch.setitem(globals(), "batch", lambda _: {k: v.detach().clone() for k, v in make.items()})
    with torch.device("meta"):
        actual = call(dtype)
    assert [x.device.type for x in actual] == ["cpu"] * len(expected)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(IMPL).as_posix())
def test_a_tensor_that_is_made_says_where(path: Path) -> None:
    silent = [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not silent, f"made on torch's default device: {', '.join(silent)}"
