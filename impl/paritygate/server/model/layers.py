"""Every layer of a Llama or a Qwen3 in one call of the kernels, where that gives the bits of transformers' modules.

Between the products of a decode step Python and torch take as long as the products of a few rows do. A training pass is
one call forward and one back.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from paritygate.losses.engines.memory import buffer
from paritygate.server.model import products
from paritygate.server.model.attention import CachedAttention, PlainAttention
from paritygate.server.model.lora import Adapter, LoraLinear, Snapshot, Weights
from paritygate.server.model.products import Panels

_PROJECTIONS = {"self_attn": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}  # in the order of layers.hpp
_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class Layers:
    """The layers of `body` as layers.hpp takes them; `of` makes one, or None where a part of them is something else."""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.names: list[tuple[str, ...]] = []
        self._kept: list[Tensor] = []
        table = [self._layer(layer) for layer in body.layers]
        self._table = (_Layer * len(table))(*table)
        attention, first = body.layers[0].self_attn, table[0]
        self.dim = int(attention.head_dim)
        hidden, wide, narrow, inner = (first.weights[i].outputs for i in (3, 0, 1, 4))
        self._sizes = (hidden, wide // self.dim, narrow // self.dim, self.dim, inner)

    @classmethod
    def of(cls, body: nn.Module, dtype: torch.dtype) -> "Layers | None":
        """None where rows have to go through the modules."""
        if not products.serves(dtype) or products.dots(dtype):
            return None
        try:
            return cls(body)
        except (AttributeError, KeyError, TypeError, _Other):
            return None

    def forward(
        self, rows: Tensor, positions: Tensor, ranges: list[tuple[int, int, Weights]], attention: Any
    ) -> Tensor:
        """(T, hidden) embedded rows -> those of `attention.rows_read`, before the last norm."""
        rows = rows.float().contiguous().clone()
        turned = self._turned(positions)
        pairs = [(start, end, self._pairs(weights)) for start, end, weights in ranges]
        table = (_Range * len(pairs))(*((s, e, None if p is None else ctypes.addressof(p)) for s, e, p in pairs))
        passed = self.described(rows, turned, table, attention.table, attention.tails)
        products.library().layers(ctypes.byref(passed))
        return rows[: len(attention.rows_read)]

    def takes(self, attention: Any, ranges: list[tuple[int, int, Weights]]) -> bool:
        """Whether a pass with these is one of sampling, whose rows are all in spans and whose weights never change."""
        return isinstance(attention, CachedAttention) and all(isinstance(weights, Snapshot) for _, _, weights in ranges)

    def trains(self, attention: Any, ranges: list[tuple[int, int, Weights]], rows: int) -> bool:
        """Whether a pass with these is one of training, whose rows all go through the same adapter."""
        whole = len(ranges) == 1 and ranges[0][:2] == (0, rows) and isinstance(ranges[0][2], Adapter)
        return whole and isinstance(attention, PlainAttention)

    def train(
        self, rows: Tensor, positions: Tensor, adapter: Adapter, attention: PlainAttention, *, recompute: bool
    ) -> Tensor:
        """(T, hidden) embedded rows -> those before the last norm, differentiable in the adapter's A and B, once.

        With `recompute` only the layers' inputs are kept, and each runs again going backward.
        """
        names = [name for names in self.names for name in names]
        pairs = [pair.get(name) for name in names for pair in (adapter.a, adapter.b)]
        rows, turned = rows.float().contiguous().clone(), self._turned(positions)
        call = _Trained(self, rows, turned, adapter, attention.lengths, recompute=recompute)
        if not torch.is_grad_enabled():  # which a Function is not told
            return call.forward(pairs, differentiable=False)
        return _Layers.apply(call, *pairs)

    def _turned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, dim) of the positions."""
        cosines, sines = self.body.rotary_emb(torch.empty(0), position_ids=positions[None])
        return cosines[0].float().contiguous(), sines[0].float().contiguous()

    def described(
        self, rows: Tensor, turned: tuple[Tensor, Tensor], ranges: Any = (), spans: Any = None, tails: Any = None
    ) -> "_Pass":
        """A pass of `rows` for the kernels; whoever asks keeps the memory alive."""
        tiles = products.tiles(torch.bfloat16) and ctypes.cast(products.tile_library().tiled, ctypes.c_void_p).value
        return _Pass(
            rows.data_ptr(), *(x.data_ptr() for x in turned), ctypes.addressof(self._table),
            ctypes.addressof(ranges) if ranges else None, _address(spans), _address(tails), tiles or None,
            len(rows), len(self._table), len(ranges), 0 if spans is None else len(spans),
            *self._sizes, products.threads(), products.EMULATED,
        )  # fmt: skip

    def _layer(self, layer: Any) -> "_Layer":
        if {name for name, _ in layer.named_children()} - {"act_fn"} != _CHILDREN or "forward" not in vars(layer.mlp):
            raise _Other
        linears = [
            getattr(getattr(layer, part), f"{name}_proj") for part, names in _PROJECTIONS.items() for name in names
        ]
        expected = {f"{name}_proj" for name in _PROJECTIONS["self_attn"]} | {"q_norm", "k_norm"}
        if any(name not in expected for name, _ in layer.self_attn.named_children()):
            raise _Other
        self.names.append(tuple(linear.name for linear in linears))
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
        if products.library().width() > int(layer.self_attn.head_dim) // 2:
            raise _Other
        weights = (_Weight * len(linears))(*(self._weight(linear) for linear in linears))
        biases = (ctypes.c_void_p * len(linears))(*(self._bias(linear) for linear in linears))
        return _Layer(weights, biases, *map(self._norm, norms), float(layer.self_attn.scaling))

    def _weight(self, linear: Any) -> "_Weight":
        panels = linear.base.panels if isinstance(linear, LoraLinear) else None
        if panels is None or panels.outputs % products.library().panel() or panels.inputs % 2:
            raise _Other
        return _weight(panels)

    def _bias(self, linear: LoraLinear) -> int | None:
        if linear.base.bias is None:
            return None
        self._kept.append(linear.base.bias.float().contiguous())
        return self._kept[-1].data_ptr()

    def _norm(self, norm: Any) -> "_Norm":
        if norm is None:
            return _Norm()
        given = vars(norm)["forward"].keywords  # `fuse` has put its kernel there
        return _Norm(given["weight"].data_ptr(), given["epsilon"])

    def _pairs(self, weights: Weights) -> Any:
        assert isinstance(weights, Snapshot)
        if not weights.pairs:
            return None
        if not weights.table:
            rows: list[_Pair] = []
            for name in (name for names in self.names for name in names):
                a, b, scale = weights.pairs.get(name, (None, None, 0.0))
                rows.append(_Pair() if a is None or b is None else _Pair(_weight(a.panels), _weight(b.panels), scale))
            weights.table.append((_Pair * len(rows))(*rows))
        return weights.table[0]


class _Trained:
    """A training pass: `forward`, then `backward` once; `pairs` are every product's A (rank, in) and B (out, rank)."""

    def __init__(
        self, layers: Layers, rows: Tensor, turned: tuple[Tensor, Tensor], adapter: Adapter, lengths: list[int], *,
        recompute: bool,
    ) -> None:  # fmt: skip
        self.layers, self.turned, self.spec, self.recompute = layers, turned, adapter.spec, recompute
        self.lengths = torch.tensor(lengths)
        self.rows = rows
        self.inputs: Tensor | None = None
        self.kept: Tensor | None = None

    def forward(self, pairs: list[Tensor | None], *, differentiable: bool) -> Tensor:
        """(T, hidden); the rows that went in are overwritten."""
        count = len(self.layers.names)
        each = self._run(products.library().kept, self.rows, pairs)
        sizes = torch.Size([each * (1 if self.recompute else count)]), torch.Size([count, *self.rows.shape])
        if differentiable:  # in the memory of the pass before, if it will do: page faults would be a tenth of the time
            self.kept, self.inputs = (buffer(size, self.rows, torch.float32) for size in sizes)
        else:
            self.kept = torch.empty(each, device="cpu")
        self._run(products.library().forward, self.rows, pairs)
        return self.rows

    def backward(self, pairs: list[Tensor | None], grad: Tensor) -> list[Tensor | None]:
        """Gradients of A and B, from that of what `forward` gave; what it kept is overwritten and let go."""
        assert self.inputs is not None, "a training pass goes backward once"
        out = [None if pair is None else torch.empty(pair.shape, device="cpu") for pair in pairs]
        self._run(products.library().backward, grad.float().contiguous().clone(), pairs, out)
        self.inputs = self.kept = None
        return out

    def _run(
        self, kernel: Any, rows: Tensor, pairs: list[Tensor | None], gradients: list[Tensor | None] | None = None
    ) -> int:
        laid = [None if pair is None else pair.detach().contiguous() for pair in pairs]
        tables = [(ctypes.c_void_p * len(x))(*map(_address, x)) for x in (laid, gradients) if x is not None]
        addresses = [*map(ctypes.addressof, tables), None][:2]
        kept = (_address(x) for x in (self.inputs, self.kept, self.lengths))
        recompute = self.recompute or self.inputs is None  # then one layer's numbers are kept at a time
        numbers = (len(self.lengths), self.spec.rank, recompute, self.spec.scale)
        call = _Training(self.layers.described(rows, self.turned), *addresses, *kept, *numbers)
        return kernel(ctypes.byref(call))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Trained, *pairs: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*pairs)
        return call.forward([*pairs], differentiable=any(ctx.needs_input_grad))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.backward(ctx.saved_tensors, grads[0])


class _Other(Exception):  # noqa: N818 - a model that is built otherwise is no error
    pass


def _weight(panels: Panels | None) -> "_Weight":
    if panels is None:
        raise _Other
    kind = 2 if panels.tiles else int(panels.paired)
    steps = panels.data.shape[1] // 16
    return _Weight(panels.data.data_ptr(), panels.inputs, panels.outputs, panels.data.shape[0], kind, steps)


class _Weight(ctypes.Structure):
    """`struct Weight` of layers.hpp, as all below."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "panels", "kind", "steps")),
    )


class _Pair(ctypes.Structure):
    _fields_ = (("a", _Weight), ("b", _Weight), ("scale", ctypes.c_double))


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("epsilon", ctypes.c_double))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("weights", _Weight * 7),
        ("biases", ctypes.c_void_p * 7),
        *((name, _Norm) for name in ("before", "between", "queries", "keys")),
        ("scale", ctypes.c_double),
    )


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_int64), ("end", ctypes.c_int64), ("pairs", ctypes.c_void_p))


class _Pass(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("rows", "cosines", "sines", "layers", "ranges", "spans", "tails", "tiled")),
        *((n, ctypes.c_int64) for n in ("count", "layer_count", "range_count", "span_count")),
        *((n, ctypes.c_int64) for n in ("hidden", "heads", "kv_heads", "dim", "inner", "threads", "emulated")),
    )


class _Training(ctypes.Structure):
    """`struct Training` of training.hpp."""

    _fields_ = (
        ("passed", _Pass),
        *((name, ctypes.c_void_p) for name in ("pairs", "gradients", "inputs", "kept", "lengths")),
        *((name, ctypes.c_int64) for name in ("sequences", "rank", "recompute")),
        ("scale", ctypes.c_double),
    )
