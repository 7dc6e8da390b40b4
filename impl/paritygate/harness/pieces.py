"""The five pieces of a new loss: spec entry, reference, implementation, parity test, mutant; all fail until filled."""

import json
import keyword
import re
from pathlib import Path
from typing import Any

from paritygate.errors import BadInputError
from paritygate.spec.project import Project, configuration, project_around, project_at
from paritygate.spec.strict import parse_json, read_plain

REFERENCE = '''"""NAME in float64: what it means. Source: TODO (paper and equation)."""

import numpy as np
from numpy.typing import NDArray


def loss(logprobs: NDArray[np.float64], mask: NDArray[np.int64]) -> float:
    """TODO: the formula. logprobs: (T,) nats; mask: (T,) of 0 and 1. In nats.

    Obligations: NAME/value, NAME/oracle.
    """
    raise NotImplementedError("NAME has no definition yet: write the formula here")


def grad(logprobs: NDArray[np.float64], mask: NDArray[np.int64]) -> NDArray[np.float64]:
    """d `loss` / d logprobs, (T,): TODO, written out.

    Obligations: NAME/gradient.
    """
    raise NotImplementedError("NAME has no gradient yet: write it here")
'''

IMPLEMENTATION = '''"""NAME in torch: what runs."""

from torch import Tensor


def loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """TODO: the same, differentiable. logprobs: (T,) nats; mask: (T,) of 0 and 1. A scalar, in nats.

    Obligations: NAME/value, NAME/gradient.
    """
    raise NotImplementedError("NAME has no implementation yet")
'''

PARITY = '''"""NAME against its definition, and that against 60 digits."""

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paritygate.harness import compare
from paritygate.harness.strategies import rounded, seeded, tensor
from PACKAGE import NAME as reference


@st.composite
def batches(draw, dtype):
    """Log-probabilities and a mask, (T,). TODO: the inputs at which NAME goes wrong."""
    rng = seeded(draw, dtype, "ordinary")
    tokens = draw(st.integers(1, 6))
    return rounded(-rng.exponential(size=tokens), dtype), (rng.random(tokens) < 0.7).astype(np.int64)


@pytest.mark.obligation("NAME/value", "NAME/gradient")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_value_and_gradient(losses, device, dtype):
    @settings(max_examples=100)
    @given(batches(dtype))
    def value_and_gradient_are_the_reference_s(batch):
        logprobs, mask = batch
        leaf = tensor(logprobs, dtype, device).requires_grad_()
        value = losses.NAME.loss(leaf, torch.tensor(mask, device=device))
        compare("NAME/value", value, reference.loss(*batch), dtype=dtype)
        (gradient,) = torch.autograd.grad(value, leaf)
        compare("NAME/gradient", gradient, reference.grad(*batch), dtype=dtype)

    value_and_gradient_are_the_reference_s()


def exactly(logprobs, mask):
    """NAME once more, from the formula alone; logprobs: a list of mpmath.mpf."""
    raise NotImplementedError("write the formula here")


def slopes(function, at):
    """Central differences of `function` in each entry of `at`, step 1e-20: at 60 digits good to about 40."""
    step, result = mpmath.mpf(10) ** -20, []
    for i, x in enumerate(at):
        up, down = [*at[:i], x + step, *at[i + 1 :]], [*at[:i], x - step, *at[i + 1 :]]
        result.append((function(up) - function(down)) / (2 * step))
    return result


@pytest.mark.obligation("NAME/oracle")
def test_reference_against_sixty_digits():
    @settings(max_examples=100)
    @given(batches("float64"))
    def value_and_gradient_have_sixty_digits(batch):
        logprobs, mask = batch
        with mpmath.workdps(60):
            at = [mpmath.mpf(float(x)) for x in logprobs]
            value = float(exactly(at, mask))
            gradient = [float(slope) for slope in slopes(lambda x: exactly(x, mask), at)]
        held = {"dtype": "float64", "oracle": "mpmath"}
        compare("NAME/oracle", reference.loss(*batch), value, **held)
        compare("NAME/oracle", reference.grad(*batch), gradient, **held, where="the gradient")

    value_and_gradient_have_sixty_digits()
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
    Mutant(
        "gradient-halved",
        "TODO: what a person gets wrong that the value does not show",
        "NAME/gradient",
        "FILE",
        "TODO: a text that stands in FILE once",
        "TODO: the text of the mistake",
    ),
)
'''

TABLE = """[tool.paritygate]
spec = "spec/losses.json"              # what is to be true: obligations, tolerances
reference = "reference/my_reference"   # what a loss means: float64 NumPy
implementation = "src/my_losses"       # what trains: torch
tests = "tests/parity"                 # what ties the two
receipts = "receipts"                  # what was shown
subjects = []                          # further files that a receipt is bound to, such as a lock file
"""
PYPROJECT = f"""[project]
name = "my-losses"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["paritygate", "numpy", "torch"]

{TABLE}
[tool.pytest.ini_options]
testpaths = ["tests/parity"]
pythonpath = ["src", "reference"]
addopts = "--import-mode=importlib"
"""

INNERMOST = re.compile(r"\{[^{}]*\}|\[[^][{}]*\]")
NAMED_FILE = re.compile(r'"([\w./-]+\.(?:py|cpp|hpp))"')

TODO = "TODO: why these numbers, for instance what is rounded how often; or name a class that is there."
CLASSES = {
    "NAME": {
        "because": TODO,
        "rows": [
            {"dtypes": ["float64"], "regimes": ["ordinary"], "rtol": 1e-9, "atol": 1e-12},
            {"dtypes": ["float32"], "regimes": ["ordinary"], "rtol": 1e-5, "atol": 1e-7},
        ],
    },
    "NAME_sixty_digits": {
        "because": TODO,
        "rows": [{"dtypes": ["float64"], "regimes": ["ordinary"], "rtol": 1e-12, "atol": 1e-15}],
    },
}
ENTRY = {
    "title": "NAME",
    "source": "TODO: paper and equation",
    "functions": ["loss"],
    "obligations": {
        "NAME/value": {"claim": "The loss is the definition's.", "min_comparisons": 100, "tolerances": "NAME"},
        "NAME/gradient": {"claim": "Its gradient is the definition's.", "min_comparisons": 100, "tolerances": "NAME"},
        "NAME/oracle": {
            "claim": "The float64 reference is the formula at 60 digits, value and gradient.",
            "min_comparisons": 200,
            "tolerances": "NAME_sixty_digits",
        },
    },
}


def project_for(folder: Path) -> tuple[Project, list[str]]:
    """The repository around `folder`, else a new one there: its project, and the files that were written for it.

    Raises BadInputError where `folder` has a pyproject.toml without [tool.paritygate]: somebody else's is not edited.
    """
    if any(configuration(place) is not None for place in (folder, *folder.parents)):
        return project_around(folder), []
    path = folder / "pyproject.toml"
    if path.exists():
        raise BadInputError(f"{path} has no [tool.paritygate]: it says where losses and tests lie. Add\n{TABLE}")
    path.write_text(PYPROJECT)
    return project_at(folder), [path.name]


def write_pieces(project: Project, name: str) -> list[str]:
    """Write the five pieces of the loss `name` and return their paths; raises BadInputError, nothing written.

    The name is a Python identifier in small letters that the spec does not have.
    """
    check_name(name)
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
    drafts = json.loads(json.dumps({"tolerances": CLASSES, "losses": {"NAME": ENTRY}}).replace("NAME", name))
    if there := next((kind for kind in drafts["tolerances"] if kind in spec.get("tolerances", {})), None):
        raise BadInputError(f"{project.spec} has tolerances {there!r} already.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(with_drafts(path, spec, drafts))
    for file, text in pieces.items():
        (project.root / file).parent.mkdir(parents=True, exist_ok=True)
        (project.root / file).write_text(text.replace("NAME", name).replace("PACKAGE", package).replace("FILE", target))
    for folder in (project.reference, project.implementation):
        (project.root / folder / "__init__.py").touch()
    return [project.spec, *pieces]


def check_name(name: str) -> None:
    """Raises BadInputError unless a loss can be called so."""
    usable = name.isidentifier() and not keyword.iskeyword(name)
    if not (usable and name == name.lower() and not name.startswith("_")):
        raise BadInputError(f"{name!r} is no name for a loss: a Python identifier in small letters, such as gspo.")


def with_drafts(path: Path, spec: dict[str, Any], drafts: dict[str, dict[str, Any]]) -> str:
    """The text of the spec with the drafts last in each section; what stands there stays as it stands where it can."""
    wanted = {"version": 1} | {section: spec.get(section, {}) | drafts[section] for section in ("tolerances", "losses")}
    text = path.read_text("utf-8") if path.exists() else ""
    sections = re.fullmatch(r'(.*"tolerances": \{.*\})(\s*\},\s*"losses": \{.*\})(\s*\}\s*\}\s*)', text, re.DOTALL)
    if sections:
        classes, losses, end = sections.groups()
        candidate = f"{classes},{_members(drafts['tolerances'])}{losses},{_members(drafts['losses'])}{end}"
        try:
            if json.loads(candidate) == wanted:
                return candidate
        except ValueError:
            pass
    return _short_lines(json.dumps(wanted, indent=1)) + "\n"


def _members(entries: dict[str, Any]) -> str:
    """Entries of a JSON object one level down, without its braces: a tolerance and an obligation are a line each."""
    text = json.dumps(entries, indent=1)[1:-1].rstrip().replace("\n", "\n ")
    return _short_lines(text)


def _short_lines(text: str) -> str:
    """JSON with each innermost list or object on one line."""
    return INNERMOST.sub(lambda match: re.sub(r"(?<=[\[{]) | (?=[\]}])", "", " ".join(match[0].split())), text)


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
