"""Every layer of a Llama or a Qwen3 in one call of the kernels, where that gives the bits of transformers' modules.

Between the products of a decode step Python and torch take as long as the products of a few rows do.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from paritygate.server.model import products
from paritygate.server.model.attention import CachedAttention
from paritygate.server.model.lora import LoraLinear, Snapshot, Weights
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
        turned = self.body.rotary_emb(rows[None], position_ids=positions[None])
        cosines, sines = (x[0].float().contiguous() for x in turned)
        pairs = [(start, end, self._pairs(weights)) for start, end, weights in ranges]
        table = (_Range * len(pairs))(*((s, e, None if p is None else ctypes.addressof(p)) for s, e, p in pairs))
        tiles = products.tiles(torch.bfloat16) and ctypes.cast(products.tile_library().tiled, ctypes.c_void_p).value
        passed = _Pass(
            rows.data_ptr(), cosines.data_ptr(), sines.data_ptr(), ctypes.addressof(self._table),
            ctypes.addressof(table), attention.table.data_ptr(), attention.tails.data_ptr(), tiles or None,
            len(rows), len(self._table), len(table), len(attention.table), *self._sizes, products.threads(),
            products.EMULATED,
        )  # fmt: skip
        products.library().layers(ctypes.byref(passed))
        return rows[: len(attention.rows_read)]

    def takes(self, attention: Any, ranges: list[tuple[int, int, Weights]]) -> bool:
        """Whether a pass with these is one of sampling, whose rows are all in spans and whose weights never change."""
        return isinstance(attention, CachedAttention) and all(isinstance(weights, Snapshot) for _, _, weights in ranges)

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
