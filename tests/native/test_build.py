"""What decides the compiled kernels is recorded, what could decide them in silence has no say, and the user is told."""

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paritygate
from paritygate import native
from paritygate.native import libraries

IMPL = Path(paritygate.__file__).parents[1]
SMALL = {"small.cpp": b'#include <cmath>\nextern "C" double root(double x) { return std::sqrt(x); }'}


def compiler() -> str | None:
    try:
        return shutil.which(libraries.compiler_command()[0])
    except native.Unavailable:
        return None


FOUND = compiler()
needs_compiler = pytest.mark.skipif(FOUND is None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice of the caller's; and what is built here is not what this session is proved with."""
    monkeypatch.setattr(libraries.bootstrap, "LIBRARIES", {})
    monkeypatch.setattr(libraries.bootstrap, "LOADED", {})
    for name in ("CXX", "PARITYGATE_KERNELS"):
        monkeypatch.delenv(name, raising=False)


@needs_compiler
def test_a_record_names_what_decides() -> None:
    record = native.build_record()
    assert record == native.build_record()
    assert record["kernels"] == "compiled"
    assert set(record) == {"kernels", "compiler", "version", "flags", "cpu", "bfloat16"}
    assert record["flags"].endswith(" ".join(libraries.FLAGS))
    assert "sha256:" in record["compiler"]


@needs_compiler
def test_a_record_says_how_bfloat16_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARITYGATE_BFLOAT16", raising=False)
    tiles = "AMX_BF16" in native.build_record()["cpu"].split()
    assert native.build_record()["bfloat16"] == ("amx tiles, rows in three parts" if tiles else "widened to float32")
    monkeypatch.setenv("PARITYGATE_BFLOAT16", "dots")
    record = native.build_record()
    here = "AVX512BF16" in record["cpu"].split()
    assert record["bfloat16"] == ("avx512_bf16 dot products" if here else "widened to float32")


@needs_compiler
@pytest.mark.parametrize("flag", ["-ffast-math", "-O3", "-DEXTRA", "-march=x86-64-v2"])
def test_a_flag_in_cxx_is_another_record(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.build_record()
    monkeypatch.setenv("CXX", f"{FOUND} {flag}")
    assert flag in native.build_record()["flags"].split()
    assert native.build_record() != before


@needs_compiler
def test_a_wrapper_is_another_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may edit the source on its way, and call itself by any version."""
    before = native.build_record()
    wrapper = tmp_path / Path(FOUND or "").resolve().name
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(FOUND or "")} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    after = native.build_record()
    assert {name for name in before if before[name] != after[name]} == {"compiler"}


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PARITYGATE_KERNELS": "off"}, "off: PARITYGATE_KERNELS=off"),
        ({"CXX": "/nonexistent/c++"}, "off: /nonexistent/c++ cannot be run"),
        ({"PATH": ""}, "off: no C++ compiler: none of c++, g++, clang++ is on PATH, and CXX is not set"),
    ],
)
def test_off_has_a_reason(variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert native.build_record() == {"kernels": reason}


def test_a_record_needs_no_torch() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); from paritygate import native; native.build_record()"
    check = "; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program + check, str(IMPL)], timeout=120, check=True)


@needs_compiler
def test_a_compiler_makes_the_same_bytes_again() -> None:
    """So the digest of a library tells whether it is the one that was tested."""
    assert libraries.build(libraries.compiler_command(), SMALL) == libraries.build(libraries.compiler_command(), SMALL)


@needs_compiler
def test_a_compiler_that_writes_debug_information_makes_the_same_bytes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the folder, which is another one each time: `zig c++` writes it without being asked."""
    monkeypatch.setenv("CXX", f"{FOUND} -ggdb3")
    command = libraries.compiler_command()
    assert "-ggdb3" in command
    assert libraries.build(command, SMALL) == libraries.build(command, SMALL)


@needs_compiler
def test_what_is_opened_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITYGATE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "small.cpp"
    source.write_bytes(SMALL["small.cpp"])
    made = libraries.build(libraries.compiler_command(), SMALL)
    for _ in range(2):  # built, and from the cache
        libraries.bootstrap.LIBRARIES.clear()
        libraries.load(source)
        assert {"small.cpp": hashlib.sha256(made).hexdigest()} == libraries.bootstrap.LIBRARIES


@needs_compiler
@pytest.mark.parametrize("name", ["CPATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "LIBRARY_PATH"])
def test_the_environment_has_no_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with another <cmath>, another assembler and another C library before those of the compiler."""
    expected = libraries.build(libraries.compiler_command(), SMALL)
    (tmp_path / "cmath").write_text("namespace std { double sqrt(double) { return 7; } }\n")
    for tool in ("as", "cc1plus", "ld", "collect2"):
        (tmp_path / tool).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    (tmp_path / "libstdc++.so").write_text("nonsense")
    monkeypatch.setenv(name, f"{tmp_path}{os.sep}")
    assert libraries.build(libraries.compiler_command(), SMALL) == expected


@needs_compiler
def test_a_compilation_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libraries, "_announced", set())
    monkeypatch.setenv("PARITYGATE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "small.cpp"
    source.write_bytes(SMALL["small.cpp"])
    with caplog.at_level(logging.WARNING):
        libraries.load(source)
        libraries.load(source)  # from the cache
    assert caplog.messages == [
        f"paritygate: compiling small.cpp with {libraries.compiler_command()[0]}, which takes some seconds"
    ]


def test_a_missing_compiler_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libraries, "_announced", set())
    monkeypatch.setenv("PATH", "")
    source = tmp_path / "small.cpp"
    source.write_bytes(SMALL["small.cpp"])
    for _ in range(2):
        with pytest.raises(native.Unavailable), caplog.at_level(logging.WARNING):
            libraries.load(source)
    (message,) = caplog.messages
    assert message.startswith("paritygate: no C++ compiler: none of c++, g++, clang++ is on PATH")
    assert "torch computes what small.cpp would" in message


def test_kernels_that_are_off_are_off_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PARITYGATE_KERNELS", "off")
    with pytest.raises(native.Unavailable), caplog.at_level(logging.DEBUG):
        libraries.load(tmp_path / "small.cpp")
    assert caplog.messages == []
