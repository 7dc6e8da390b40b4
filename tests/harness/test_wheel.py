"""The wheel: what its base asks for, what works with that alone, and what is said where an extra is missing."""

import json
import zipfile
from pathlib import Path

import pytest

from paritygate.extras import EXTRAS
from tests.harness.conftest import Stranger

BLOCKED = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def without(names: set[str], folder: Path) -> dict[str, str]:
    """An environment in which these modules are not installed."""
    (folder / "sitecustomize.py").write_text(BLOCKED.format(names=names))
    return {"PYTHONPATH": str(folder)}


def test_the_base_is_torch_and_numpy(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
        names = archive.namelist()
    asked = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    assert sorted(line.split(">")[0] for line in asked if "extra ==" not in line) == ["numpy", "torch"]
    assert set(EXTRAS) <= {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")}
    assert "paritygate/spec/data/schema/losses.schema.json" in names
    assert "paritygate_pytest.py" in names


def test_the_losses_need_the_base_alone(installed: Path, tmp_path: Path) -> None:
    everything = {name for names in EXTRAS.values() for name in names} - {"jinja2", "mpmath"}  # torch needs these
    program = """
import json, torch
from paritygate.losses import spod
x = torch.zeros(1, 3); x[0, 0] = 1; i = torch.zeros(1, dtype=torch.int64)
loss = spod.success_preserving_loss(x, x * 2, i, i, i, torch.tensor([False])).loss
print(json.dumps(float(loss)))
"""
    done = Stranger(tmp_path, installed).run("-c", program, **without(everything, tmp_path))
    assert done.returncode == 0, done
    assert json.loads(done.stdout.splitlines()[-1]) > 0


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("server", "uvicorn", "server"), ("service", "tinker", "service"), ("harness", "hypothesis", "harness")],
)
def test_a_missing_extra_is_one_sentence_that_names_it(
    installed: Path, tmp_path: Path, command: str, module: str, extra: str
) -> None:
    address = ["--base-url", "http://127.0.0.1:9"]
    arguments = {"server": ["--model", "tiny"], "service": address, "harness": ["new", "x"]}[command]
    for program in (["paritygate", command], [f"paritygate.{command}"]):
        variables = without({module}, tmp_path) | {"TINKER_API_KEY": "tml-x"}
        done = Stranger(tmp_path, installed).run("-m", *program, *arguments, **variables)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done
        sentence = done.stderr.splitlines()[-1]
        assert f"{module} is not installed, which this needs: pip install 'paritygate[{extra}]'" in sentence


def test_the_command_says_what_it_has(installed: Path, tmp_path: Path) -> None:
    done = Stranger(tmp_path, installed).run("-m", "paritygate", "--help")
    assert done.returncode == 0
    for command in ("server", "service", "harness", "verify"):
        assert f"  {command} " in done.stdout
    assert Stranger(tmp_path, installed).run("-m", "paritygate", "nothing").returncode == 2
