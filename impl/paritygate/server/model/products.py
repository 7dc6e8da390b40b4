"""Linear layers and attention by the compiled kernels of products.cpp, or by torch where they cannot be had.

The kernels give a row the same bits in any company and at any number of threads, by construction; torch does from
`min_rows` up, on one thread (design/030). A process uses one or the other throughout.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paritygate import native

FOLDER = Path(__file__).parent
OURS = tuple(FOLDER / name for name in ("layers.hpp", "training.hpp", "products.cpp"))
SOURCES = (native.VECTOR_HPP, native.THREADS_HPP, *OURS)
TILE_SOURCES = (native.VECTOR_HPP, native.THREADS_HPP, FOLDER / "amx.hpp", FOLDER / "amx.cpp")
EMULATED = False  # tests: AMX tiles in plain C++, on any machine


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built at the first call; raises native.Unavailable where there is no compiler."""
    return native.load(*SOURCES)


@functools.cache
def tile_library() -> ctypes.CDLL:
    """Products on AMX tiles, built where the compiler's machine has them, and elsewhere by tests that emulate them."""
    return native.load(*TILE_SOURCES)


@functools.cache
def available() -> bool:
    """Whether the kernels can be used here; with those of AMX tiles, they are then all built."""
    try:
        if library().has_tiles():
            tile_library()
    except native.Unavailable:
        return False
    return True


_local = threading.local()


def threads() -> int:
    """How many threads the kernels use that the calling thread runs."""
    return getattr(_local, "threads", 1)


def use_threads(count: int, dtype: torch.dtype) -> None:
    """Run what the calling thread asks for on `count` threads: the kernels, or torch for linear layers that it has.

    Beside the kernels torch stays with one thread: split by threads, even its element-wise operations move bits.
    """
    _local.threads = count
    torch.set_num_threads(1 if serves(dtype) else count)


def serves(dtype: torch.dtype) -> bool:
    """Whether linear layers of that dtype are the kernel's."""
    return available() and dtype in (torch.float32, torch.bfloat16)


def min_rows(dtype: torch.dtype) -> int:
    """The fewest rows of a linear layer from which on a row's bits do not depend on their number."""
    return 1 if serves(dtype) else 16  # torch takes another path, with other last bits, for fewer


def dots(dtype: torch.dtype) -> bool:
    """Whether linear layers of that dtype are dot products of bfloat16 pairs, by avx512_bf16; else they are widened.

    Asked for by PARITYGATE_BFLOAT16=dots, where the CPU has them: they round what goes into a layer to bfloat16.
    """
    return bfloat16(dtype) and native.bfloat16_asked() == "dots" and bool(library().has_dots())


def bfloat16(dtype: torch.dtype) -> bool:
    """Whether linear layers of that dtype are the kernel's products of bfloat16 weights."""
    return dtype == torch.bfloat16 and serves(dtype)


def tiles(dtype: torch.dtype) -> bool:
    """Whether they are products on AMX tiles: where the CPU has them, unless PARITYGATE_BFLOAT16 is dots or widened."""
    if not bfloat16(dtype) or native.bfloat16_asked() in ("dots", "widened"):
        return False
    return EMULATED or not tiles_refused()


@functools.cache
def tiles_refused() -> str:
    """Why AMX tiles are not used here, or nothing: they were tried by a process of their own, in `amx.hpp`."""
    if not library().has_tiles():  # then no receipt promises them
        return "the compiler found no AMX here"
    refused = tile_library().tiles_refused
    refused.restype = ctypes.c_char_p
    reason = (refused() or b"").decode()
    if reason:
        native.TILES_REFUSED.append(reason)
        native.announce(f"{reason}: bfloat16 is widened to float32 instead")
    return reason


def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """(..., T, in), (out, in) -> (..., T, out), differentiable in both."""
    if not serves(weight.dtype):
        return _by_torch(rows, weight)
    return _Product.apply(rows, weight, None)


def _by_torch(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In float32: torch's products of bfloat16 move a row's bits at 17 rows or 48 where the machine has AMX."""
    if weight.dtype != torch.bfloat16:
        return torch.nn.functional.linear(rows, weight, bias)
    wide = torch.nn.functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(rows.dtype)


class FrozenLinear:
    """A linear layer whose weight (out, in) and bias never learn: (..., T, in) -> (..., T, out), differentiable.

    The weight is held once: in panels where the kernel takes it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.detach()
        self._weight = Panels(weight.detach()) if serves(weight.dtype) else weight.detach()

    @property
    def panels(self) -> "Panels | None":
        """The weight, where it is held in panels."""
        return self._weight if isinstance(self._weight, Panels) else None

    @property
    def weight(self) -> Tensor:
        """(out, in); laid out anew where it is held in panels."""
        return self._weight.weight if isinstance(self._weight, Panels) else self._weight

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return self._weight.nbytes

    def transposed(self) -> Callable[[Tensor], Tensor]:
        """What takes gradients (..., T, out) to (..., T, in), without a graph; its weight is laid out once, here."""
        weight = self._weight
        if not isinstance(weight, Panels):
            return lambda grads: _by_torch(grads, weight.T)
        turned = Panels.turned(weight)
        return lambda grads: turned.product(grads, split=True)

    def __call__(self, rows: Tensor) -> Tensor:
        if not isinstance(self._weight, Panels):
            return _by_torch(rows, self._weight, self.bias)
        out = _Product.apply(rows, None, self._weight) if rows.requires_grad else self._weight.product(rows)
        return out if self.bias is None else out + self.bias


class Panels:
    """A weight (out, in) as the kernel reads it: columns of outputs side by side, of bfloat16 pairs of inputs."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.paired, self.dots, self.tiles = (f(weight.dtype) for f in (bfloat16, dots, tiles))
        columns, step = self._sizes()
        padded = torch.nn.functional.pad(weight, (0, -self.inputs % step, 0, -self.outputs % columns))
        wide = 2 if self.paired else 1
        self.data = padded.unflatten(0, (-1, columns)).unflatten(2, (-1, wide)).transpose(1, 2).contiguous()

    def _sizes(self) -> tuple[int, int]:
        """Columns of a panel, and what its inputs are a multiple of."""
        return (32, 32) if self.tiles else (library().panel(), 2 if self.paired else 1)

    @classmethod
    def turned(cls, panels: "Panels") -> "Panels":
        """The panels of the transposed weight."""
        turned = cls.__new__(cls)
        turned.outputs, turned.inputs = panels.inputs, panels.outputs
        turned.paired, turned.dots, turned.tiles = panels.paired, panels.dots, panels.tiles
        columns, step = turned._sizes()
        if not panels.paired:
            turned.data = panels.data.new_empty(-(-turned.outputs // columns), turned.inputs, columns, 1)
            pointers = (ctypes.c_void_p(x.data.data_ptr()) for x in (panels, turned))
            numbers = map(ctypes.c_int64, (panels.inputs, panels.outputs, threads()))
            library().turn_singles(next(pointers), *numbers, next(pointers))
            return turned
        pairs = -(-turned.inputs // step) * step // 2
        turned.data = panels.data.new_empty(-(-turned.outputs // columns), pairs, columns, 2)
        if 2 * pairs > turned.inputs + 1:
            turned.data.zero_()
        sizes = (panels.inputs, panels.outputs, panels.data.shape[1], pairs, columns, threads())
        data = (ctypes.c_void_p(x.data.data_ptr()) for x in (panels, turned))
        library().turn_pairs(next(data), *map(ctypes.c_int64, sizes), next(data))
        return turned

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return self.data.nbytes

    @property
    def weight(self) -> Tensor:
        """(out, in), laid out anew."""
        return self.data.transpose(1, 2).flatten(2).flatten(0, 1)[: self.outputs, : self.inputs]

    def product(self, rows: Tensor, *, split: bool = False) -> Tensor:
        """(..., T, in) -> (..., T, out), without a graph.

        Dot products round rows to bfloat16; with `split` what that lost is multiplied too: 16 bits of 24 are kept.
        """
        flat = rows.reshape(-1, self.inputs)
        if self.paired and self.inputs % 2:
            flat = torch.nn.functional.pad(flat, (0, 1))
        if self.tiles:
            out = self._tiled(flat.float().contiguous())
        elif self.dots:
            rounded = flat.bfloat16()
            out = self._dots(rounded)
            if split:
                out += self._dots((flat - rounded).bfloat16())
        else:
            flat = flat.float().contiguous()
            count, panels, columns = flat.shape[0], *self.data.shape[:3:2]
            out = torch.empty(count, panels * columns, dtype=torch.float32, device="cpu")
            sizes = (count, flat.shape[1], flat.shape[1], panels, self.paired, threads(), 0)
            library().linear(ctypes.byref(_Linear(flat.data_ptr(), self.data.data_ptr(), out.data_ptr(), *sizes)))
            if panels * columns > self.outputs:
                out = out[:, : self.outputs]
        return out.to(rows.dtype).reshape(*rows.shape[:-1], self.outputs)

    def _tiled(self, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), self.outputs, dtype=torch.float32, device="cpu")
        sizes = (*rows.shape, self.data.shape[1] // 16, len(self.data), self.outputs, threads())
        product = _Tiled(rows.data_ptr(), self.data.data_ptr(), out.data_ptr(), *sizes)
        tile_library().tiled(ctypes.byref(product), ctypes.c_int64(EMULATED))
        return out

    def _dots(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        out = torch.empty(len(rows), self.outputs, dtype=torch.float32, device="cpu")
        sizes = (len(rows), self.data.shape[1], len(self.data), self.outputs, threads())
        library().dots(ctypes.byref(_Dots(rows.data_ptr(), self.data.data_ptr(), out.data_ptr(), *sizes)))
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None, frozen: Panels | None) -> Tensor:
        ctx.frozen = frozen
        if frozen is not None:
            return frozen.product(rows)
        assert weight is not None
        ctx.save_for_backward(rows, weight)
        return Panels(weight).product(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        (grad_out,) = grads
        if ctx.frozen is not None:
            return Panels.turned(ctx.frozen).product(grad_out, split=True), None, None
        rows, weight = ctx.saved_tensors
        return *linear_back(rows, weight, grad_out, into_rows=ctx.needs_input_grad[0]), None


def linear_back(rows: Tensor, weight: Tensor, grad: Tensor, *, into_rows: bool = True) -> tuple[Any, Tensor]:
    """Of `linear`, from `grad` (..., T, out): to the rows (..., T, in), or None, and to the weight (out, in)."""
    into_weight = grad.flatten(0, -2).T @ rows.flatten(0, -2)
    if not into_rows:
        return None, into_weight
    return Panels(weight.T).product(grad, split=True) if serves(weight.dtype) else grad @ weight, into_weight


def log_normalizers(logits_MV: Tensor) -> Tensor:
    """(M, V) -> (M,) fp32, log sum exp of each row: with it the logprob of any token is one subtraction."""
    if not available():
        return torch.logsumexp(logits_MV.float(), 1)
    logits = logits_MV.float().contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.float32, device="cpu")
    pointers = (ctypes.c_void_p(logits.data_ptr()), *map(ctypes.c_int64, (*logits.shape, threads())))
    library().normalize(*pointers, ctypes.c_void_p(out.data_ptr()))
    return out


def normalizers_back(logits_MV: Tensor, normalizers_M: Tensor, grads_M: Tensor) -> Tensor:
    """What -grads * log_normalizers hands back to the logits, (M, V) fp32: in their memory, where it can be."""
    logits = logits_MV.float().contiguous()
    if not available():
        return logits.sub_(normalizers_M[:, None]).exp_().mul_(-grads_M[:, None])
    normalizers, grads = (x.float().contiguous() for x in (normalizers_M, grads_M))
    sizes = map(ctypes.c_int64, (*logits.shape, threads()))
    library().softmax_back(*(ctypes.c_void_p(x.data_ptr()) for x in (logits, normalizers, grads)), *sizes)
    return logits


class _Linear(ctypes.Structure):
    """`struct Linear` of products.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("count", "inputs", "stride", "panels", "narrow", "threads", "more")),
    )


class _Dots(ctypes.Structure):
    """`struct Dots` of products.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("count", "pairs", "panels", "outputs", "threads")),
    )


class _Tiled(ctypes.Structure):
    """`struct Product` of amx.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("count", "inputs", "steps", "panels", "outputs", "threads")),
    )


class _Strided(ctypes.Structure):
    """`struct Strided` of products.cpp."""

    _fields_ = (("at", ctypes.c_void_p), ("head", ctypes.c_int64), ("row", ctypes.c_int64))


class _Attention(ctypes.Structure):
    """`struct Attention` of products.cpp."""

    _fields_ = (
        *((name, _Strided) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("out", "spans")),
        *((name, ctypes.c_int64) for name in ("span_count", "heads", "kv_heads", "dim", "layer", "threads")),
        ("scale", ctypes.c_float),
    )


def attends(dim: int) -> bool:
    """Whether the kernel takes heads of that size."""
    return available() and dim % library().width() == 0


def spans(table: Iterable[tuple[int, int, int, int, int, int, int]]) -> Tensor:
    """Rows of (keys, values, head, layer, row, start, count), as `struct Span` of products.cpp has them; int64."""
    return torch.tensor(list(table), dtype=torch.int64, device="cpu")


def attend(
    q: Tensor,
    spans_S7: Tensor,
    kv_heads: int,
    scale: float,
    *,
    layer: int = 0,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """q (H, T, D) fp32 attends causally to what each span's addresses hold -> (H, T, D), rows outside spans 0.

    `fresh` k and v (K, T, D) are written to those addresses first. The caller keeps the memory there alive.
    """
    heads, length, dim = q.shape
    out = torch.zeros(length, heads, dim, dtype=torch.float32, device="cpu")
    q = _inner(q)
    k, v = (None, None) if fresh is None else map(_inner, fresh)
    library().attend(
        ctypes.byref(
            _Attention(
                _strided(q), _strided(k), _strided(v), out.data_ptr(), spans_S7.data_ptr(), len(spans_S7), heads,
                kv_heads, dim, layer, threads(), scale,
            )
        )
    )  # fmt: skip
    return out.transpose(0, 1)


def _inner(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strided(x: Tensor | None) -> _Strided:
    return _Strided() if x is None else _Strided(x.data_ptr(), x.stride(0), x.stride(1))
