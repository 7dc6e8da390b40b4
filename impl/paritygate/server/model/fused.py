"""What transformers computes between linear layers in many small steps, each in one: RMSNorm and the gate of an MLP.

A row's bits depend on the row alone. Modules are replaced only where the kernel gives what they give (`fuse`).
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor, nn

from paritygate.server.model.lora import LoraLinear
from paritygate.server.model.products import available, library, threads


def fuse(body: nn.Module) -> None:
    """Let the kernels compute every RMSNorm and every MLP gated by SiLU of `body`, where they agree to 1e-5."""
    if not available():
        return
    module: Any
    for module in body.modules():
        weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and isinstance(epsilon, float):
            norm = functools.partial(_norm, weight=weight.detach().float().contiguous(), epsilon=epsilon)
            if weight.shape[0] % library().width() == 0 and _agree(module, norm, weight.shape[0]):
                module.forward = norm
        elif all(isinstance(getattr(module, f"{name}_proj", None), LoraLinear) for name in ("gate", "up", "down")):
            mlp = functools.partial(_mlp, module)
            gate: Any = module.gate_proj
            if _agree(module, mlp, gate.base.inputs):
                module.forward = mlp


def _agree(module: nn.Module, ours: Any, size: int) -> bool:
    rows = torch.randn(1, 3, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, got = (f(rows) for f in (module, ours))
    return got.dtype == want.dtype and bool(torch.allclose(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max())))


def _norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """(..., D), (D,) -> (..., D), differentiable in the rows."""
    return _Norm.apply(rows, weight, epsilon)


def _mlp(module: Any, rows: Tensor) -> Tensor:
    return module.down_proj(_Gate.apply(module.gate_proj(rows), module.up_proj(rows)))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = rows.float().contiguous()
        ctx.save_for_backward(rows, weight)
        ctx.epsilon = epsilon
        out, columns = torch.empty_like(rows), rows.shape[-1]
        sizes = (ctypes.c_int64(rows.numel() // columns), ctypes.c_int64(columns))
        library().normalize_rms(
            *_pointers(rows, weight), *sizes, ctypes.c_double(epsilon), ctypes.c_int64(threads()), *_pointers(out)
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        rows, weight = ctx.saved_tensors
        grad, out = grads[0].float().contiguous(), torch.empty_like(rows)
        sizes = (ctypes.c_int64(rows.numel() // rows.shape[-1]), ctypes.c_int64(rows.shape[-1]))
        library().normalize_rms_back(
            *_pointers(rows, weight, grad), *sizes, ctypes.c_double(ctx.epsilon), ctypes.c_int64(threads()),
            ctypes.c_int64(0), *_pointers(out),
        )  # fmt: skip
        return out, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        library().gate_silu(
            *_pointers(gate, up), ctypes.c_int64(gate.numel()), ctypes.c_int64(threads()), *_pointers(out)
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        product = grads[0].float().contiguous().clone()
        into_gate, into_up = torch.empty_like(gate), torch.empty_like(up)
        library().gate_silu_back(
            *_pointers(gate, up, product), ctypes.c_int64(gate.numel()), ctypes.c_int64(threads()),
            *_pointers(into_gate, into_up),
        )  # fmt: skip
        return into_gate, into_up


def _pointers(*tensors: Tensor) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
