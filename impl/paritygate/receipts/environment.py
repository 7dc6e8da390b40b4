"""Versions, device and settings that a proof holds for, read without importing torch where torch is not loaded."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from paritygate.bootstrap import LIBRARIES
from paritygate.errors import BadInputError, Refused
from paritygate.native import build_record
from paritygate.receipts.files import sha256_file
from paritygate.spec.losses import device_class, device_index

KERNELS = ("kernels", "compiler", "compiler_version", "compiler_flags", "cpu", "bfloat16")
DECIDING = ("device", "torch", "cuda", "gpu", "driver", "matmul_precision", "settings", *KERNELS)
"""Entries of `environment` that must be equal for a receipt to hold."""

PRELOADED = ("LD_PRELOAD", "LD_AUDIT", "DYLD_INSERT_LIBRARIES")
SETTINGS = (
    *PRELOADED,
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "GLIBC_TUNABLES"),
    *("ATEN_CPU_CAPABILITY", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "OPENBLAS_CORETYPE"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("CUBLAS_WORKSPACE_CONFIG", "TRITON_INTERPRET", "TRITON_KERNEL_OVERRIDE", "TRITON_OVERRIDE_DIR"),
    *("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"),
)
"""Variables that put other machine code in the place of what was shown, or choose another variant of it."""


def installed(root: Path) -> dict[str, str]:
    """Version of Python and of every distribution that pyproject.toml names (`absent` where not installed)."""
    project = tomllib.loads((root / "pyproject.toml").read_text()).get("project", {})
    requirements = [*project.get("dependencies", [])]
    for extra in project.get("optional-dependencies", {}).values():
        requirements.extend(extra)
    names = {re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0].lower() for requirement in requirements}
    return {"python": platform.python_version()} | {name: version_of(name) for name in sorted(names)}


def version_of(name: str) -> str:
    """The version of an installed distribution, or `absent`: a folder without metadata, which pip leaves, is none."""
    for distribution in importlib.metadata.distributions(name=name):
        metadata: Any = distribution.metadata  # None or empty where its file is missing, by the version of Python
        version = metadata["Version"] if metadata is not None and "Version" in metadata else None
        if version:
            return str(version)
    return "absent"


def environment(device: str) -> dict[str, Any]:
    """What decides (device, torch, cuda, gpu, driver, matmul_precision, settings, what builds the kernels), and more.

    Information: threads, python, platform. `libraries` holds the digest of each native library that this process has
    opened: a run has to open the same.
    """
    kind = device_class(device)
    torch_version, cuda = torch_build()
    gpu, driver = nvidia(device) if kind == "cuda" else ("none", "none")
    return {
        "device": kind,
        "torch": torch_version,
        "cuda": cuda,
        "gpu": gpu,
        "driver": driver,
        "matmul_precision": matmul_precision(),
        "settings": settings(),
        **kernels(),
        "libraries": dict(sorted(LIBRARIES.items())),
        "threads": threads(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def kernels() -> dict[str, str]:
    """What decides the bytes of the C++ kernels here: compiler, its version and flags, CPU; or `off: why`."""
    record = build_record()
    names = ("kernels", "compiler", "version", "flags", "cpu", "bfloat16")
    return {key: record.get(name, "none") for key, name in zip(KERNELS, names, strict=True)}


def require_device(device: str) -> None:
    """Raise BadInputError where torch cannot use `device` here, and for what is no device."""
    if device_class(device) == "cpu":
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_index(device) >= count:
        raise BadInputError(
            f"--device {device}: CUDA is unavailable (torch {torch.__version__} finds {count} devices); "
            "--device cpu runs here."
        )


def torch_build() -> tuple[str, str]:
    """Version of the installed torch with its local part (`2.13.0+cpu`) and the CUDA it is built for (or `none`)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Refused("torch is not installed here: a receipt holds for one version of it.")
    text = Path(spec.origin).with_name("version.py").read_text()
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: [^=]*)? = '([^']+)'", text, re.MULTILINE)
    return version[1] if version else importlib.metadata.version("torch"), cuda[1] if cuda else "none"


def nvidia(device: str) -> tuple[str, str]:
    """Name of the GPU and version of its driver, from nvidia-smi; raises Refused when there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        name, driver = lines[visible_index(device, len(lines))].rsplit(",", 1)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise Refused(
            f"no CUDA device can be named here (nvidia-smi: {error}): a receipt holds for one GPU."
        ) from error
    return name.strip(), driver.strip()


def visible_index(device: str, count: int) -> int:
    """Index of the physical GPU behind a torch device string, CUDA_VISIBLE_DEVICES considered."""
    index = device_index(device)
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if visible and visible[index].isdigit():
        return int(visible[index])
    return index if index < count else 0


def matmul_precision() -> str:
    """torch's float32 matmul precision: as set where torch is loaded, else what a fresh process would have."""
    torch = sys.modules.get("torch")
    current = str(torch.get_float32_matmul_precision()) if torch is not None else "highest"
    overrides = [
        f"{name}={os.environ[name]}"
        for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
        if os.environ.get(name)
    ]
    return " ".join([current, *overrides])


def settings() -> str:
    """The variables of SETTINGS that are set, `NAME=VALUE`, with the digest of each file that is preloaded; or none."""
    stated = [f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)]
    for name in PRELOADED:
        for path in re.split(r"[ :]+", os.environ.get(name, "")):
            if os.path.isfile(path):
                stated.append(f"{os.path.basename(path)} sha256:{sha256_file(path)}")
    return " ".join(stated) or "none"


def threads() -> int:
    """Threads of a torch operation: as set where torch is loaded, else from OMP_NUM_THREADS or the number of cores."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    declared = os.environ.get("OMP_NUM_THREADS", "")
    return int(declared) if declared.isdigit() else (os.cpu_count() or 1)
