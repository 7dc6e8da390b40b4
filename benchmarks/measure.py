"""Interleaved timing, floors and memory: what the benchmarks share. Ratios of medians from one run, A B A B."""

import gc
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "impl"))
import torch

Run = Callable[[], object]


def machine(device: str) -> str:
    """The card, or the processor and how many threads torch uses of it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    names = [line.partition(":")[2].strip() for line in read("/proc/cpuinfo").splitlines() if "model name" in line]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def timed(run: Run, device: str) -> float:
    """Seconds of one call."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def interleaved(runs: dict[str, Run], repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each, after one call to warm up, all of them in turn `repeats` times."""
    return {name: statistics.median(times) for name, times in all_times(runs, repeats, device).items()}


def all_times(runs: dict[str, Run], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of every call of each, as `interleaved` has them."""
    for run in runs.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            taken[name].append(timed(run, device))
    return taken


def extra_bytes(run: Run, device: str) -> int | None:
    """How far memory rises above what is held before the call, while it runs; None where this cannot be asked."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - held
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    except OSError:
        return None
    held = resident("VmRSS")
    run()
    return resident("VmHWM") - held


def resident(field: str) -> int:
    (line,) = [line for line in read("/proc/self/status").splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def peer(module: str, name: str) -> Any:
    """`name` of an installed peer's module, or None: peers are never required."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RuntimeError) as error:
        print(f"  {module} is left out: {str(error).strip().splitlines()[0]}")
        return None


def peer_file(package: str, path: str, unused: dict[str, str] | None = None) -> ModuleType | None:
    """One file of a peer whose package cannot be imported whole here, loaded alone; None where it is not installed.

    `unused`: modules of the package that the file imports a name from which what is measured does not call.
    """
    spec = importlib.util.find_spec(package)
    file = Path(str(spec.origin)).parent / path if spec and spec.origin else None
    if file is None or not file.is_file():
        print(f"  {package} is left out: it is not installed")
        return None
    root = f"_{package}_alone"
    name = f"{root}.{path.removesuffix('.py').replace('/', '.')}"
    for inner in (name, *(f"{root}.{other}" for other in unused or ())):
        for i in range(inner.count(".")):
            parent = ModuleType(inner.rsplit(".", i + 1)[0])
            parent.__path__ = []
            sys.modules.setdefault(parent.__name__, parent)
    for other, attribute in (unused or {}).items():
        sys.modules[f"{root}.{other}"] = ModuleType(f"{root}.{other}")
        setattr(sys.modules[f"{root}.{other}"], attribute, None)
    loader = importlib.util.spec_from_file_location(name, file)
    assert loader
    assert loader.loader
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def agree(what: str, ours: Any, theirs: Any, tolerance: float) -> None:
    """Stops the benchmark where two results differ by more than `tolerance` of the largest entry, before any number."""
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (ours, theirs))
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= tolerance:
        sys.exit(
            f"{what}: results differ by {difference:.2g} of the largest, {tolerance:.2g} is allowed: nothing is timed"
        )


def table(rows: list[dict[str, Any]]) -> str:
    """Columns aligned, numbers to three digits."""
    names = list(rows[0])
    text = [names] + [
        [f"{v:.3g}" if isinstance(v, float) else "-" if v is None else str(v) for v in r.values()] for r in rows
    ]
    widths = [max(len(line[i]) for line in text) for i in range(len(names))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in text
    ]
    return "\n".join(lines)


def save(path: str | None, record: dict[str, Any]) -> None:
    """The whole record as JSON, where a path is given."""
    if path:
        Path(path).write_text(json.dumps(record, indent=2) + "\n")
        print(f"written to {path}")
