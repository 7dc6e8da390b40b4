"""RMSNorm and the gate of an MLP by one kernel each: right, a row's bits its own, and only where they are the same."""

import pytest
import torch
from torch import nn

from paritygate.server.model import fused
from paritygate.server.model.lora import LoraLinear, Routes
from paritygate.server.model.products import available, use_threads

pytestmark = pytest.mark.skipif(not available(), reason="no compiler here, or PARITYGATE_KERNELS=off")


class RMSNorm(nn.Module):
    def __init__(self, size: int, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.5)
        self.variance_epsilon = 1e-5
        self.offset = offset

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * (rows * scale)


class MLP(nn.Module):
    def __init__(self, size: int, act_fn: nn.Module) -> None:
        super().__init__()
        for name, sizes in (("gate", (size, 3 * size)), ("up", (size, 3 * size)), ("down", (3 * size, size))):
            setattr(self, f"{name}_proj", LoraLinear(nn.Linear(*sizes, bias=False), name, Routes()))
        self.act_fn = act_fn

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))


@pytest.mark.parametrize(("make", "taken"), [
    (lambda: RMSNorm(64), True),
    (lambda: RMSNorm(64, offset=1.0), False),
    (lambda: RMSNorm(30), False),
    (lambda: MLP(32, nn.SiLU()), True),
    (lambda: MLP(32, nn.GELU()), False),
])  # fmt: skip
def test_modules_are_replaced_where_the_kernel_gives_the_same(make: object, taken: bool) -> None:
    assert callable(make)
    module = make()
    fused.fuse(nn.ModuleList([module]))
    assert ("forward" in vars(module)) == taken


def both(rows: torch.Tensor, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's rows, and what its gradient is along the cosine of their indices."""
    leaf = rows.clone().requires_grad_()
    out = module(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, torch.arange(out.numel(), dtype=out.dtype).cos().view_as(out))
    return out.detach(), gradient


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_a_norm_is_right_forwards_and_backwards_and_keeps_a_rows_bits(scale: float) -> None:
    rows, module = torch.randn(2, 700, 192, generator=torch.Generator().manual_seed(0)) * scale, RMSNorm(192)
    want = both(rows.double(), RMSNorm(192).double())
    fused.fuse(nn.ModuleList([module]))
    got = both(rows, module)
    for ours, right in zip(got, want, strict=True):
        assert float((ours - right).abs().max()) <= 1e-6 * float(right.abs().max())
    assert torch.equal(module(rows[1, 5:8]), got[0][1, 5:8])
    assert torch.equal(module(rows.transpose(0, 1)).transpose(0, 1), got[0])
    use_threads(3, torch.float32)
    assert torch.equal(module(rows), got[0])
    use_threads(1, torch.float32)


def test_a_gate_is_right_forwards_and_backwards_and_keeps_a_rows_bits() -> None:
    """Far out it is 0 or the number itself; an odd count ends in a part of a vector."""
    gate = torch.cat([torch.randn(70000, generator=torch.Generator().manual_seed(0)) * 4, torch.tensor([-1e4, 1e4, 0])])
    up = gate.flip(0) / 3
    leaves, exact = ([x.to(dtype).requires_grad_() for x in (gate, up)] for dtype in (torch.float32, torch.float64))
    out, want = fused._Gate.apply(*leaves), nn.functional.silu(exact[0]) * exact[1]
    assert torch.allclose(out.double(), want, rtol=1e-6, atol=1e-30)
    for ours, right in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), exact), strict=True):
        assert torch.allclose(ours.double(), right, rtol=1e-5, atol=1e-5)
    assert torch.equal(fused._Gate.apply(gate[3:20], up[3:20]), out[3:20])
    use_threads(3, torch.float32)
    assert torch.equal(fused._Gate.apply(gate, up), out)
    use_threads(1, torch.float32)
    assert bool(torch.isnan(fused._Gate.apply(torch.tensor([float("nan")]), torch.ones(1))))
