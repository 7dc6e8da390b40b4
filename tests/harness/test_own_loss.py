"""examples/own_loss with the built wheel: a loss of one's own is proven, guards a training script, and its mutants die.

The kinds of attack of tests/guard/README.md, by the numbers in the comments, are made here too, as far as they apply
to a repository without experiments: 13 is about run directories, 16 about runs against a service.
"""

import json
import py_compile
import shutil
import sys
from pathlib import Path

import pytest

from paritygate.harness.mutants import last
from paritygate.receipts.git import git
from tests.harness.conftest import Stranger, environment_with

LOSS = "src/my_losses/gspo.py"


def not_green(repository: Stranger, output: str, sentence: str) -> None:
    assert "parity: NOT green, no receipt" in output, output
    assert sentence in output, output
    assert repository.receipts() == []


def plugin(folder: Path, text: str) -> dict[str, str]:
    folder.mkdir()
    (folder / "attack.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_a_training_script_starts_with_a_receipt_and_paritygate_verify_agrees(green: Stranger) -> None:
    done = green.run("train.py")
    assert (done.returncode, done.stdout.startswith("one step with parity-")) == (0, True), done
    done = green.run("-m", "paritygate", "verify")
    assert (done.returncode, "parity holds for gspo on cpu: receipts/parity-" in done.stdout) == (0, True), done
    statement = json.loads(green.receipts()[0].read_bytes())
    names = {subject["name"] for subject in statement["subject"]}
    assert {"requirements.lock", LOSS, "spec/losses.json", "installed/paritygate/harness/session.py"} <= names


# kinds 1, 2
def test_no_receipt_for_the_loss_or_the_device(bare: Stranger, green: Stranger) -> None:
    bare.refused("no parity receipt in")
    green.edit("train.py", 'device="cpu"', 'device="cuda"')
    green.refused("no parity receipt for device cuda")
    green.edit("train.py", 'device="cuda"', 'device="cpu"')
    green.edit("train.py", '["gspo"]', '["gspo", "dpo"]')
    green.refused("no loss 'dpo'")


# kinds 3, 4
@pytest.mark.parametrize(
    "name",
    [LOSS, "reference/my_reference/gspo.py", "tests/parity/test_gspo.py", "pyproject.toml", "requirements.lock"],
)
def test_a_file_edited(green: Stranger, name: str) -> None:
    with (green.root / name).open("a") as file:
        file.write("\n# edited\n")
    green.refused(f"{name} was edited since parity was shown")


# kinds 3, 4, 7, 14
def test_edited_added_deleted_and_linked_files_and_a_cut_receipt(green: Stranger, tmp_path: Path) -> None:
    spec = (green.root / "spec/losses.json").read_text()
    green.edit("spec/losses.json", "1e-12", "1e-02")
    green.refused("spec/losses.json was edited since parity was shown")
    (green.root / "spec/losses.json").write_text(spec)
    (green.root / "tests/parity/conftest.py").write_text("")
    green.refused("tests/parity/conftest.py was added since parity was shown")
    (green.root / "tests/parity/conftest.py").unlink()
    (green.root / LOSS).rename(tmp_path / "moved.py")
    green.refused(f"{LOSS} was deleted since parity was shown")
    (green.root / LOSS).symlink_to(tmp_path / "moved.py")
    green.refused(f"{LOSS} is a symbolic link")
    (green.root / LOSS).unlink()
    (tmp_path / "moved.py").rename(green.root / LOSS)
    (receipt,) = green.receipts()
    receipt.write_bytes(receipt.read_bytes()[:-1])
    green.refused("was edited or cut short")


# kinds 4, 5
def test_an_edit_of_the_installed_paritygate_and_one_hidden_from_git(
    green: Stranger, wheel: Path, tmp_path: Path
) -> None:
    other = Stranger(green.root, environment_with(wheel, tmp_path / "venv"))
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    with (site / "paritygate/harness/comparator.py").open("a") as file:
        file.write("# edited\n")
    other.refused("installed/paritygate/harness/comparator.py was edited since parity was shown")
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        ["commit", "-qm", "all"],
        ["update-index", "--assume-unchanged", LOSS],
    ):
        git(green.root, *identity, *arguments)
    green.edit(LOSS, "1 + high", "1 + low")
    green.refused(f"{LOSS} was edited since parity was shown")


# kind 6
def test_an_edit_during_the_session(bare: Stranger, tmp_path: Path) -> None:
    text = f"def pytest_collection_finish(session):\n    open({str(bare.root / LOSS)!r}, 'a').write('# edited')\n"
    output = bare.session("-p", "attack", **plugin(tmp_path / "attack", text))
    not_green(bare, output, f"{LOSS} was edited during the session")


# kinds 8, 9
def test_a_selection_and_python_optimised(bare: Stranger, green: Stranger) -> None:
    not_green(bare, bare.session("-k", "float32"), "was deselected")
    green.refused("python -O removes the assertions", "-O")


# kind 10
def test_a_plugin_that_never_runs_the_bodies(bare: Stranger, tmp_path: Path) -> None:
    text = "import pytest\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n    return True\n"
    output = bare.session("-p", "attack", **plugin(tmp_path / "attack", text))
    not_green(bare, output, "gspo/value has 0 of the 200 comparisons that count")


def poison(repository: Stranger) -> None:
    """Leave bytecode of an edited loss, not to be checked against its source, where Python looks for it."""
    source = repository.root / LOSS
    edited = repository.root / "edited.py"
    edited.write_text(source.read_text().replace("return -torch", "return torch"))
    cached = source.parent / "__pycache__" / f"gspo.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(
        str(edited), cfile=str(cached), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True
    )
    edited.unlink()


# kinds 11, 12
def test_poisoned_bytecode_and_losses_from_elsewhere_do_not_train(green: Stranger, tmp_path: Path) -> None:
    shutil.copytree(green.root / "src", tmp_path / "elsewhere")
    (tmp_path / "elsewhere/my_losses/gspo.py").write_text("raise SystemExit('not the proven loss')\n")
    poison(green)
    done = green.run("train.py", PYTHONPATH=str(tmp_path / "elsewhere"))
    assert (done.returncode, "[[-0.5, -0.5]]" in done.stdout) == (0, True), done
    green.edit("train.py", "from paritygate.receipts", "import my_losses.gspo\nfrom paritygate.receipts")
    green.edit("train.py", '"""A training', 'import sys\n\nsys.path.insert(0, "src")\n"""A training')
    green.refused("my_losses was imported before require_parity: call it first")


# kind 12
def test_a_torch_from_elsewhere_is_refused_before_it_runs(green: Stranger, tmp_path: Path) -> None:
    (tmp_path / "elsewhere/torch").mkdir(parents=True)
    (tmp_path / "elsewhere/torch/__init__.py").write_text("print('one step with another torch')\n")
    green.refused("torch comes from", PYTHONPATH=str(tmp_path / "elsewhere"))


# kind 15
def test_a_rerun_plugin(bare: Stranger) -> None:
    flags = ("-p", "paritygate_pytest", "-p", "pytest_rerunfailures", "--reruns", "1")
    output = bare.session(*flags, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    not_green(bare, output, "failing tests would have been run again")


# one mistake in value and gradient, of which the value is compared first; one that changes nothing
MORE_MUTANTS = '''
from paritygate.harness.mutants import Mutant

FILE = "src/my_losses/gspo.py"
MUTANTS = (
    Mutant("sign", "the loss is to fall", "gspo/gradient", FILE, "return -torch.where(", "return torch.where("),
    Mutant("renamed", "a docstring", "gspo/gradient", FILE, '"""GSPO in torch', '"""GSPO by torch'),
)
'''


def test_a_mutant_is_held_to_the_obligation_that_it_names_alone(bare: Stranger) -> None:
    (bare.root / "tests/mutants/more.py").write_text(MORE_MUTANTS)
    done = bare.run("-m", "paritygate", "harness", "mutants", "sign", "renamed")
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "killed sign gspo/gradient",
        "LIVES renamed gspo/gradient: parity: gspo/gradient: met; no receipt",
    ]
    assert done.returncode == 3
    bare.edit("tests/mutants/more.py", '"a docstring", "gspo/gradient"', '"a docstring", "gspo/nothing"')
    for name, sentence in (("nothing", "no mutant called nothing"), ("renamed", "dies by 'gspo/nothing', which spec/")):
        done = bare.run("-m", "paritygate", "harness", "mutants", name)
        assert (done.returncode, done.stderr.count("\n"), sentence in done.stderr) == (2, 1, True), done


def test_what_a_mutant_that_lives_is_told_of() -> None:
    output = (
        ".F\nE   AttributeError: no clamp\nE   Falsifying example\nparity: NOT green, no receipt: test_value failed\n"
    )
    assert last(output) == "parity: NOT green, no receipt: test_value failed (AttributeError: no clamp)"


def test_the_pieces_of_a_new_loss_fail_until_they_are_filled(bare: Stranger) -> None:
    before = json.loads((bare.root / "spec/losses.json").read_text())
    done = bare.run("-m", "paritygate.harness", "new", "dpo")
    assert done.returncode == 0, done
    assert len(done.stdout.split()) == 5
    after = json.loads((bare.root / "spec/losses.json").read_text())
    assert after["losses"].pop("dpo")
    assert after["tolerances"].pop("dpo")
    assert after["tolerances"].pop("dpo_sixty_digits")
    assert after == before
    assert "1e-6, " in (bare.root / "spec/losses.json").read_text()  # what was there stands as it stood
    not_green(bare, bare.session("--losses", "dpo"), "dpo/value has 0 of the 100 comparisons that count")
    assert "A receipt for what was collected alone: --losses dpo\n" in bare.session("tests/parity/test_dpo.py")
    (bare.root / "src/my_losses/dpo.py").unlink()
    output = bare.session("tests/parity/test_gspo.py")
    assert "dpo is declared in the spec, and my_losses.dpo is not there" in output
    assert "Traceback" not in output
    assert "plugin.py" not in output  # a sentence for each test, and no place in the harness
    for name in ("gspo", "Not-A-Name"):
        done = bare.run("-m", "paritygate.harness", "new", name)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done


def test_a_repository_without_the_table_hears_nothing_of_the_plugin(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import sys\n\n\ndef test_one():\n    assert not {'paritygate', 'torch'} & sys.modules.keys()\n"
    )
    silent = Stranger(tmp_path, installed)
    output = silent.session("test_one.py")
    assert "1 passed" in output, output
    assert "parity" not in output


@pytest.mark.parametrize(
    ("table", "sentence"),
    [("spec = 3", "[tool.paritygate] spec is 3"), ('spec = "../x"', "spec is '../x'"), ("", "spec is None")],
)
def test_a_table_that_cannot_be_used_is_one_sentence(bare: Stranger, table: str, sentence: str) -> None:
    bare.edit("pyproject.toml", 'spec = "spec/losses.json"', table)
    output = bare.session()
    assert sentence in output, output
    assert "Traceback" not in output
