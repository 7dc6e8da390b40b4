"""The shape of the tree, held by tests: arrows, the four sets of losses, file lengths, lint and types."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = [*(ROOT / "impl").rglob("*.py"), *(ROOT / "reference").rglob("*.py")]


def run_tool(*arguments: str) -> None:
    """A developer tool installed beside this interpreter, on the two source roots; its words are the failure."""
    tool = Path(sys.executable).parent / arguments[0]
    path = os.pathsep.join(str(ROOT / root) for root in ("impl", "reference"))
    done = subprocess.run(
        [str(tool), *arguments[1:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


def test_imports_run_one_way() -> None:
    run_tool("lint-imports", "--no-cache")


def test_lint() -> None:
    run_tool("ruff", "check", "--no-cache", ".")


def test_format() -> None:
    run_tool("ruff", "format", "--no-cache", "--check", ".")


def test_types() -> None:
    run_tool("basedpyright", "--level", "error")


def loss_modules(folder: Path, prefix: str = "") -> set[str]:
    names = {path.stem.removeprefix(prefix) for path in folder.glob(f"{prefix}*.py")}
    names |= {path.parent.name for path in folder.glob("*/__init__.py") if not prefix}
    return {name for name in names if not name.startswith("_") and name != "conftest"}


SHARED = {"checks", "numerics", "row_stats", "gate", "buckets", "engines"}  # of the losses, and no loss


def test_a_loss_is_one_entry_one_reference_one_implementation_one_parity_file() -> None:
    spec = set(json.loads((ROOT / "spec/losses.json").read_text())["losses"])
    reference = loss_modules(ROOT / "reference/paritygate_reference") - {"decision"}  # statistics, not a loss
    assert reference == spec
    assert loss_modules(ROOT / "impl/paritygate/losses") - SHARED == spec
    tests = loss_modules(ROOT / "tests/parity", "test_")
    parts = {name for name in tests - spec if any(name.startswith(f"{loss}_") for loss in spec)}
    assert tests - parts == spec  # test_sdpo_logits is a part of sdpo's


ROOTS = {
    "definition": "reference",
    "implementation": "impl",
    "test": "tests/parity",
    "tolerance": "spec",
    "mutants": "tests/mutants",
}
SEARCHED = {".py", ".cpp", ".hpp", ".json"}
OF_REFERENCE = "float64 reference"  # claims of the reference alone: nothing implements them, no mutant breaks them


def test_an_obligation_is_found_by_its_name_in_each_root() -> None:
    """What `git grep NAME -- ROOT` has to find: see "Where is ...?" in CONTRIBUTING.md."""
    texts = {
        root: "\n".join(path.read_text() for path in (ROOT / root).rglob("*") if path.suffix in SEARCHED)
        for root in ROOTS.values()
    }
    missing = []
    for loss in json.loads((ROOT / "spec/losses.json").read_text())["losses"].values():
        for name, obligation in loss["obligations"].items():
            of_reference = OF_REFERENCE in obligation["claim"]
            for question, root in ROOTS.items():
                there = re.search(rf"{name}(?!\w)", texts[root])
                if not there and not (of_reference and root in ("impl", "tests/mutants")):
                    missing.append(f"{name} has no {question}: its name is nowhere in {root}/")
    excused = f"A claim that says {OF_REFERENCE!r} is of the reference alone and needs no implementation and no mutant."
    assert not missing, "\n".join([*missing, excused])


@pytest.mark.parametrize("path", SOURCE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_holds_one_idea(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= 450, f"{lines} lines: which idea can leave it?"


def test_no_folder_has_more_than_a_dozen_modules_side_by_side() -> None:
    folders = Counter(path.parent for path in SOURCE if not path.name.startswith("__"))
    crowded = {folder.relative_to(ROOT).as_posix(): count for folder, count in folders.items() if count > 12}
    assert not crowded


@pytest.mark.parametrize("name", ["run.py", "verify.py"])
def test_a_command_only_parses_calls_and_maps_errors(name: str) -> None:
    assert (ROOT / "impl" / name).read_text().count("\n") <= 80


def test_public_functions_say_what_they_are() -> None:
    silent = []
    for path in SOURCE:
        for node in ast.parse(path.read_text()).body:
            public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            overload = public and any(getattr(mark, "id", "") == "overload" for mark in node.decorator_list)
            if public and not overload and not node.name.startswith("_") and ast.get_docstring(node) is None:
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not silent, "public names without a docstring: " + ", ".join(silent)


def test_both_commands_of_the_readme_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for command in ("run", "test"):
        assert f"make {command}" in readme
        assert f"\n{command}: " in makefile
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_a_run_waits_for_no_tool_of_developers(tmp_path: Path) -> None:
    """Its environment has the extra `experiment` alone; triton, node and ruff are half of the other one."""

    def commands(target: str) -> str:
        plan = subprocess.run(
            ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", target],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return plan.stdout

    run, test = commands("run"), commands("test")
    assert ("'.[experiment]'" in run, "[dev]" in run) == (True, False)
    assert test.index("'.[experiment]'") < test.index("'.[dev]'")


def test_the_list_of_attack_kinds_names_tests_that_exist() -> None:
    text = (ROOT / "tests/guard/README.md").read_text()
    kinds = re.findall(r"^(\d+)\. .*\n    - small tree: `(.+)`\n(?:    - real tree: (.+)\n)?", text, re.MULTILINE)
    assert [int(number) for number, _, _ in kinds] == list(range(1, max(16, len(kinds)) + 1))
    for _, small, real in kinds:
        file, _, name = small.partition("::")
        assert f"\ndef {name}" in (ROOT / "tests/guard" / file).read_text(), small
        if "`" in real:
            assert f"\ndef {real.strip('`')}(" in (ROOT / "tests/guard/test_real_tree.py").read_text(), real


# Names that say nothing to a reader who comes from elsewhere -> what stands in their place, where it is one word.
VAGUE = {
    "known": "row_stats", "found": "", "told": "outputs", "room": "buffer", "recall": "load", "settle": "finish",
    "sharpen": "refine", "apart": "diff", "about": "labels", "given_as": "inputs", "hot": "near_certain", "its": "",
    "own": "", "said": "", "of_kl": "kl_weight", "of_floor": "floor_weight", "Lane": "ArmRun", "LaneRun": "ArmRun",
    "players": "fakes", "cast": "fakes", "keep": "mask", "read": "row_mask", "Batch": "SpodBatch, StepBatch, ...",
}  # fmt: skip
VERBS = {"read", "keep"}  # of functions they are names, of masks they are not


def bound_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of everything that a module binds; verbs that it calls are functions, and left out."""
    names: list[tuple[int, str]] = []
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.attr))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names += [(node.lineno, node.name)] if node.name.lstrip("_") not in VERBS else []
    plain = [(line, name.lstrip("_")) for line, name in names]
    return [(line, name) for line, name in plain if not (name in VERBS and name in called)]


def test_names_are_the_fields() -> None:
    vague = []
    for root in ("impl", "reference", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / root).rglob("*.py")):
            for line, name in bound_names(ast.parse(path.read_text())):
                if name in VAGUE:
                    vague.append(f"{path.relative_to(ROOT)}:{line} {name} (say what it is: {VAGUE[name]})")
    assert not vague, "\n".join(vague)
