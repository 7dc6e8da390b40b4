"""What is on disk is not what parity was shown for: each attack is made, each is refused. Kinds: README.md here."""

import hashlib
import inspect
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from _pytest.config import findpaths

from paritygate.receipts import parity
from paritygate.receipts.parity import NAME, read_parity_receipt, statement_of, write_parity_receipt
from paritygate.receipts.subjects import difference, subjects
from paritygate.spec.losses import load_losses
from tests.guard.small_tree import OBLIGATION, ROOT, Tree


def test_the_clean_tree_is_accepted(tree: Tree) -> None:
    tree.accepted()


def test_it_is_accepted_after_the_receipt_was_committed(tree: Tree) -> None:
    tree.commit("the receipt")
    tree.accepted()


def test_it_is_accepted_in_another_clone_at_another_path_on_another_day(tree: Tree, tmp_path: Path) -> None:
    tree.commit("the receipt")
    tree.git("clone", "-q", str(tree.root), str(tmp_path / "elsewhere" / "clone"))
    clone = Tree(tmp_path / "elsewhere" / "clone")
    for path in clone.root.rglob("*"):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    clone.accepted()


def test_caches_and_run_folders_do_not_matter(tree: Tree) -> None:
    for name in (".venv/lib/x.py", ".hypothesis/x", "runs/a/spec.json", "data/x", "impl/paritygate/__pycache__/x.pyc"):
        (tree.root / name).parent.mkdir(parents=True, exist_ok=True)
        (tree.root / name).write_text("anything")
    tree.accepted()


# 1 ---------------------------------------------------------------------------------------------------------------


def test_no_receipt(bare: Tree) -> None:
    bare.refused("no parity receipt in")
    bare.check_refused("no parity receipt in")


# 2 ---------------------------------------------------------------------------------------------------------------


def forge(tree: Tree, device: str = "cpu", results: dict | None = None) -> Path:
    """Put a receipt with a consistent name into the tree, in place of its own."""
    (original,) = tree.receipts()
    receipt = read_parity_receipt(original)
    statement = statement_of(
        tree.root,
        device=device,
        files=receipt.subjects,
        results=receipt.part("obligations") if results is None else results,
        hypothesis=receipt.part("hypothesis"),
        session={key: receipt.part("session")[key] for key in ("arguments", "tests", "dtypes")},
    )
    original.unlink()
    return write_parity_receipt(tree.root, statement)


def test_a_receipt_without_a_loss_of_the_experiment(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    results = read_parity_receipt(receipt).part("obligations")
    forge(tree, results={name: result for name, result in results.items() if name.startswith("toy/")})
    tree.refused("does not cover the experiment: other/sign has 0 of the 4 comparisons")


def test_a_receipt_with_too_few_comparisons(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    results = json.loads(json.dumps(read_parity_receipt(receipt).part("obligations")))
    results["toy/value"]["comparisons"] = 19
    forge(tree, results=results)
    tree.refused("toy/value has 19 of the 20 comparisons")


def test_a_receipt_for_another_device_class(tree: Tree) -> None:
    tree.check_refused("no parity receipt for device cuda", "--device", "cuda")


def fake_torch(folder: Path, version: str, cuda: str) -> str:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("")
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")
    return str(folder)


def test_a_receipt_for_another_torch_or_cuda(tree: Tree, tmp_path: Path) -> None:
    shown = read_parity_receipt(tree.receipts()[0]).part("environment")
    tree.refused("torch is 9.9.9 here", PYTHONPATH=fake_torch(tmp_path / "a", "9.9.9", "None"))
    tree.refused("cuda is 99.9 here", PYTHONPATH=fake_torch(tmp_path / "b", shown["torch"], "'99.9'"))


def test_a_receipt_for_another_matmul_precision(tree: Tree) -> None:
    tree.refused("matmul_precision is highest NVIDIA_TF32_OVERRIDE=1 here", NVIDIA_TF32_OVERRIDE="1")


DECIDES = ("torch", "cuda", "gpu", "driver", "matmul_precision", "settings")
OF_KERNELS = ("kernels", "compiler", "compiler_version", "compiler_flags", "cpu", "bfloat16")


@pytest.mark.parametrize("key", [*DECIDES, *OF_KERNELS])
def test_each_entry_of_the_environment_that_decides_is_compared(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Those that a machine can be given have tests by which a run sees them; bfloat16's needs a CPU of another kind."""
    here = parity.environment("cpu") | {key: "another"}
    monkeypatch.setattr(parity, "environment", lambda _: here)
    tree.refused_here(f"{key} is another here")


def fake_gpu(folder: Path, name: str, driver: str) -> str:
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{name}, {driver}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_a_receipt_for_another_gpu_or_driver(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = fake_gpu(tmp_path / "here", "NVIDIA H200", "570.1")
    monkeypatch.setenv("PATH", here)
    forge(tree, device="cuda")
    command = ("impl/verify.py", "--parity", "--device", "cuda:0")
    assert tree.python(*command, PATH=here).returncode == 0
    for other, sentence in (
        (fake_gpu(tmp_path / "a", "NVIDIA A100", "570.1"), "gpu is NVIDIA A100 here"),
        (fake_gpu(tmp_path / "b", "NVIDIA H200", "580.2"), "driver is 580.2 here"),
    ):
        done = tree.python(*command, PATH=other)
        assert (done.returncode, sentence in done.stderr) == (3, True), done


def test_a_receipt_for_another_version_of_a_dependency(tree: Tree, tmp_path: Path) -> None:
    metadata = tmp_path / "mpmath-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mpmath\nVersion: 99.0\n")
    shown = read_parity_receipt(tree.receipts()[0]).part("installed")["mpmath"]
    tree.refused(f"mpmath is 99.0 here, {shown} when parity was shown", PYTHONPATH=str(tmp_path))


# 3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [False, True])
def test_a_tolerance_edited(tree: Tree, committed: bool) -> None:
    tree.edit("spec/losses.json", "1e-12", "1e-2")
    if committed:
        tree.commit("a wider tolerance")
    tree.refused("spec/losses.json was edited since parity was shown")
    tree.check_refused("spec/losses.json was edited since parity was shown")


def test_a_loss_added_to_the_spec_needs_its_own_proof(tree: Tree) -> None:
    spec = load_losses(tree.root)
    spec["losses"]["third"] = spec["losses"]["toy"] | {"obligations": {"third/value": OBLIGATION}}
    (tree.root / "spec" / "losses.json").write_text(json.dumps(spec))
    tree.refused("spec/losses.json was edited since parity was shown")
    shutil.copy(tree.root / "impl/paritygate/losses/toy.py", tree.root / "impl/paritygate/losses/third.py")
    output = tree.parity()
    assert "parity: NOT green, no receipt: third/value has 0 of the 20 comparisons that count" in output


# 4 ---------------------------------------------------------------------------------------------------------------

EDITED = (
    "reference/paritygate_reference/toy.py",
    "impl/paritygate/losses/toy.py",
    "impl/paritygate/receipts/parity.py",
    "tests/parity/test_toy.py",
    "tests/conftest.py",
    "spec/allowed_signers",
    "spec/schema/losses.schema.json",
    "pyproject.toml",
    "constraints.txt",
)


@pytest.mark.parametrize("name", EDITED)
def test_a_file_edited(tree: Tree, name: str) -> None:
    with (tree.root / name).open("a") as file:
        file.write("\n")
    tree.refused_here(f"{name} was edited since parity was shown")


ADDED = (
    "reference/paritygate_reference/extra.py",
    "impl/paritygate/losses/__init__.pyc",
    "impl/json_extra.py",
    "tests/parity/conftest.py",
    "tests/parity/__pycache__/extra.py",
    "spec/schema/extra.json",
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "sitecustomize.py",
    "extra.pth",
)


@pytest.mark.parametrize("name", ADDED)
def test_a_file_added_untracked(tree: Tree, name: str) -> None:
    (tree.root / name).parent.mkdir(exist_ok=True)
    (tree.root / name).write_text("")
    tree.refused_here(f"{name} was added since parity was shown")


def test_every_configuration_file_of_the_installed_pytest_is_a_subject(tree: Tree) -> None:
    """By the names in its own source, which another version of pytest may add to."""
    names = set(re.findall(r'"(\.?\w+\.(?:toml|ini|cfg))"', inspect.getsource(findpaths)))
    assert names >= {"pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"}
    for name in names - {"pyproject.toml"}:
        (tree.root / name).write_text("")
    assert names - subjects(tree.root).keys() == set()


@pytest.mark.parametrize("name", ["reference/paritygate_reference/toy.py", "impl/paritygate/losses/toy.py"])
def test_a_file_deleted(tree: Tree, name: str) -> None:
    (tree.root / name).unlink()
    tree.refused(f"{name} was deleted since parity was shown")


def test_a_listed_file_deleted(tree: Tree) -> None:
    (tree.root / "constraints.txt").unlink()
    tree.refused("constraints.txt is missing: parity is shown for it")


def test_names_that_no_receipt_can_hold_and_files_that_cannot_be_read(tree: Tree) -> None:
    odd = os.fsencode(tree.root / "impl") + b"/\xff.py"
    with open(odd, "w"):
        pass
    tree.refused("'impl/\\udcff.py' cannot be read")
    os.unlink(odd)
    os.mkfifo(tree.root / "tests" / "pipe")
    tree.refused("tests/pipe is not a plain file")


# 5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_an_edit_hidden_from_git(tree: Tree, flag: str) -> None:
    name = "impl/paritygate/losses/toy.py"
    tree.git("update-index", flag, name)
    tree.edit(name, "number * number", "number")
    assert name not in tree.git("status", "--porcelain")
    tree.refused(f"{name} was edited since parity was shown")


# 7 ---------------------------------------------------------------------------------------------------------------


def test_an_edited_receipt(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    receipt.write_bytes(receipt.read_bytes().replace(b'"comparisons":30', b'"comparisons":99'))
    tree.refused("was edited or cut short: its bytes no longer have the digest in its name")


def test_a_truncated_receipt(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    receipt.write_bytes(receipt.read_bytes()[:-100])
    tree.refused("was edited or cut short: its bytes no longer have the digest in its name")


def test_an_edited_receipt_under_the_name_of_its_new_digest_but_not_canonical(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    data = receipt.read_bytes() + b"\n"
    receipt.unlink()
    (receipt.parent / f"parity-{hashlib.sha256(data).hexdigest()}.json").write_bytes(data)
    tree.refused("is not in canonical form")


def test_a_receipt_under_another_name(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    receipt.rename(receipt.with_name("parity-latest.json"))
    assert NAME.fullmatch("parity-latest.json") is None
    tree.refused("is not named parity-<sha256 of its bytes>.json")


# 14 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["impl/paritygate/losses/toy.py", "spec/losses.json", "tests/parity", "spec", "reference"]
)
def test_a_symbolic_link_among_the_subjects(tree: Tree, tmp_path: Path, name: str) -> None:
    (tree.root / name).rename(tmp_path / "moved")
    (tree.root / name).symlink_to(tmp_path / "moved")
    tree.refused_here(f"{name} is a symbolic link")


def test_a_new_symbolic_link_is_not_green_either(bare: Tree) -> None:
    (bare.root / "impl" / "paritygate" / "__pycache__").mkdir(exist_ok=True)
    (bare.root / "impl" / "paritygate" / "__pycache__" / "x.pyc").symlink_to("/dev/null")
    output = bare.parity()
    assert "parity: NOT green, no receipt: impl/paritygate/__pycache__/x.pyc is a symbolic link" in output
    assert bare.receipts() == []
    bare.refused("is a symbolic link")


def test_every_file_is_a_subject_whatever_its_suffix() -> None:
    """Of the real tree: kernels and their headers, templates, recorded numbers; cached bytecode alone is none."""
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("impl", "reference", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not (path.parent.name == "__pycache__" and path.suffix == ".pyc")
    }
    assert {Path(name).suffix for name in files} >= {".py", ".cpp", ".hpp", ".j2", ".json"}
    assert files <= subjects(ROOT).keys()


@pytest.mark.parametrize("name", ["kernel.hpp", "kernel.cpp", "table.json", "page.j2", "LICENSE", ".hidden", "x.pyc"])
def test_a_file_that_is_added_edited_deleted_whatever_it_is_called(tree: Tree, name: str) -> None:
    path = tree.root / "impl" / "paritygate" / "losses" / name
    path.write_text("one")
    tree.refused_here(f"{name} was added since parity was shown")
    for receipt in tree.receipts():
        receipt.unlink()
    before = subjects(tree.root)
    path.write_text("two")
    assert difference(before, subjects(tree.root)) == f"impl/paritygate/losses/{name} was edited"
    path.unlink()
    assert difference(before, subjects(tree.root)) == f"impl/paritygate/losses/{name} was deleted"
