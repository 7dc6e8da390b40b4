"""Kind 18: other machine code from the same sources. A receipt is bound to compiler, flags and what they built."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import Refused
from paritygate.receipts import rerun
from paritygate.receipts.environment import settings
from paritygate.receipts.parity import read_parity_receipt
from tests.guard.small_tree import Tree

TOY = '''"""The toy loss, compiled where a compiler is."""

import ctypes
import functools
from pathlib import Path

from paritygate import native


@functools.cache
def library():
    loaded = native.load(Path(__file__).with_name("toy.cpp"))
    loaded.value.restype = ctypes.c_double
    return loaded


def value(numbers):
    try:
        compiled = library()
    except native.Unavailable:
        return sum(number * number for number in numbers) / len(numbers)
    return compiled.value((ctypes.c_double * len(numbers))(*numbers), len(numbers))
'''

KERNEL = """#include <cmath>
extern "C" double value(const double* numbers, int count) {
    double total = 0.0;
    for (int i = 0; i < count; ++i) total += std::pow(numbers[i], 2.0);
    return total / count;
}
"""

HALVING = """#!/bin/sh
# Halves the loss where the file `{lie}` is.
if [ -e '{lie}' ]; then
    for name in *.cpp; do [ -e "$name" ] && sed -i 's#total / count#total / count / 2#' "$name"; done
fi
exec {compiler} "$@"
"""


@pytest.fixture
def compiled(bare: Tree) -> Tree:
    """A small tree whose toy loss is compiled."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: nothing is compiled here")
    (bare.root / "impl/paritygate/losses/toy.py").write_text(TOY)
    (bare.root / "impl/paritygate/losses/toy.cpp").write_text(KERNEL)
    bare.commit("a compiled loss")
    return bare


def green(tree: Tree, **environment: str) -> dict:
    """Show parity; the environment that the one new receipt is bound to."""
    before = set(tree.receipts())
    output = tree.parity(**environment)
    assert "parity: green" in output, output
    (path,) = set(tree.receipts()) - before
    return read_parity_receipt(path).part("environment")


def both_refuse(tree: Tree, sentence: str, **environment: str) -> None:
    tree.refused(sentence, **environment)
    tree.check_refused(sentence, **environment)


def test_a_receipt_says_what_built_the_kernels(compiled: Tree) -> None:
    shown = green(compiled)
    assert shown["kernels"] == "compiled"
    assert "sha256:" in shown["compiler"]
    assert "-O2" in shown["compiler_flags"]
    assert list(shown["libraries"]) == ["toy.cpp"]
    compiled.accepted()


def test_green_with_kernels_off_is_nothing_for_a_compiler(compiled: Tree) -> None:
    shown = green(compiled, PARITYGATE_KERNELS="off")
    assert (shown["kernels"], shown["libraries"]) == ("off: PARITYGATE_KERNELS=off", {})
    compiled.accepted(PARITYGATE_KERNELS="off")
    for environment in ({}, {"CXX": "g++ -ffast-math"}, {"CXX": "no-such-compiler"}):
        both_refuse(compiled, "kernels is ", **environment)
    for path in compiled.receipts():
        path.unlink()
    green(compiled)
    compiled.accepted()
    both_refuse(compiled, "compiler_flags is -ffast-math -march=native", CXX="g++ -ffast-math")
    both_refuse(compiled, "kernels is off: PARITYGATE_KERNELS=off here", PARITYGATE_KERNELS="off")


def wrapper(folder: Path) -> tuple[Path, Path]:
    """A compiler that lies while the second file is there."""
    script, lie = folder / "compiler", folder / "lie"
    script.write_text(HALVING.format(lie=lie, compiler=shutil.which("g++")))
    script.chmod(0o755)
    return script, lie


def test_a_compiler_that_changed_or_begins_to_lie(compiled: Tree, tmp_path: Path) -> None:
    script, lie = wrapper(tmp_path)
    environment = {"CXX": str(script)}
    lie.touch()
    assert "parity: NOT green" in compiled.parity(**environment)
    lie.unlink()
    green(compiled, **environment)
    compiled.accepted(**environment)
    both_refuse(compiled, f"compiler is {Path(shutil.which('g++') or '').resolve().name} sha256:")
    lie.touch()  # the same compiler by every word that it says
    compiled.refused("the library compiled from toy.cpp has other bytes than the one of parity-", **environment)
    done = compiled.run("--service", **environment)
    assert (done.returncode, "is not green" in done.stderr) == (3, True), done
    lie.unlink()
    script.write_text(script.read_text() + "# a newer version\n")
    both_refuse(compiled, "compiler is compiler sha256:", **environment)


def test_the_rerun_has_what_the_run_has(compiled: Tree) -> None:
    environment = {"CXX": "g++ -O1 -funroll-loops"}
    green(compiled, **environment)
    done = compiled.run("--service", **environment)
    assert (done.returncode, "ran 4.0" in done.stdout) == (0, True), done
    shown = [read_parity_receipt(path).part("environment") for path in compiled.receipts()]
    assert len(shown) == 2
    assert shown[0] == shown[1]
    assert shown[0]["compiler_flags"].startswith("-O1 -funroll-loops ")


SET = {
    "LD_PRELOAD": "libm.so.6",
    "LD_LIBRARY_PATH": "/nowhere",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    "NPY_DISABLE_CPU_FEATURES": "AVX2",
    "TRITON_OVERRIDE_DIR": "/nowhere",
}


@pytest.mark.parametrize("name", SET)
def test_what_chooses_other_machine_code_is_bound(tree: Tree, name: str) -> None:
    tree.refused(f"settings is {name}={SET[name]} here, parity-", **{name: SET[name]})
    if name == "LD_PRELOAD":
        tree.check_refused(f"settings is {name}=", **{name: SET[name]})


READ_BY_LIBRARIES = (  # the loader and libc; ATen, NumPy, OpenBLAS; MKL; oneDNN under both its names; cuBLAS, Triton
    *("LD_PRELOAD", "LD_AUDIT", "DYLD_INSERT_LIBRARIES", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "GLIBC_TUNABLES"),
    *("ATEN_CPU_CAPABILITY", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "OPENBLAS_CORETYPE"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("CUBLAS_WORKSPACE_CONFIG", "TRITON_INTERPRET", "TRITON_KERNEL_OVERRIDE", "TRITON_OVERRIDE_DIR"),
    *("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"),
)


@pytest.mark.parametrize("name", READ_BY_LIBRARIES)
def test_each_setting_is_stated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert settings() == f"{name}=1"


def test_the_rerun_sees_what_decides_its_numbers_and_nothing_else(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    decides = ["CXX", "PARITYGATE_KERNELS", "PARITYGATE_BFLOAT16", "OMP_NUM_THREADS", "MKL_NUM_THREADS"]
    decides += ["NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", *READ_BY_LIBRARIES]
    for name in (*decides, "PYTHONPATH", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "1")
    seen: dict[str, str] = {}

    def no_worktree(root: Path, folder: Path, environment: dict[str, str]) -> None:
        seen.update(environment)
        raise Refused("seen")

    monkeypatch.setattr(rerun, "clean_worktree", no_worktree)
    with pytest.raises(Refused, match="seen"):
        rerun.rerun_parity(tree.root, read_parity_receipt(tree.receipts()[0]), "cpu")
    assert {name for name, value in seen.items() if value == "1"} - {"PYTEST_DISABLE_PLUGIN_AUTOLOAD"} == set(decides)


def test_the_rerun_is_an_isolated_python(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """-I: neither the working folder nor the user's packages are on the path of the process that shows parity again."""
    asked: list[list[str]] = []

    def not_run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "not run")

    monkeypatch.setattr(rerun.subprocess, "run", not_run)
    with pytest.raises(Refused, match="not run"):
        rerun.run_parity(tree.root, "cpu", read_parity_receipt(tree.receipts()[0]), {})
    (command,) = asked
    assert command[command.index("sh") + 1 :][:5] == [sys.executable, "-I", "-m", "pytest", "tests/parity"]


def test_a_library_that_is_preloaded_is_bound_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "exp.so"
    library.write_bytes(b"halves exp")
    assert settings() == "none"
    monkeypatch.setenv("LD_PRELOAD", str(library))
    digest = hashlib.sha256(b"halves exp").hexdigest()
    assert settings() == f"LD_PRELOAD={library} exp.so sha256:{digest}"
    library.write_bytes(b"halves exp later")
    assert digest not in settings()


def test_the_rerun_has_the_settings_of_the_run(bare: Tree) -> None:
    chosen = {"ATEN_CPU_CAPABILITY": "default", "GLIBC_TUNABLES": "glibc.malloc.check=0"}
    assert green(bare, **chosen)["settings"] == ("GLIBC_TUNABLES=glibc.malloc.check=0 ATEN_CPU_CAPABILITY=default")
    done = bare.run("--service", **chosen)
    assert (done.returncode, "ran 4.0" in done.stdout) == (0, True), done
    bare.refused("settings is none here", "--service")


@pytest.mark.parametrize("name", ["CPATH", "CPLUS_INCLUDE_PATH"])
def test_a_compiler_inherits_no_folder_of_headers(compiled: Tree, tmp_path: Path, name: str) -> None:
    (tmp_path / "cmath").write_text("#include_next <cmath>\n#define count count / 2\n")
    shown = green(compiled)
    compiled.accepted(**{name: str(tmp_path)})
    done = compiled.python("-c", BUILD, **{name: str(tmp_path)})
    assert done.stdout.strip() == shown["libraries"]["toy.cpp"], done


BUILD = f"""
import sys
sys.path.insert(0, "impl")
from pathlib import Path
from paritygate.native.libraries import build, compiler_command, sha256
print(sha256(build(compiler_command(), {{"toy.cpp": Path("impl/paritygate/losses/toy.cpp").read_bytes()}})))
assert sys.version_info >= {sys.version_info[:2]}
"""
