"""LoRA adapters: what is adapted, how it starts, and what a frozen copy for sampling is.

Our own small implementation over the linear layers of a transformers model: several adapters are alive at once and
one packed batch holds rows of different ones, which no wrapper of a whole model can do. See design/031.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from paritygate.server.model.products import FrozenLinear, linear, linear_back

# alpha = 32 is what SkyRL's Tinker backend uses; the hosted service's value is not published.
ALPHA = 32.0


@dataclass(frozen=True)
class LoraSpec:
    """Rank, seed and which layers learn; `scale` is alpha / rank."""

    rank: int
    seed: int
    attn: bool = True
    mlp: bool = True
    unembed: bool = True

    @property
    def scale(self) -> float:
        return ALPHA / self.rank

    def covers(self, kind: str) -> bool:
        """Whether layers of `kind` ("attn", "mlp" or "unembed") are adapted."""
        return {"attn": self.attn, "mlp": self.mlp, "unembed": self.unembed}[kind]


@dataclass(frozen=True)
class Target:
    """One adapted linear layer: its name in the model, "attn", "mlp" or "unembed", and its two sizes."""

    name: str
    kind: str
    inputs: int
    outputs: int


class Weights(Protocol):
    """A set of low-rank pairs, training or frozen: `delta(name, x)` is scale * (x A^T) B^T, None where nothing is."""

    def delta(self, name: str, rows: Tensor) -> Tensor | None: ...


class Adapter:
    """The trainable state of one model: fp32 A and B of every target, their gradients and Adam's moments."""

    def __init__(self, spec: LoraSpec, targets: list[Target]) -> None:
        self.spec = spec
        self.a: dict[str, Tensor] = {}
        self.b: dict[str, Tensor] = {}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps = 0
        for target in targets:
            if spec.covers(target.kind):
                self.a[target.name] = _initial_a(spec, target).requires_grad_()
                self.b[target.name] = torch.zeros(target.outputs, spec.rank).requires_grad_()

    def delta(self, name: str, rows: Tensor) -> Tensor | None:
        """(..., T, in) -> (..., T, out), differentiable."""
        a = self.a.get(name)
        if a is None:
            return None
        delta = linear(linear(rows, a), self.b[name])
        return delta if self.spec.scale == 1 else delta * self.spec.scale  # a product with 1 costs what a sum does

    def gradients(self, name: str, rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Of `delta`, from `grad` (T, out): to the rows (T, in), A (r, in) and B (out, r)."""
        a = self.a.get(name)
        if a is None:
            return None
        into_low, into_b = linear_back(linear(rows, a), self.b[name], grad)
        into_rows, into_a = linear_back(rows, a, into_low * self.spec.scale)
        return into_rows, into_a, into_b * self.spec.scale

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter as (name, tensor), in one fixed order."""
        for name in sorted(self.a):
            yield f"{name}.lora_A", self.a[name]
            yield f"{name}.lora_B", self.b[name]

    def bytes(self) -> int:
        """Memory of parameters, gradients and moments."""
        return sum(p.numel() for _, p in self.parameters()) * 4 * 4

    def freeze(self, version: str) -> "Snapshot":
        """A copy that training cannot reach."""

        def frozen(parameter: Tensor) -> FrozenLinear:
            return FrozenLinear(parameter.detach().clone())

        pairs = {name: (frozen(a), frozen(self.b[name]), self.spec.scale) for name, a in self.a.items()}
        return Snapshot(version, pairs)


Pair = tuple[FrozenLinear, FrozenLinear, float]  # A (r, in), B (out, r), scale


@dataclass(frozen=True)
class Snapshot:
    """Weights that never change: `version` names them in the prefix cache ("" is the base model)."""

    version: str
    pairs: "dict[str, Pair]" = field(default_factory=dict[str, "Pair"])
    table: list[object] = field(default_factory=list[object], repr=False, compare=False)  # kept by `layers.Layers`

    def delta(self, name: str, rows: Tensor) -> Tensor | None:
        """(..., T, in) -> (..., T, out)."""
        pair = self.pairs.get(name)
        if pair is None:
            return None
        a, b, scale = pair
        return b(a(rows)) * scale

    def bytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b, _ in self.pairs.values())


BASE = Snapshot("")


class LoraLinear(nn.Module):
    """A linear layer that adds to each range of packed rows the low-rank product of that range's weights."""

    def __init__(self, base: nn.Linear, name: str, routes: "Routes") -> None:
        super().__init__()
        self.base = FrozenLinear(base.weight, base.bias)
        self.name = name
        self.routes = routes

    def forward(self, rows: Tensor) -> Tensor:
        return apply_linear(rows, self.base, self.name, self.routes.ranges)


@dataclass
class Routes:
    """Which rows of the packed batch in flight belong to which weights: (start, end, weights)."""

    ranges: list[tuple[int, int, Weights]] = field(default_factory=list[tuple[int, int, Weights]])


def apply_linear(rows: Tensor, base: FrozenLinear, name: str, ranges: list[tuple[int, int, Weights]]) -> Tensor:
    """(..., T, in) -> (..., T, out): the base product, plus scale * (x A^T) B^T on each range of rows."""
    out = base(rows)
    for start, end, weights in ranges:
        whole = end - start == rows.shape[-2]
        delta = weights.delta(name, rows if whole else rows[..., start:end, :])
        if delta is None:
            continue
        if whole:
            out = out + delta
        else:
            out[..., start:end, :] += delta
    return out


def _initial_a(spec: LoraSpec, target: Target) -> Tensor:
    """Uniform within 1/sqrt(in), torch's own start of a linear layer; B is zero, so nothing changes at first.

    Each target has its own generator, seeded by the adapter's seed and the target's name: leaving layers out does
    not move the others.
    """
    digest = hashlib.sha256(f"{spec.seed}:{target.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(target.inputs)
    return (torch.rand(spec.rank, target.inputs, generator=generator) * 2 - 1) * bound
