"""Which compiler, flags and CPU decide the compiled kernels: what a receipt binds to."""

import hashlib
import re
import shutil
from pathlib import Path

from paritygate.native.libraries import (
    FLAGS,
    TILES_REFUSED,
    Unavailable,
    bfloat16_asked,
    compiler_command,
    kernels_off,
    predefined_macros,
)

INSTRUCTION_SETS = re.compile(
    rb"^#define __(AMX\w*|AVX\w*|SSE\w*|FMA|F16C|ARM_NEON|ARM_FEATURE_\w+)__ 1$", re.MULTILINE
)


def build_record() -> dict[str, str]:
    """What decides the bytes of the compiled kernels here, without compiling them; no torch is imported.

    `kernels`: "compiled", or "off: REASON", then alone. `compiler`: the name and sha256 of its executable. `version`:
    what it calls itself. `flags`: all that it is given. `cpu`: the instruction sets that it found, and the sha256 of
    every macro that it defines by itself. `bfloat16`: how the embedded server multiplies it, "amx tiles, rows in three
    parts", "avx512_bf16 dot products" or "widened to float32" (with why the tiles were refused, once they were).
    """
    try:
        kernels_off()
        command = compiler_command()
        macros = predefined_macros(command)
        executable = Path(shutil.which(command[0]) or command[0]).resolve()
        digest = hashlib.sha256(executable.read_bytes()).hexdigest()
    except (Unavailable, OSError) as reason:
        return {"kernels": f"off: {reason}"}
    version = re.search(rb'^#define __VERSION__ "(.*)"$', macros, re.MULTILINE)
    sets = sorted(name.decode() for name in INSTRUCTION_SETS.findall(macros))
    return {
        "kernels": "compiled",
        "compiler": f"{executable.name} sha256:{digest}",
        "version": version[1].decode(errors="replace") if version else "unknown",
        "flags": " ".join((*command[1:], *FLAGS)),
        "cpu": f"{' '.join(sets)} macros sha256:{hashlib.sha256(macros).hexdigest()}",
        "bfloat16": _way(sets),
    }


def _way(sets: list[str]) -> str:
    asked = bfloat16_asked()
    if asked == "dots" and "AVX512BF16" in sets:
        return "avx512_bf16 dot products"
    if asked in ("dots", "widened") or not {"AMX_TILE", "AMX_BF16"} <= set(sets):
        return "widened to float32"
    return f"widened to float32 ({TILES_REFUSED[0]})" if TILES_REFUSED else "amx tiles, rows in three parts"
