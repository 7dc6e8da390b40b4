"""Sessions that look like proof and are none, each run for real; none leaves a receipt. Kinds: README.md here."""

import importlib.util
import os
import py_compile
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.counts import SOAK
from tests.guard.small_tree import Tree


def not_green(tree: Tree, output: str, *sentences: str) -> None:
    """No receipt came of the session, its output says why, and a run is refused."""
    for sentence in ("parity: NOT green, no receipt", *sentences):
        assert sentence in output, (sentence, output)
    assert tree.receipts() == []
    tree.refused_here("no parity receipt in")


def plugin(folder: Path, text: str) -> dict[str, str]:
    """A module `attack` outside the tree, and the environment in which `-p attack` finds it."""
    folder.mkdir(exist_ok=True)
    (folder / "attack.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_the_session_is_green_without_an_attack(bare: Tree) -> None:
    output = bare.parity(PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    (receipt,) = bare.receipts()
    assert f"parity: green, 4 obligations; receipts/{receipt.name}" in output
    bare.accepted()


# 6 ---------------------------------------------------------------------------------------------------------------


def test_an_edit_during_the_session(bare: Tree, tmp_path: Path) -> None:
    name = "reference/paritygate_reference/toy.py"
    text = f"""
def pytest_collection_finish(session):
    with open({str(bare.root / name)!r}, "a") as file:
        file.write("# edited\\n")
"""
    output = bare.parity("-p", "attack", **plugin(tmp_path / "attack", text))
    not_green(bare, output, f"{name} was edited during the session")


def test_an_edit_that_is_undone_before_the_session_ends(bare: Tree, tmp_path: Path) -> None:
    name = "impl/paritygate/losses/toy.py"
    text = f"""
import pytest
path, kept = {str(bare.root / name)!r}, []

def pytest_collection_finish(session):
    kept.append(open(path).read())
    open(path, "w").write(kept[0].replace("number * number", "number ** 2"))

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    open(path, "w").write(kept[0])
"""
    output = bare.parity("-p", "attack", **plugin(tmp_path / "attack", text))
    not_green(bare, output, f"{name} ran with other bytes than it has: it was edited during the session")


# 8 ---------------------------------------------------------------------------------------------------------------


def test_a_selection_by_keyword(bare: Tree) -> None:
    not_green(bare, bare.parity("-k", "toy"), "test_other.py::test_value was deselected", "other/value has 0 of the 20")


def test_a_single_node(bare: Tree) -> None:
    done = bare.python("-m", "pytest", "-q", "tests/parity/test_toy.py::test_value")
    not_green(bare, done.stdout, "toy/sign has 0 of the 4", "other/value has 0 of the 20")
    assert done.returncode == 0  # narrowed by its author, who sees that it is no proof


def test_deselect(bare: Tree) -> None:
    node = "tests/parity/test_toy.py::test_sign"
    not_green(bare, bare.parity("--deselect", node), "toy/sign has 0 of the 4")


def test_collect_only(bare: Tree) -> None:
    assert "test_value" in bare.parity("--collect-only")
    assert bare.receipts() == []
    bare.refused("no parity receipt in")


@pytest.mark.parametrize("mark", ["skip", "xfail(strict=False)"])
def test_skip_and_xfail(bare: Tree, mark: str) -> None:
    bare.edit("tests/parity/test_toy.py", "@pytest.mark.parametrize", f"@pytest.mark.{mark}\n@pytest.mark.parametrize")
    word = "skipped" if mark == "skip" else "is marked xfail"
    not_green(bare, bare.parity(), f"test_sign[3.0] {word}")


def test_an_obligation_left_short_fails_the_session(bare: Tree) -> None:
    bare.edit("tests/parity/test_toy.py", "[-2.0, -1.0, 0.0, 3.0]", "[-2.0, -1.0, 0.0]")
    done = bare.python("-m", "pytest", "tests/parity", "-q")
    not_green(bare, done.stdout, "toy/sign has 3 of the 4 comparisons that count")
    assert done.returncode == 1


def test_a_dtype_left_out(bare: Tree) -> None:
    for name in ("toy", "other"):
        bare.edit(f"tests/parity/test_{name}.py", "import pytest", "import pytest\n")
    bare.edit("spec/losses.json", '"regime": "ordinary"', '"regime": "huge"')
    not_green(bare, bare.parity(), "declares no tolerance for float64 on cpu, regime 'ordinary'")


def test_a_failure_that_the_test_swallows(bare: Tree) -> None:
    bare.edit("impl/paritygate/losses/toy.py", "len(numbers)", "(len(numbers) + 1)")
    for name in ("toy", "other"):
        test = f"tests/parity/test_{name}.py"
        bare.edit(test, "    compare(", "    with __import__('contextlib').suppress(AssertionError):\n        compare(")
    output = bare.parity()
    assert "10 passed" in output
    not_green(bare, output, "toy/value (float64, cpu, ordinary, against reference): value is")


def test_a_failing_test(bare: Tree) -> None:
    bare.edit("impl/paritygate/losses/toy.py", "len(numbers)", "(len(numbers) + 1)")
    not_green(bare, bare.parity(), "tests/parity/test_toy.py::test_value failed")


# 9 ---------------------------------------------------------------------------------------------------------------


def test_python_optimised(bare: Tree, tree: Tree) -> None:
    assert "assert statements are not executed" in bare.parity(flags=["-O"])  # pytest's warning, an error here
    allowed = ("-W", "ignore::pytest.PytestConfigWarning")
    not_green(bare, bare.parity(*allowed, flags=["-O"]), "python -O removes the assertions")
    for flags, environment in ((["-O"], {}), ([], {"PYTHONOPTIMIZE": "2"})):
        for command in (("impl/run.py",), ("impl/verify.py", "--parity")):
            done = tree.python(*flags, *command, **environment)
            assert (done.returncode, "python -O removes the assertions" in done.stderr) == (3, True), done


# 10 --------------------------------------------------------------------------------------------------------------


def test_a_plugin_with_too_few_examples(bare: Tree, tmp_path: Path) -> None:
    text = 'import hypothesis\ntype.__setattr__(hypothesis.settings, "max_examples", property(lambda self: 3))\n'
    output = bare.parity("-p", "attack", **plugin(tmp_path / "attack", text))
    not_green(bare, output, "toy/value has 3 of the 20 comparisons that count")


def test_a_plugin_that_never_runs_the_bodies(bare: Tree, tmp_path: Path) -> None:
    text = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True
"""
    output = bare.parity("-p", "attack", **plugin(tmp_path / "attack", text))
    assert "10 passed" in output
    not_green(bare, output, "toy/value has 0 of the 20 comparisons that count")


# 11 --------------------------------------------------------------------------------------------------------------


def poison(tree: Tree, name: str, old: str, new: str) -> None:
    """Leave bytecode of an edited `name`, marked as not to be checked against its source, where Python looks for it."""
    source = tree.root / name
    edited = source.with_name("edited.py")
    edited.write_text(source.read_text().replace(old, new))
    assert edited.read_text() != source.read_text()
    cached = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(edited), cfile=str(cached), invalidation_mode=mode, doraise=True)
    edited.unlink()


def test_poisoned_bytecode_would_be_read_by_a_plain_import(tree: Tree) -> None:
    poison(tree, "impl/paritygate/losses/toy.py", "number * number", "5.0")
    code = "import sys; sys.path.insert(0, 'impl'); from paritygate.losses import toy; print(toy.value([2.0]))"
    assert tree.python("-c", code).stdout == "5.0\n"


def test_poisoned_bytecode_is_not_read_by_a_run(tree: Tree) -> None:
    poison(tree, "impl/paritygate/losses/toy.py", "number * number", "5.0")
    poison(tree, "impl/paritygate/errors.py", "exit_code = 3", "exit_code = 0")
    poison(tree, "impl/paritygate/bootstrap.py", "sys.flags.optimize", "False")
    poison(
        tree, "impl/paritygate/receipts/parity.py", "if not candidates:", "if True:\n        return None\n    if True:"
    )
    tree.accepted()  # it computes 4.0, from the source
    (tree.receipts()[0]).unlink()
    tree.refused("no parity receipt in")


def test_poisoned_bytecode_is_not_read_by_a_parity_session(bare: Tree) -> None:
    name = "impl/paritygate/losses/toy.py"
    poison(bare, name, '"""A toy loss', '"""The toy loss')
    bare.edit(name, "len(numbers)", "(len(numbers) + 1)")
    not_green(bare, bare.parity(), "tests/parity/test_toy.py::test_value failed")


def test_without_a_cache_for_itself_a_session_reads_other_packages_from_theirs(bare: Tree) -> None:
    """`-X pycache_prefix=/dev/null`, as in make parity: no poisoned tests/conftest.py, and no torch compiled anew."""
    header = "\n\ndef pytest_report_header():\n    import mpmath\n\n    return mpmath.__cached__\n"
    bare.edit("tests/conftest.py", "import pytest\n", f"import pytest\n{header}")
    poison_rewritten(bare, "tests/conftest.py", (header, "\nraise SystemExit('poisoned')\n"))
    assert "poisoned" in bare.parity()
    output = bare.parity("-v", flags=("-X", f"pycache_prefix={os.devnull}"))
    assert "parity: green" in output
    assert "mpmath/__pycache__/__init__.cpython-" in output


def poison_rewritten(tree: Tree, name: str, *edits: tuple[str, str]) -> None:
    """Leave code of an edited `name`, with the digest of its true source, where pytest looks for its cache."""
    path = tree.root / name
    genuine = path.read_text()
    for old, new in edits:
        tree.edit(name, old, new)
    _, code = rewrite._rewrite_test(path, FakeConfig())
    path.write_text(genuine)
    cached = path.parent / "__pycache__" / f"{path.stem}{rewrite.PYC_TAIL}"
    cached.parent.mkdir(exist_ok=True)
    with cached.open("wb") as file:
        rewrite._write_pyc_fp(file, importlib.util.source_hash(path.read_bytes()), code)


def test_poisoned_bytecode_of_a_test_file_is_not_read(bare: Tree) -> None:
    bare.edit("impl/paritygate/losses/toy.py", "len(numbers)", "(len(numbers) + 1)")
    poison_rewritten(bare, "tests/parity/test_toy.py", ("losses.toy.value(numbers)", "reference.value(numbers)"))
    done = bare.python("-c", PLAIN_SESSION, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "1 passed" in done.stdout, done  # pytest by itself reads it, and sees nothing
    not_green(bare, bare.parity(), "tests/parity/test_toy.py::test_value failed")


class FakeConfig:
    """The one thing that pytest's rewriting asks of its configuration."""

    def getini(self, name: str) -> bool:
        return False


PLAIN_SESSION = """
import sys, pytest
import _pytest.assertion.rewrite as rewrite
sys.path[:0] = ["impl", "reference", "."]

class Losses:
    @pytest.fixture(scope="session")
    def losses(self):
        from paritygate.losses import toy
        import types
        return types.SimpleNamespace(toy=toy)

from paritygate.harness import ledger
ledger.LEDGER = type("Book", (), {"compare": lambda self, name, a, e, **_: None if abs(a - e) < 1e-9 else 1 / 0})()
arguments = ["-q", "--noconftest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider"]
raise SystemExit(pytest.main([*arguments, "tests/parity/test_toy.py::test_value"], plugins=[Losses()]))
"""


# 12 --------------------------------------------------------------------------------------------------------------


def test_paritygate_from_outside_the_tree(bare: Tree, tree: Tree, tmp_path: Path) -> None:
    elsewhere = tree.copy(tmp_path / "elsewhere").root / "impl"
    (elsewhere / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(elsewhere)!r})\nimport paritygate\n"
    )
    tree.refused("paritygate was imported from", PYTHONPATH=str(elsewhere))
    output = bare.parity(PYTHONPATH=str(elsewhere))
    assert "was imported from" in output
    assert bare.receipts() == []
    bare.refused("paritygate was imported from", PYTHONPATH=str(elsewhere))


def test_the_tree_goes_first_on_the_path(tree: Tree, tmp_path: Path) -> None:
    other = tree.copy(tmp_path / "other")
    other.edit("impl/paritygate/losses/toy.py", "number * number", "5.0")
    tree.accepted(PYTHONPATH=str(other.root / "impl"))
    tree.accepted(PYTHONPATH=str(other.root / "impl"), PYTHONSAFEPATH="1")


# 15 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["1", "2"] if SOAK else ["1"])
def test_xdist_without_merging(bare: Tree, workers: str) -> None:
    not_green(bare, bare.parity("-p", "xdist", "-n", workers), "spread over workers, whose comparisons are not merged")


RERUNS = ("-p", "pytest_rerunfailures", "--reruns", "2")

FAILS_ONCE = """

SEEN = []


def test_once():
    SEEN.append(1)
    assert len(SEEN) > 1
"""


def test_a_rerun_plugin(bare: Tree) -> None:
    with (bare.root / "tests/parity/test_toy.py").open("a") as file:
        file.write(FAILS_ONCE)
    output = bare.parity(*RERUNS)
    assert "11 passed, 1 rerun" in output
    not_green(bare, output, "test_once was run 2 times: a rerun is no proof")


def test_a_rerun_plugin_that_had_nothing_to_do(bare: Tree) -> None:
    not_green(bare, bare.parity(*RERUNS), "failing tests would have been run again")


def test_a_flaky_plugin(bare: Tree, tmp_path: Path) -> None:
    with (bare.root / "tests/parity/test_toy.py").open("a") as file:
        file.write(FAILS_ONCE)
    text = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    for attempt in range(2):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if all(report.passed for report in reports):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
    output = bare.parity("-p", "attack", **plugin(tmp_path / "attack", text))
    assert "11 passed" in output
    not_green(bare, output, "test_once was run 2 times: a rerun is no proof")


def test_the_environment_is_ours_alone(bare: Tree) -> None:
    assert "PYTEST_ADDOPTS" not in os.environ or "-k" not in os.environ["PYTEST_ADDOPTS"]
    not_green(bare, bare.parity(PYTEST_ADDOPTS="-k toy"), "other/value has 0 of the 20")
