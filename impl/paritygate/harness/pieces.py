"""The five pieces of a new loss: spec entry, reference, implementation, parity test, mutant; all fail until filled."""

import json
import re
from pathlib import Path
from typing import Any

from paritygate.errors import BadInputError
from paritygate.spec.project import Project
from paritygate.spec.strict import parse_json, read_plain

REFERENCE = '''"""NAME in float64: what it means. Source: TODO (paper and equation)."""

import numpy as np


def loss(logprobs: np.ndarray, mask: np.ndarray) -> float:
    """TODO: the formula. logprobs: (T,) nats; mask: (T,) of 0 and 1. In nats.

    Obligations: NAME/value, NAME/gradient.
    """
    raise NotImplementedError("NAME has no definition yet: write the formula here")
'''

IMPLEMENTATION = '''"""NAME in torch: what runs."""

import torch
from torch import Tensor


def loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """TODO: the same, differentiable. logprobs: (T,) nats; mask: (T,) of 0 and 1. A scalar, in nats.

    Obligations: NAME/value, NAME/gradient.
    """
    raise NotImplementedError("NAME has no implementation yet")
'''

PARITY = '''"""NAME against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paritygate.harness import compare
from paritygate.harness.strategies import rounded, seeded, tensor
from PACKAGE import NAME as reference


@pytest.mark.obligation("NAME/value", "NAME/gradient")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_value_and_gradient(losses, device, dtype):
    @settings(max_examples=50)
    @given(st.data())
    def value_and_gradient_are_the_reference_s(data):
        rng = seeded(data.draw, dtype, "ordinary")
        logprobs = rounded(-rng.exponential(size=6), dtype)
        mask = (rng.random(6) < 0.7).astype(np.int64)
        leaf = tensor(logprobs, dtype, device).requires_grad_()
        value = losses.NAME.loss(leaf, torch.tensor(mask, device=device))
        compare("NAME/value", value, reference.loss(logprobs, mask), dtype=dtype)
        (gradient,) = torch.autograd.grad(value, leaf)
        raise NotImplementedError("hold the gradient to the definition's: compare('NAME/gradient', gradient, ...)")

    value_and_gradient_are_the_reference_s()
'''

MUTANT = '''"""Known mistakes in NAME: each dies by the obligation that it names (paritygate harness mutants)."""

from paritygate.harness.mutants import Mutant

MUTANTS = (
    Mutant(
        "mask-forgotten",
        "masked tokens count",
        "NAME/value",
        "FILE",
        "TODO: a text that stands in FILE once",
        "TODO: the text of the mistake",
    ),
)
'''

NAMED_FILE = re.compile(r'"([\w./-]+\.(?:py|cpp|hpp))"')

TOLERANCES = [
    {"dtype": "float64", "device": "any", "regime": "ordinary", "rtol": 1e-9, "atol": 1e-12},
    {"dtype": "float32", "device": "any", "regime": "ordinary", "rtol": 1e-5, "atol": 1e-7},
]


def write_pieces(project: Project, name: str) -> list[str]:
    """Write the five pieces of the loss `name` and return their paths; raises BadInputError, nothing written.

    The name is a Python identifier in small letters that the spec does not have.
    """
    if not (name.isidentifier() and name == name.lower() and not name.startswith("_")):
        raise BadInputError(f"{name!r} is no name for a loss: a Python identifier in small letters, such as gspo.")
    path = project.root / project.spec
    try:
        spec: dict[str, Any] = parse_json(read_plain(path)) if path.exists() else {"version": 1, "losses": {}}
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} cannot be used ({error}).") from error
    if name in spec["losses"]:
        raise BadInputError(f"{project.spec} has a loss {name!r} already.")
    implementation = f"{project.implementation}/{name}.py"
    package = Path(project.reference).name
    target = Path(implementation).relative_to(mutants_base(project)).as_posix()
    pieces = {
        f"{project.reference}/{name}.py": REFERENCE,
        implementation: IMPLEMENTATION,
        f"{project.tests}/test_{name}.py": PARITY,
        f"{mutants_folder(project)}/{name}.py": MUTANT,
    }
    if there := next((file for file in pieces if (project.root / file).exists()), None):
        raise BadInputError(f"{there} is there already: nothing was written.")
    spec["losses"][name] = {
        "title": name,
        "source": "TODO: paper and equation",
        "functions": ["loss"],
        "obligations": {
            f"{name}/value": {
                "claim": "The loss is the definition's.",
                "min_comparisons": 100,
                "tolerances": TOLERANCES,
            },
            f"{name}/gradient": {
                "claim": "Its gradient is the definition's.",
                "min_comparisons": 100,
                "tolerances": TOLERANCES,
            },
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(with_entry(path, spec, name))
    for file, text in pieces.items():
        (project.root / file).parent.mkdir(parents=True, exist_ok=True)
        (project.root / file).write_text(text.replace("NAME", name).replace("PACKAGE", package).replace("FILE", target))
    for folder in (project.reference, project.implementation):
        (project.root / folder / "__init__.py").touch()
    return [project.spec, *pieces]


def with_entry(path: Path, spec: dict[str, Any], name: str) -> str:
    """The text of the spec with the new entry last, what stands there untouched where the losses end the file."""
    text = path.read_text("utf-8").rstrip() if path.exists() else ""
    if text.endswith("}"):
        inner = text[:-1].rstrip()[:-1].rstrip()
        entry = json.dumps({name: spec["losses"][name]}, indent=1)[1:-1].rstrip().replace("\n", "\n ")
        candidate = f"{inner},{entry}\n }}\n}}\n"
        try:
            if json.loads(candidate) == spec:
                return candidate
        except ValueError:
            pass
    return json.dumps(spec, indent=1) + "\n"


def mutants_base(project: Project) -> str:
    """The folder that the mutants already there name their files from, relative to the root: "." where none is.

    Of the root and the folders between it and the losses, the one below which most of the named files lie.
    """
    texts = [path.read_text("utf-8") for path in (project.root / mutants_folder(project)).glob("*.py")]
    names = {name for text in texts for name in NAMED_FILE.findall(text)}
    implementation = Path(project.implementation)
    folders = [Path("."), *reversed(implementation.parents[:-1]), implementation]
    return max(folders, key=lambda folder: sum((project.root / folder / name).is_file() for name in names)).as_posix()


def mutants_folder(project: Project) -> str:
    """Where the mutants of the losses lie: beside the folder of the parity tests."""
    return f"{Path(project.tests).parent.as_posix()}/mutants"
