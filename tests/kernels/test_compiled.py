"""How the kernels come to be: compiled here from these sources, for vectors narrow and wide, or not at all."""

import ctypes
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paritygate import bootstrap
from paritygate.losses import spod
from paritygate.losses.buckets import DIVERGENCES, TAIL_CAP
from paritygate.losses.engines import cpp
from paritygate.losses.row_stats import RowStat
from paritygate.native import libraries
from tests.kernels.kernel_batches import answer, batch
from tests.kernels.test_rows import holds

NARROW = {"x86-64-v3": 8, "x86-64": 4} if platform.machine() in ("x86_64", "AMD64") else {}
HALF = [torch.float32, torch.bfloat16, torch.float16]
needs_compiler = pytest.mark.skipif(cpp.unavailable() is not None, reason=f"no kernels: {cpp.unavailable()}")


def sources() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cpp.SOURCES}


@pytest.fixture(scope="module", params=NARROW, ids=str)
def narrow(request: pytest.FixtureRequest) -> tuple[str, ctypes.CDLL]:
    """The kernels compiled for a machine with less: AVX2, and SSE2 where every conversion is written out."""
    command = (libraries.compiler_command()[0], f"-march={request.param}")
    return request.param, libraries.open_library(libraries.build(command, sources()))


@needs_compiler
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_narrower_vectors_hold_too(
    narrow: tuple[str, ctypes.CDLL], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, library = narrow
    if target == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX2")
    assert library.paritygate_vector_width() == NARROW[target]
    monkeypatch.setattr(cpp, "library", lambda: library)
    for vocabulary in (1, 3, 7, 9, 100, 2051):
        for noise in (1e-3, 2.0):
            data = batch([[1, 3], [18], [2]], vocabulary, dtype, noise=noise, sure=3.0)
            holds(data, *spod.success_preserving_loss_and_grad(**data))
    data = batch([[2], [1]], 40, dtype)
    data["student_logits"][:, 30:] = data["teacher_logits"][:, 30:] = -torch.inf
    data["actions"].clamp_(max=20)
    holds(data, *spod.success_preserving_loss_and_grad(**data))


@needs_compiler
def test_every_float16_and_bfloat16_comes_and_goes_exactly(narrow: tuple[str, ctypes.CDLL]) -> None:
    """Over all 65,536 patterns: what one vector width reads and rounds, the widest does too."""
    _, library = narrow
    everything = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        logits = everything.view(dtype)[:, None].expand(-1, 2).contiguous()
        logits[:, 1] = 0
        actions = torch.zeros(len(logits), dtype=torch.int64)
        wide = cpp.statistics(logits, logits, actions)
        finite = torch.isfinite(logits[:, 0])
        column = RowStat.STUDENT_MAXIMUM
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpp, "library", lambda: library)
            thin = cpp.statistics(logits, logits, actions)
            rounded = torch.empty_like(logits)
            weights = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64).expand(len(logits), 3)
            cpp.gradient_(rounded, logits, logits, actions, thin, weights)
        assert torch.equal(wide[finite, column], thin[finite, column])
        assert torch.equal(thin[finite, column], logits[finite, 0].double().clamp(min=0))
        exact = logits.double().softmax(-1)[finite]
        step = torch.finfo(dtype).eps * exact + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps + 5e-38
        assert ((rounded[finite].double() - exact).abs() <= step * 0.5001 + 1e-7 * exact).all()


@needs_compiler
def test_a_guarded_session_compiles_what_it_has_digested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where our modules are read from source alone, so are the kernels: no cache is read, and the digests are told.

    A process that it starts takes the bytes that it has built, and no others: not what lies beside them in the cache.
    """
    given: list[dict[str, bytes]] = []
    monkeypatch.setenv("PARITYGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(bootstrap, "LOADED", {"something": "read"})
    monkeypatch.setattr(bootstrap, "LIBRARIES", {})  # this session's would tell of "made"
    monkeypatch.setattr(libraries, "build", lambda _, source_files: given.append(source_files) or b"made")
    monkeypatch.setattr(libraries, "open_library", lambda made: made)
    for _ in range(2):
        assert cpp.library.__wrapped__() == b"made"
    assert given == [sources()] * 2
    for path in cpp.SOURCES:
        assert bootstrap.LOADED[os.path.realpath(path)] == hashlib.sha256(given[0][path.name]).hexdigest()
    ((units, digest),) = bootstrap.LIBRARIES.items()
    assert json.loads(bootstrap.command("a.module")[2])[1] == {units: digest}
    (file,) = (tmp_path / "kernels").iterdir()
    another = file.with_name(file.name.replace(digest, hashlib.sha256(b"another").hexdigest()))
    for built, taken, builds in (({units: digest}, b"made", 2), ({}, b"made", 3), ({"*": "*"}, b"another", 3)):
        another.write_bytes(b"another")
        file.unlink() if not built or "*" in built else None
        monkeypatch.setattr(bootstrap, "BUILT", built)
        assert (cpp.library.__wrapped__(), len(given)) == (taken, builds)
    file.write_bytes(b"tampered")
    monkeypatch.setattr(bootstrap, "BUILT", {units: digest})
    assert (cpp.library.__wrapped__(), len(given)) == (b"made", 4)


def test_a_process_that_vouches_for_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "LOADED", {})
    assert json.loads(bootstrap.command("a.module")[2])[1] == {"*": "*"}


def test_this_very_session_is_guarded() -> None:
    if cpp.unavailable() is None:
        assert os.path.realpath(cpp.FOLDER / "spod.cpp") in bootstrap.LOADED


@needs_compiler
def test_the_cache_is_believed_for_its_own_bytes_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARITYGATE_CACHE", str(tmp_path))
    command, built = libraries.compiler_command(), []

    def build(*_: object) -> bytes:
        built.append(1)
        return b"a library"

    monkeypatch.setattr(libraries, "build", build)
    assert libraries.cached(command, sources()) == libraries.cached(command, sources()) == b"a library"
    assert len(built) == 1
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.name.endswith(f"-{hashlib.sha256(b'a library').hexdigest()}.so")
    file.write_bytes(b"another library")
    assert libraries.cached(command, sources()) == b"a library"
    changed = {**sources(), "spod.cpp": b"// edited"}
    libraries.cached(command, changed)
    libraries.cached((*command, "-g"), sources())
    assert len(built) == 4


@pytest.fixture
def no_library() -> Iterator[None]:
    """`library` asked anew, before and after."""
    for cached in (cpp.library, cpp.unavailable):
        cached.cache_clear()
    yield
    for cached in (cpp.library, cpp.unavailable):
        cached.cache_clear()


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PATH": "", "CXX": ""}, "no C\\+\\+ compiler: none of c\\+\\+, g\\+\\+, clang\\+\\+"),
        ({"CXX": "/nonexistent/c++"}, "/nonexistent/c\\+\\+ cannot be run"),
        ({"CXX": "false"}, "false cannot be run"),
        ({"PARITYGATE_KERNELS": "off"}, "PARITYGATE_KERNELS=off"),
    ],
)
def test_without_a_compiler_torch_answers(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARITYGATE_KERNELS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(libraries.Unavailable, match=words):
        cpp.library()
    data = batch([[2, 1], [3]], 60, torch.float32)
    assert not cpp.serves(data["student_logits"], data["teacher_logits"])
    holds(data, *spod.success_preserving_loss_and_grad(**data))
    in_place = data["student_logits"].clone()
    spod.success_preserving_loss_and_grad(**{**data, "student_logits": in_place}, out=in_place)
    assert abs(in_place.double().numpy() - answer(data)[1]).max() < 1e-7


@needs_compiler
def test_what_does_not_compile_is_told_in_the_compiler_s_words() -> None:
    with pytest.raises(libraries.Unavailable, match=r"could not compile the kernels: spod\.cpp:1:1: error: "):
        libraries.build(libraries.compiler_command(), {"spod.cpp": b"nonsense"})


def test_a_process_with_nothing_but_python_still_computes() -> None:
    """A fresh interpreter with an empty PATH, from the checkout alone."""
    program = """
import sys; sys.path.insert(0, sys.argv[1])
import torch
from paritygate.losses import spod
from paritygate.losses.buckets import DIVERGENCES, TAIL_CAP
from paritygate.losses.engines import cpp
from paritygate.losses.row_stats import RowStat
x = torch.zeros(1, 3); x[0, 0] = 1; i = torch.zeros(1, dtype=torch.int64)
print(cpp.unavailable(), float(spod.success_preserving_loss(x, x * 2, i, i, i, torch.tensor([False])).loss))
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "PATH", "PARITYGATE_KERNELS")} | {"PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(bootstrap.__file__).parents[1])],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("no C++ compiler")
    value = float(done.stdout.split()[-1])
    p, q = torch.tensor([1.0, 0, 0]).double().log_softmax(0), torch.tensor([2.0, 0, 0]).double().log_softmax(0)
    assert value == pytest.approx(float((q.exp() * (q - p)).sum()), abs=2e-7)


def test_the_enum_of_the_kernels_is_that_of_python() -> None:
    """The order in which C++ writes a row's statistics is the order in which everything else reads them."""
    names = re.search(r"enum \{ (STUDENT_MAXIMUM[\w, ]*), COLUMNS \};", (cpp.FOLDER / "rows.hpp").read_text())
    assert names
    assert {name: place for place, name in enumerate(names[1].split(", "))} == dict(RowStat.__members__)


def test_the_divergences_of_the_kernels_are_those_of_python() -> None:
    text = (cpp.FOLDER / "wide.hpp").read_text()
    assert f"enum {{ {', '.join(DIVERGENCES).upper()} }};" in text


def test_the_cap_of_the_tail_is_one_number() -> None:
    assert f"-std::expm1({TAIL_CAP:g})".replace("e-0", "e-") in (cpp.FOLDER / "truncated.cpp").read_text()
