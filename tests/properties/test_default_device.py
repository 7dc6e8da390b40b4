"""torch's default device and dtype, whatever a program has set, move nothing: results are where and what inputs are."""

import ast
import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paritygate
from paritygate.losses import averaging, engines, grpo, kl_estimators, policy_gradient, sdpo, spod

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
    head = torch.arange(300 * 40, device="cpu").view(300, 40).float().sin().to(dtype)
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
    advantage = grpo.group_mean_advantage(p.detach())
    kl = kl_estimators.k3(p[:, 0], q[:, 0])
    mean = averaging.three_level_mean(p[:, 0], *levels)
    return [*weights, mean, policy, advantage, kl, *sdpo.cross_entropy_weights(p, q)]


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
def test_another_default_device_or_dtype_changes_no_bit(
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
        actual = [call(dtype)]
    for other in (torch.float16, torch.float64):
        with default_dtype(other):
            actual.append(call(dtype))
    for results in actual:
        assert [x.device.type for x in results] == ["cpu"] * len(expected)
        assert [x.dtype for x in results] == [x.dtype for x in expected]
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(IMPL).as_posix())
def test_a_tensor_that_is_made_says_where_and_of_what(path: Path) -> None:
    """Its device and dtype; `torch.where` of two numbers makes one of the defaults'."""
    silent = [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and (
            (node.func.attr in FACTORIES and not {"device", "dtype"} <= {keyword.arg for keyword in node.keywords})
            or (node.func.attr == "where" and not any(map(may_be_tensor, node.args[1:])))
        )
    ]
    assert not silent, f"made on torch's default device, or of its default dtype: {', '.join(silent)}"


def may_be_tensor(argument: ast.expr) -> bool:
    """Whether an argument is no number by the look of it."""
    number = argument.operand if isinstance(argument, ast.UnaryOp) else argument
    return not isinstance(number, ast.Constant)
