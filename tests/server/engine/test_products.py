"""Linear layers, attention and normalizers: right, and a row's bits its own, whatever is computed beside it."""

import ctypes
import os
import subprocess
import types
from pathlib import Path

import pytest
import torch

from paritygate import native
from paritygate.losses.engines import cpp
from paritygate.native import libraries, record
from paritygate.server.model import products
from paritygate.server.model.attention import stable_rows
from paritygate.server.model.products import (
    FrozenLinear,
    attend,
    available,
    linear,
    log_normalizers,
    min_rows,
    normalizers_back,
    spans,
    use_threads,
)

SIZES = ((64, 128), (576, 192), (576, 1536), (1536, 576), (32, 576), (576, 32), (30, 7))


def test_few_rows_are_what_moves_bits_of_torch() -> None:
    """The premise of `min_rows` where there are no kernels, on this machine: from 16 the row count changes no row."""
    generator = torch.Generator().manual_seed(0)
    assert stable_rows(32) <= 64
    for inputs, outputs in SIZES[:-1]:
        weight, rows = torch.randn(outputs, inputs, generator=generator), torch.randn(300, inputs, generator=generator)
        whole = torch.nn.functional.linear(rows, weight)
        for count in (16, 17, 31, 48, 65, 128, 255):
            assert torch.equal(torch.nn.functional.linear(rows[:count], weight), whole[:count]), (
                inputs,
                outputs,
                count,
            )


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for a way of products of bfloat16: AMX tiles are emulated where there are none, dot products skipped."""
    monkeypatch.setenv("PARITYGATE_BFLOAT16", way)
    if way == "dots" and not products.dots(torch.bfloat16):
        pytest.skip("no dot products of bfloat16 here: the CPU or the compiler has none")
    if way == "tiles" and available():
        monkeypatch.setattr(products, "EMULATED", bool(products.tiles_refused()))


@pytest.mark.parametrize("path", ["float32", "widened", "dots", "tiles"])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_linear_layers_are_right_and_keep_a_rows_bits(
    inputs: int, outputs: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64; any rows of any number, at one thread and at three; gradients as well."""
    dtype = torch.float32 if path == "float32" else torch.bfloat16
    choose(path, monkeypatch)
    if path == "tiles" and inputs * outputs > 2**17:
        pytest.skip("emulated tiles take too long")
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*s, generator=generator).to(dtype) for s in ((outputs, inputs), (outputs,)))
    rows = torch.randn(2, 120, inputs, generator=generator).to(dtype)
    layer = FrozenLinear(weight, bias)
    assert torch.equal(layer.weight, weight)
    if available():
        assert (products.dots(dtype), products.tiles(dtype)) == (path == "dots", path == "tiles")
    whole, want = layer(rows), rows.double() @ weight.double().T + bias.double()
    close = 1e-6 if dtype == torch.float32 else 2**-7
    assert float((whole.double() - want).abs().max()) <= close * float(want.abs().max())
    least = min_rows(dtype)
    for start, count in ((0, least), (5, least + 1), (7, least + 4), (50, 17), (1, 99)):
        assert torch.equal(layer(rows[1, start : start + count]), whole[1, start : start + count])
    if least == 1:
        use_threads(3, dtype)
        assert torch.equal(layer(rows), whole)
        use_threads(1, dtype)
    leaf, learnt = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    into = torch.randn(2, 120, outputs, generator=generator).to(dtype)
    (frozen,) = torch.autograd.grad(layer(leaf), leaf, into)
    into_rows, into_weight = torch.autograd.grad(linear(leaf, learnt), (leaf, learnt), into)
    assert torch.equal(frozen, into_rows)
    want_rows = into.double() @ weight.double()
    want_weight = into.double().flatten(0, 1).T @ rows.double().flatten(0, 1)
    for got, right in ((into_rows, want_rows), (into_weight, want_weight)):
        assert float((got.double() - right).abs().max()) <= close * float(right.abs().max())


@pytest.mark.skipif(not available(), reason="no compiler here, or PARITYGATE_KERNELS=off")
@pytest.mark.parametrize("path", ["widened", "tiles"])
@pytest.mark.parametrize("count", [1, 5, 16, 17, 33, 200])
def test_float32_rows_are_not_rounded(path: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, forwards and backwards; a row's bits in any company, at any number of threads."""
    choose(path, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(45, 167, generator=generator).bfloat16()
    rows = torch.randn(count, 167, generator=generator, requires_grad=True)
    layer = FrozenLinear(weight)
    out, into = layer(rows), torch.randn(count, 45, generator=generator)
    (back,) = torch.autograd.grad(out, rows, into)
    for got, left, right in ((out, rows, weight.T), (back, into, weight)):
        want, size = left.detach().double() @ right.double(), left.detach().double().abs() @ right.double().abs()
        # Roundings of 167 sums; 1.2e-6 if two of three parts of a row's numbers were multiplied.
        assert float(((got.detach() - want).abs() / size).max()) < 5e-7
    alone = torch.cat([layer(row[None]) for row in rows.detach()])
    assert torch.equal(alone, out)
    use_threads(3, torch.bfloat16)
    assert torch.equal(layer(rows), out)
    use_threads(1, torch.bfloat16)


@pytest.mark.skipif(not available(), reason="no compiler here, or PARITYGATE_KERNELS=off")
def test_emulated_tiles_are_those_of_intels_manual(monkeypatch: pytest.MonkeyPatch) -> None:
    """TDPBF16PS: sums of even and of odd terms, added, then added to the tile; no denormals; NaN stays."""
    monkeypatch.delenv("PARITYGATE_BFLOAT16", raising=False)
    monkeypatch.setattr(products, "EMULATED", True)
    ones = FrozenLinear(torch.ones(1, 64, dtype=torch.bfloat16))
    rows = torch.ones(4, 64)
    rows[0, 0] = 2.0**24  # even: 2^24, to which no 1 adds; odd: 16; and 32 of the second step
    rows[1, 1] = 1 + 2.0**-8 + 2.0**-16 + 2.0**-23  # all of 24 bits, in three parts
    rows[2, 3] = float("nan")
    rows[3] = 2.0**-130
    out = ones(rows)[:, 0]
    assert out[:2].tolist() == [2.0**24 + 48, 64 + 2.0**-8 + 2.0**-16]
    assert bool(torch.isnan(out[2]))
    assert float(out[3]) == 0
    assert float(FrozenLinear(torch.full((1, 64), 2.0**-100, dtype=torch.bfloat16))(rows[1:2] * 2.0**-30)[0, 0]) == 0


def test_the_compiler_takes_the_tiles_own_instructions(tmp_path: Path) -> None:
    """For a CPU that has them, wherever it stands; run on one that has none, they are refused before the first."""
    try:
        command = [*libraries.compiler_command(), *libraries.FLAGS, "-mamx-tile", "-mamx-bf16"]
    except libraries.Unavailable as reason:
        pytest.skip(str(reason))
    source, made = tmp_path / "tiles.cpp", tmp_path / "tiles.so"
    source.write_text(TILES)
    folders = [f"-I{path.parent}" for path in products.TILE_SOURCES]
    built = subprocess.run([*command, *folders, source, "-o", made], capture_output=True, text=True, check=False)
    if any(words in built.stderr for words in ("unrecognized command", "unknown argument", "no tiles here")):
        pytest.skip("a compiler, or a processor, without AMX")
    assert built.returncode == 0, built.stderr
    library = ctypes.CDLL(str(made))
    assert (library.emulated(), library.turned(), library.mixed()) == (1, 0, 0)
    library.refused.restype = ctypes.c_char_p
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "amx_bf16" not in flags:
        assert library.refused() == b"the CPU has no AMX"


TILES = """#include "amx.hpp"
#if !AMX
#error no tiles here
#endif
struct Turned : amx::Emulated {
    template <int C, int A, int B> void dot() { Emulated::dot<C, B, A>(); }
};
struct Mixed : amx::Emulated {  // what the first row holds reaches the last
    template <int C, int A, int B> void dot() { Emulated::dot<C, A, B>(); tiles[C][15 * 64 + 3] ^= tiles[C][3] & 1; }
};
extern "C" {
const char* refused() { return amx::refused(); }
int emulated() { return amx::right<amx::Emulated>(); }
int turned() { return amx::right<Turned>(); }
int mixed() { return amx::right<Mixed>(); }
}
"""


def test_tiles_that_are_refused_are_said_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARITYGATE_BFLOAT16", raising=False)
    monkeypatch.setattr(products, "serves", lambda dtype: True)
    library = types.SimpleNamespace(has_tiles=lambda: 1, tiles_refused=lambda: b"AMX tiles do not multiply")
    monkeypatch.setattr(products, "library", lambda: library)
    monkeypatch.setattr(products, "tile_library", lambda: library)
    monkeypatch.setattr(libraries, "TILES_REFUSED", refused := [])
    monkeypatch.setattr(native, "TILES_REFUSED", refused)
    monkeypatch.setattr(record, "TILES_REFUSED", refused)
    products.tiles_refused.cache_clear()
    announced: list[str] = []
    monkeypatch.setattr(native, "announce", announced.append)
    assert record._way(["AMX_BF16", "AMX_TILE", "AVX512F"]) == "amx tiles, rows in three parts"
    assert not products.tiles(torch.bfloat16)
    assert announced == ["AMX tiles do not multiply: bfloat16 is widened to float32 instead"]
    assert record._way(["AMX_BF16", "AMX_TILE"]) == "widened to float32 (AMX tiles do not multiply)"
    for asked in ("dots", "widened"):
        monkeypatch.setenv("PARITYGATE_BFLOAT16", asked)
        assert record._way(["AMX_BF16", "AMX_TILE"]) == "widened to float32"
    products.tiles_refused.cache_clear()
    library.has_tiles = lambda: 0
    assert products.tiles_refused() == "the compiler found no AMX here"
    assert len(refused) == 1
    products.tiles_refused.cache_clear()


def test_tiles_are_compiled_where_the_cpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parity session opens what a server will, and compiles nothing else."""
    loaded: list[str] = []
    library = types.SimpleNamespace(has_tiles=lambda: 0)
    monkeypatch.setattr(native, "load", lambda *sources: loaded.append(sources[-1].name) or library)
    for name in ("library", "tile_library"):
        monkeypatch.setattr(products, name, getattr(products, name).__wrapped__)
    assert products.available.__wrapped__()
    assert loaded == ["products.cpp"]
    library.has_tiles = lambda: 1
    assert products.available.__wrapped__()
    assert loaded == ["products.cpp", "products.cpp", "amx.cpp"]


def test_dot_products_take_bfloat16_and_give_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are rounded going in, sums are not coming out; AVX512_BF16 knows no denormals, in or out."""
    choose("dots", monkeypatch)
    rows, weight = torch.tensor([[1.0, 1.0 + 2.0**-9, 1.0]]), torch.tensor([[256.0, 1.0, 0.5]], dtype=torch.bfloat16)
    assert float(FrozenLinear(weight)(rows)) == 257.5
    denormal = torch.full((1, 3), 2.0**-130, dtype=torch.bfloat16)
    assert float(denormal[0, 0]) > 0
    assert float(FrozenLinear(denormal)(rows * 2.0**100)) == 0
    assert float(FrozenLinear(weight * 2.0**-120)(rows * 2.0**-20)) == 0


@pytest.mark.parametrize("inputs", [3, 64])
def test_dot_products_keep_sixteen_bits_of_what_goes_backward(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products of bfloat16: what rounding loses of a gradient is multiplied, too; of frozen and learnt weights."""
    choose("dots", monkeypatch)
    weight = torch.ones(5, inputs, dtype=torch.bfloat16)
    leaf, learnt = torch.ones(1, inputs, requires_grad=True), weight.clone().requires_grad_()
    into = torch.tensor([[1 + 2.0**-15, 2.0**-9, 0.0, -3 * 2.0**-15, 2.0**100]])
    for out in (FrozenLinear(weight)(leaf), linear(leaf, learnt)):
        (small,) = torch.autograd.grad(out[:, :4], leaf, into[:, :4], retain_graph=True)
        assert small.tolist() == [[1 + 2.0**-9 - 2.0**-14] * inputs]
        (large,) = torch.autograd.grad(out, leaf, into)
        assert large.tolist() == [[2.0**100] * inputs]


def test_a_compiler_that_is_there_builds_the_kernels() -> None:
    """A source with a mistake must not pass for a machine without a compiler, whose tests are skipped."""
    try:
        compiler = bool(libraries.compiler_command())
    except libraries.Unavailable:
        compiler = False
    wanted = compiler and os.environ.get("PARITYGATE_KERNELS") != "off"
    assert (available(), cpp.unavailable() is None) == (wanted, wanted)


@pytest.mark.skipif(min_rows(torch.float32) != 1, reason="no compiler here")
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "length"), [(9, 3, 64, 300), (4, 2, 32, 70), (7, 1, 16, 130)])
def test_attention_is_right_and_keeps_a_rows_bits(heads: int, kv_heads: int, dim: int, length: int) -> None:
    """Against float64, keys laid out as a cache's; a token decoded, any piece prefilled, and threads move no bit."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(length, heads, dim, generator=generator).transpose(0, 1)
    k, v = torch.randn(2, kv_heads, length, dim, generator=generator)
    group = heads // kv_heads

    def attended(start: int, count: int) -> torch.Tensor:
        cache = torch.zeros(2, kv_heads, length + 9, dim)
        cache[:, :, :start] = torch.stack([k, v])[:, :, :start]
        table = spans([(cache[0].data_ptr(), cache[1].data_ptr(), cache.stride(1), 0, 0, start, count)])
        piece = slice(start, start + count)
        out = attend(q[:, piece], table, kv_heads, dim**-0.5, fresh=(k[:, piece], v[:, piece]))
        assert torch.equal(cache[:, :, : start + count], torch.stack([k, v])[:, :, : start + count])
        return out

    whole = attended(0, length)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), *(t.double().repeat_interleave(group, 0) for t in (k, v)), is_causal=True
    )
    assert float((whole - want).abs().max()) < 3e-6
    for start, count in ((0, 1), (5, 1), (length - 1, 1), (10, 50), (3, length - 3), (64, 6), (63, 2)):
        assert torch.equal(attended(start, count), whole[:, start : start + count])
    use_threads(3, torch.float32)
    assert torch.equal(attended(0, length), whole)
    use_threads(1, torch.float32)


@pytest.mark.parametrize("columns", [1, 7, 480, 49152])
def test_log_normalizers(columns: int) -> None:
    """Against float64, at extremes too; a row has the same bits alone."""
    logits = torch.randn(20, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 20)[:, None]
    got = log_normalizers(logits)
    want = torch.logsumexp(logits.double(), 1)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(log_normalizers(logits[3:4]), got[3:4])
    grads = torch.linspace(-2, 1, 20)
    gradient = normalizers_back(logits.clone(), got, grads)
    exact = -grads.double()[:, None] * torch.softmax(logits.double(), 1)
    assert torch.allclose(gradient.double(), exact, rtol=1e-3, atol=1e-6)
    assert torch.equal(normalizers_back(logits[3:4].clone(), got[3:4], grads[3:4]), gradient[3:4])
    logits[4, 0] = float("nan")
    assert not bool(torch.isfinite(log_normalizers(logits)[4]))
