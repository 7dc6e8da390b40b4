"""Kind 12, wider: modules that take the place of ours, of the standard library's, or of a dependency."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from paritygate.errors import Refused
from paritygate.receipts.origins import ask_alone, look_up, places, refuse_shadowed
from tests.guard.small_tree import ROOT, Tree


def shadow(folder: Path, name: str) -> Path:
    """A package `name` in `folder` that hands on what the true one has."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"""
import importlib.machinery, importlib.util, sys
elsewhere = [path for path in sys.path if path not in ("", {str(folder)!r})]
true = importlib.machinery.PathFinder.find_spec({name!r}, elsewhere)
__path__ = list(true.submodule_search_locations or [])
exec(compile(open(true.origin).read(), true.origin, "exec"))
""")
    return folder


def not_green(tree: Tree, output: str, *sentences: str) -> None:
    for sentence in ("parity: NOT green, no receipt", *sentences):
        assert sentence in output, (sentence, output)
    assert tree.receipts() == []


@pytest.mark.parametrize("name", ["hypothesis", "json"])
def test_a_folder_at_the_root_hides_an_installed_package(bare: Tree, name: str) -> None:
    shadow(bare.root, name)
    not_green(bare, bare.parity(), f"{name} comes from {bare.root / name / '__init__.py'}, this Python by itself has")


@pytest.mark.parametrize("name", ["rfc8785", "json"])
def test_a_module_on_pythonpath_hides_an_installed_package(bare: Tree, tmp_path: Path, name: str) -> None:
    output = bare.parity(PYTHONPATH=str(shadow(tmp_path / "elsewhere", name)))
    not_green(bare, output, f"{name} comes from {tmp_path / 'elsewhere' / name}")


@pytest.mark.parametrize("name", ["rfc8785", "json"])
def test_a_run_and_a_check_refuse_what_hides_a_dependency(tree: Tree, tmp_path: Path, name: str) -> None:
    folder = str(shadow(tmp_path / "elsewhere", name))
    tree.refused(f"{name} comes from {folder}", PYTHONPATH=folder)
    tree.check_refused(f"{name} comes from {folder}", PYTHONPATH=folder)


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_what_python_imports_before_everything_is_its_own(tree: Tree, tmp_path: Path, name: str) -> None:
    """From PYTHONPATH; a virtual environment with its own packages alone imports no usercustomize."""
    (tmp_path / f"{name}.py").write_text("import math\nmath.isclose = lambda *numbers, **bounds: True\n")
    loaded = tree.python("-c", f"import sys; print({name!r} in sys.modules)", PYTHONPATH=str(tmp_path))
    if loaded.stdout == "False\n":
        tree.accepted(PYTHONPATH=str(tmp_path))
        return
    tree.refused(f"{name} comes from {tmp_path}", PYTHONPATH=str(tmp_path))
    for path in tree.receipts():
        path.unlink()
    not_green(tree, tree.parity(PYTHONPATH=str(tmp_path)), f"{name} comes from {tmp_path}")


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_a_startup_module_of_elsewhere_is_refused_where_python_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text("")
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    assert spec is not None
    monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
    with pytest.raises(Refused, match=f"{name} comes from {tmp_path}"):
        refuse_shadowed(ROOT)


def test_a_package_is_where_its_submodules_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded or not; one without an __init__.py has no file of its own, so that its folder alone tells of it."""
    (tmp_path / "hollow_here").mkdir()
    file = shadow(tmp_path, "whole_here") / "whole_here" / "__init__.py"
    file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name, expected in (("hollow_here", []), ("whole_here", [str(file)])):
        expected.append(str(tmp_path / name))
        assert look_up(name) == expected
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        assert places(module) == expected


def test_another_user_base_is_not_this_python_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONUSERBASE is read under -E as well, where the interpreter has a folder of the user's packages at all."""
    monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))
    alone = ask_alone(["only_here"])
    folder = tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "only_here.py").write_text("")
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))
    assert ask_alone(["only_here"]) == alone == {"only_here": []}


def test_a_folder_at_the_root_that_is_not_imported_hides_nothing(tree: Tree) -> None:
    shadow(tree.root, "hypothesis")
    tree.accepted()  # impl/run.py has impl/ on its path, not the root


@pytest.mark.parametrize("mode", ["append", "importlib", "prepend"])
def test_a_foreign_ledger_by_another_python_path(bare: Tree, tmp_path: Path, mode: str) -> None:
    """It finds every comparison within its tolerance; where pytest takes the tree's own, that one sees the mistake."""
    bare.edit("impl/paritygate/losses/toy.py", "len(numbers)", "(len(numbers) + 1)")
    folder = bare.copy(tmp_path / "elsewhere").root / "impl"
    ledger = folder / "paritygate" / "harness" / "ledger.py"
    true = ledger.read_text()
    lie = true.replace("result = measure(", "result = lie(")
    assert lie != true
    ledger.write_text(lie + "\n\ndef lie(actual, expected, tolerance):\n    return 0.0, '', 1\n")
    path = f"pythonpath={folder} {bare.root / 'impl'} {bare.root / 'reference'}"
    output = bare.parity("-o", path, f"--import-mode={mode}")
    assert (bare.receipts(), "parity: green" in output) == ([], False), output
    assert f"was imported from {folder}" in output or "test_toy.py::test_value failed" in output, output


def test_a_dependency_that_is_there_only_by_pythonpath(tree: Tree, tmp_path: Path) -> None:
    """A name that pyproject.toml asks for and that this Python by itself does not have."""
    (tmp_path / "xdist").mkdir()
    (tmp_path / "xdist" / "__init__.py").write_text("")
    with_it = tree.python("-c", "import importlib.util as u; print(u.find_spec('tinker_not_installed'))").stdout
    assert with_it == "None\n"
    tree.edit("pyproject.toml", '"ruff', '"tinker_not_installed",\n    "ruff')
    for path in tree.receipts():
        path.unlink()
    assert "parity: green" in tree.parity()
    tree.accepted()
    (tmp_path / "tinker_not_installed.py").write_text("")
    tree.refused("tinker_not_installed comes from", PYTHONPATH=str(tmp_path))


def test_a_checkout_through_a_symbolic_link_is_the_checkout(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree.root)
    linked = Tree(tmp_path / "link")
    linked.accepted()
    for path in tree.receipts():
        path.unlink()
    assert "parity: green" in linked.parity()
    done = linked.python(str(tmp_path / "link" / "impl" / "verify.py"), "--parity")
    assert done.returncode == 0, done
    tree.accepted()


# A receipt says what was so ---------------------------------------------------------------------------------------

PROFILE = """
import hypothesis
hypothesis.settings.register_profile("random", derandomize=False, database=None)
"""


def test_another_hypothesis_profile_is_not_derandomized(bare: Tree, tmp_path: Path) -> None:
    (tmp_path / "attack.py").write_text(PROFILE)
    options = ("-p", "attack", "-p", "_hypothesis_pytestplugin", "--hypothesis-profile", "random")
    output = bare.parity(*options, PYTHONPATH=str(tmp_path))
    not_green(bare, output, "Hypothesis drew examples by another profile or seed")


def test_a_profile_or_seed_that_a_plugin_sets_later(bare: Tree, tmp_path: Path) -> None:
    for line in ("hypothesis.settings.load_profile('random')", "hypothesis.core.global_force_seed = 3"):
        text = f"{PROFILE}\nimport hypothesis.core\ndef pytest_collection_finish(session):\n    {line}\n"
        (tmp_path / "attack.py").write_text(text)
        output = bare.parity("-p", "attack", PYTHONPATH=str(tmp_path))
        not_green(bare, output, "Hypothesis drew examples by another profile or seed")


@pytest.mark.parametrize("name", ["mpmath", "ruff"])
def test_a_leftover_folder_without_metadata_is_no_distribution(bare: Tree, tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}-9.9.dist-info").mkdir()
    output = bare.parity(PYTHONPATH=str(tmp_path))
    assert "parity: green" in output, output
    bare.accepted(PYTHONPATH=str(tmp_path))
    bare.accepted()  # the version is that of the true one


def test_green_is_said_only_of_what_the_guard_takes(bare: Tree, tmp_path: Path) -> None:
    """A session whose own receipt would be refused is not green: here the machine changes while it runs."""
    (tmp_path / "attack.py").write_text(
        "from paritygate.receipts import parity\n"
        "true = parity.environment\n"
        "calls = []\n"
        "def changed(device):\n"
        "    calls.append(device)\n"
        "    return true(device) | {'torch': f'9.{len(calls)}'}\n"
        "def pytest_collection_finish(session):\n"
        "    parity.environment = changed\n"
    )
    not_green(bare, bare.parity("-p", "attack", PYTHONPATH=f"{tmp_path}:{bare.root / 'impl'}"), "torch is 9.2 here")
