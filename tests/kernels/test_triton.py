"""The Triton rows without a GPU: interpreted against the reference, compiled ahead of time for three generations."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paritygate
from tests.counts import SOAK

pytest.importorskip("triton", reason="Triton is not installed here")
IMPL = Path(paritygate.__file__).parents[1]


def test_interpreted_against_the_reference() -> None:
    """Triton decides at its import whether to interpret, so this is a process of its own."""
    file = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True, text=True, timeout=600, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 84, done.stdout[-500:]


KERNELS = (
    "statistics_kernel", "gradient_kernel", "divergence_kernel", "divergence_gradient_kernel", "truncated_kernel",
    "truncated_gradient_kernel",
)  # fmt: skip
COMPILE = """
import os, sys, tempfile, subprocess, json
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
sys.path.insert(0, sys.argv[1])
import triton.backends.nvidia as nvidia
from triton import compile as compile_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paritygate.losses.engines.triton import divergence as triton_divergence
from paritygate.losses.engines.triton import rows as triton_rows

LOGITS = {"p_ptr", "q_ptr", "out_ptr"}
def kind(name, kernel, dtype):
    if name in LOGITS and not (kernel == "statistics_kernel" and name == "out_ptr"):
        return "*" + dtype
    known = {"a_ptr": "*i64", "read_ptr": "*u8", "kept_ptr": "*i64", "room_ptr": "*i32",
             "WIDE": "constexpr", "KIND": "constexpr"}
    return known.get(name, "*fp64" if name.endswith("_ptr") else "i32")

for capability in json.loads(sys.argv[2]):
    for dtype in json.loads(sys.argv[3]):
        for name in json.loads(sys.argv[4]):
            module = triton_rows if hasattr(triton_rows, name) else triton_divergence
            kernel = getattr(module, name)
            signature = {x: kind(x, name, dtype) for x in kernel.arg_names}
            fixed = {"WIDE": module.BLOCK[name] if module is triton_rows else module.BLOCK}
            fixed |= {"KIND": 2} if "KIND" in kernel.arg_names else {}
            source = ASTSource(kernel, signature, constexprs=fixed)
            made = compile_for(source, target=GPUTarget("cuda", capability, 32), options=module.OPTIONS)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(made.asm["cubin"]), file.flush()
                tool = os.path.join(os.path.dirname(nvidia.__file__), "bin", "cuobjdump")
                usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
            print(capability, dtype, name, usage.stdout.replace(chr(10), " "))
"""


def test_compiles_for_ampere_hopper_and_blackwell_without_spills() -> None:
    """Cubins by the ptxas that comes with Triton; registers are what bounds the warps of a core. No GPU is asked."""
    dtypes = ["fp32", "bf16", "fp16"] if SOAK else ["bf16"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(IMPL), *map(json.dumps, ([80, 90, 100], dtypes, KERNELS))],
        capture_output=True, text=True, timeout=600, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * len(KERNELS) * len(dtypes)
    for line in lines:
        print(line)
        registers, stack, local = (int(re.search(rf"{x}:(\d+)", line)[1]) for x in ("REG", "STACK", "LOCAL"))
        assert registers <= 128, line
        assert stack == local == 0, line


POISONED = """
import os, sys, tempfile
from pathlib import Path
cache = Path(os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp()))
sys.path.insert(0, sys.argv[1])
from paritygate import bootstrap
if sys.argv[2] == "sources":
    bootstrap.LOADED["somewhere"] = "a digest"
from triton import compile as compile_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paritygate.losses.engines.triton import divergence

kernel = divergence.truncated_gradient_kernel
signature = {"p_ptr": "*fp32", "out_ptr": "*fp32", "saved_ptr": "*fp64", "scale_ptr": "*fp64", "p_stride": "i32"}
signature |= {"V": "i32", "blocks": "i32", "WIDE": "constexpr"}
source = ASTSource(kernel, signature, constexprs={"WIDE": divergence.BLOCK})
for _ in range(2):
    made = compile_for(source, target=GPUTarget("cuda", 80, 32), options=divergence.OPTIONS)
    print(made.asm["cubin"][1:4].decode())
    for path in cache.rglob("*.cubin"):
        path.write_bytes(b".BAD")
"""


@pytest.mark.parametrize(("mode", "second"), [("sources", "ELF"), ("anything", "BAD")])
def test_a_session_from_sources_alone_reads_no_kernel_from_a_cache(mode: str, second: str, tmp_path: Path) -> None:
    """Whoever can write there could hand it another kernel; elsewhere the cache is Triton's own affair."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", POISONED, str(IMPL), mode],
        capture_output=True, text=True, timeout=600, env=environment, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["ELF", second], done
