"""The experiment's own shape: every row of the protocol is a file of its name, no circle, no crowded folder."""

import inspect
import re
from pathlib import Path

import grimp
import pytest

from paritygate.experiment.protocol import PHASES

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "impl/paritygate/experiment"


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_row_is_a_file_a_function_and_a_sentence_of_one_name(phase) -> None:
    function = phase.load()
    assert function.__name__ == phase.name
    assert Path(inspect.getsourcefile(function)).stem == phase.name
    assert inspect.iscoroutinefunction(function)
    assert phase.sentence


def test_every_file_under_phases_is_a_row() -> None:
    files = {path.stem for path in (HERE / "phases").rglob("*.py")} - {"__init__"}
    assert files == {phase.name for phase in PHASES}


def test_no_folder_has_more_than_a_dozen_modules() -> None:
    for folder in (HERE, *(path for path in HERE.rglob("*") if path.is_dir())):
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 12, folder


def test_the_training_step_is_one_short_file() -> None:
    assert len((HERE / "step/training_step.py").read_text().splitlines()) <= 150


def test_there_is_no_import_circle_inside_functions_or_out() -> None:
    graph = grimp.build_graph("paritygate")  # imports inside functions and under TYPE_CHECKING are counted
    modules = {name for name in graph.modules if name.startswith("paritygate.experiment.")}
    below = {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}
    while leaves := {name for name, imported in below.items() if not imported}:
        below = {name: imported - leaves for name, imported in below.items() if name not in leaves}
    assert below == {}


def test_each_point_of_the_audit_has_the_tests_that_are_named() -> None:
    page = (ROOT / "design/076-noise-budget-first-contact.md").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", page)
    assert len(names) > 40
    assert [name for name in names if f"def {name}(" not in tests] == []
