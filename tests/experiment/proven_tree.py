"""A checkout of its own in which parity was shown, for runs that the real guard has to let start."""

import json
import shutil
from pathlib import Path

from tests.guard.small_tree import Tree

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "constraints.txt", "tests/conftest.py")
FOLDERS = ("impl", "reference", "spec")
FEW = '''"""The losses that the experiment stands on, against their definitions, in a second."""

import pytest
import torch
from paritygate.harness import compare
from paritygate_reference import grpo, policy_gradient, sdpo

ROWS = [[-0.5, -1.25, -3.0], [-2.0, -0.125, -0.75], [-1.0, -1.0, -4.0], [-0.25, -2.5, -0.5]]


def tensor(row):
    return torch.tensor(row, dtype=torch.float64)


@pytest.mark.obligation("grpo/value")
@pytest.mark.parametrize("row", ROWS)
def test_group_mean(row, losses):
    compare("grpo/value", losses.grpo.group_mean_advantage(row), grpo.group_mean_advantage(row), dtype="float64")


@pytest.mark.obligation("policy_gradient/value")
@pytest.mark.parametrize("row", ROWS)
def test_importance_sampling(row, losses):
    arguments = row, ROWS[0], [0.5, -1.0, 0.25]
    actual = losses.policy_gradient.importance_sampling_loss(*map(tensor, arguments))
    compare("policy_gradient/value", actual, policy_gradient.importance_sampling_loss(*arguments), dtype="float64")


@pytest.mark.obligation("sdpo/token_advantage")
@pytest.mark.parametrize("row", ROWS)
def test_token_advantage(row, losses):
    actual = losses.sdpo.token_advantage(tensor(row), tensor(ROWS[0]), [1, 0, 1])
    compare("sdpo/token_advantage", actual, sdpo.token_advantage(row, ROWS[0], [1, 0, 1]), dtype="float64")
'''
TOLERANCE = {"dtype": "float64", "device": "any", "regime": "ordinary", "rtol": 1e-12, "atol": 1e-12}
OBLIGATIONS = (  # of the service; the gradient is read off a step, so Adam and states are in it
    "wire/models",
    "value/importance_sampling",
    "gradient/importance_sampling",
    "state/saved_exactly",
    "sampling/three_ways",
)
SHOWN = {"grpo": "grpo/value", "policy_gradient": "policy_gradient/value", "sdpo": "sdpo/token_advantage"}


def build(root: Path, *, whole: bool) -> Tree:
    """The tree as it is here, committed at `root`, with a green receipt.

    whole: with every obligation, which takes minutes; else with one of each loss that the experiment stands on, and a
    protocol that asks a service for a few of its obligations.
    """
    clean = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, root / name, ignore=clean)
    for name in FILES:
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "receipts").mkdir()
    (root / ".gitignore").write_text("__pycache__/\n.hypothesis/\n.pytest_cache/\n")
    if whole:
        shutil.copytree(ROOT / "tests", root / "tests", ignore=clean, dirs_exist_ok=True)
    else:
        (root / "tests/parity").mkdir()
        (root / "tests/parity/test_few.py").write_text(FEW)
        spec = json.loads((root / "spec/losses.json").read_text())
        spec["losses"] = {name: _reduced(spec["losses"][name], SHOWN[name]) for name in SHOWN}
        (root / "spec/losses.json").write_text(json.dumps(spec, indent=1))
        path = root / "impl/paritygate/experiment/plan/service_obligations.py"
        path.write_text(path.read_text() + f"ALL_ARMS = {OBLIGATIONS!r}\n")
    (root / "receipts/README.md").write_text("written by a parity session\n")
    tree = Tree(root)
    tree.git("init", "-q", "-b", "main")
    tree.commit("a checkout")
    output = tree.parity()
    assert "parity: green" in output, output[-3000:]
    return tree


def _reduced(loss: dict, name: str) -> dict:
    return loss | {"obligations": {name: loss["obligations"][name] | {"min_comparisons": 4, "tolerances": [TOLERANCE]}}}
