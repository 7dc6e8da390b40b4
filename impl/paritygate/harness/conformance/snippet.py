"""A program of a departure that needs the project and NumPy alone: the adapter's own text, the input, both numbers."""

import re
from typing import Any

OURS = re.compile(r"^from paritygate\.harness import Unsupported$", re.MULTILINE)


def snippet(module: str, source: str, row: dict[str, Any]) -> str:
    """The program for a row with a smallest input. An adapter of several files is imported by its name."""
    adapter = OURS.sub("class Unsupported(NotImplementedError):\n    pass\n", source) if source else ""
    names = [f"from {module} import {row['loss'].partition('.')[0]}"] if not source else []
    arrays: list[str] = []
    calls: list[str] = []
    leaf = "gradient" in row["smallest"]["defined"] or "gradient" in row["smallest"]["theirs"]
    first = next(iter(row["smallest"]["input"]))
    for name, value in row["smallest"]["input"].items():
        if not isinstance(value, list):
            calls.append(f"{name}={literal(value)}")
            continue
        dtype = "" if integers(value) else f".to(torch.{row['dtype']})"
        grad = ".requires_grad_()" if leaf and name == first else ""
        arrays.append(f"{name} = torch.from_numpy(np.array({literal(value)})){dtype}{grad}")
        keyword = name == "importance_ratio" or (name == "mask" and row["loss"].startswith("kl_estimators."))
        calls.append(f"{name}={name}" if keyword else name)
    calls.sort(key=lambda call: "=" in call)
    shown = [f"value = {row['loss']}({', '.join(calls)})"]
    shown += ['value = getattr(value, "loss", value)'] if row["loss"].startswith("spod.") else []
    shown += ['print("theirs:", value.tolist())']
    if leaf:
        shown.append(f'print("gradient:", torch.autograd.grad(value.sum(), {first}, allow_unused=True)[0])')
    shown += [f"# theirs, as measured: {row['smallest']['theirs']}", f"# defined: {row['smallest']['defined']}"]
    return (
        "\n".join([adapter.rstrip(), "", "import numpy as np", "import torch", *names, "", *arrays, *shown]).lstrip()
        + "\n"
    )


def integers(value: Any) -> bool:
    """Whether nested lists hold whole numbers alone: a mask."""
    return all(map(integers, value)) if isinstance(value, list) else isinstance(value, int)


def literal(value: Any) -> str:
    """Python for nested numbers, of which infinities and NaN are strings, or for an option."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return f"np.{value}" if value in ("nan", "inf") else "-np.inf" if value == "-inf" else repr(value)
