"""A forged receipt with a consistent name: only parity shown again, or a signature, can tell. Kinds: README.md here."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest

from paritygate.receipts.files import canonical
from paritygate.receipts.parity import read_parity_receipt, statement_of, write_parity_receipt
from paritygate.receipts.subjects import subjects
from tests.guard.small_tree import Tree
from tests.guard.test_false_sessions import poison_rewritten
from tests.processes import runs

CELL = {"dtype": "float64", "regime": "ordinary", "oracle": "reference", "comparisons": 30, "worst_margin": 0.5}


def forge(tree: Tree, comparisons: int = 30) -> Path:
    """A receipt for `tree` as it is that no session wrote: every name and digest in it is consistent."""
    names = [f"{loss}/{claim}" for loss in ("toy", "other") for claim in ("value", "sign")]
    result = {"comparisons": comparisons, "worst_margin": 0.5, "cells": [CELL | {"comparisons": comparisons}]}
    statement = statement_of(
        tree.root,
        device="cpu",
        files=subjects(tree.root),
        results=dict.fromkeys(names, result),
        hypothesis={"derandomized": True, "seed": None, "version": hypothesis.__version__},
        session={"arguments": ["tests/parity"], "tests": 10, "dtypes": ["float64"]},
    )
    return write_parity_receipt(tree.root, statement)


def full_run_refused(tree: Tree, sentence: str, *arguments: str) -> None:
    done = tree.run("--service", *arguments)
    assert (done.returncode, "ran" in done.stdout.split()) == (3, False), done
    assert sentence in done.stderr, done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("paritygate: compiling ")]
    assert len(lines) == 1, done.stderr


def test_a_full_run_shows_parity_again(tree: Tree) -> None:
    tree.commit("the receipt")
    (receipt,) = tree.receipts()
    done = tree.run("--service", PYTEST_ADDOPTS="-k nothing", PYTHONWARNINGS="error")
    assert (done.returncode, "ran 4.0" in done.stdout) == (0, True), done
    assert "showing parity again in a clean worktree" in done.stdout
    (fresh,) = (path for path in tree.receipts() if path != receipt)
    assert fresh.name in done.stdout  # the run stands on what it has seen itself
    assert tree.git("worktree", "list").count("\n") == 0


def test_parity_shown_again_ends_with_the_run_that_asked(tree: Tree, tmp_path: Path) -> None:
    """Not minutes later, beside the run that is resumed."""
    began = tmp_path / "began"
    conftest = tree.root / "tests" / "conftest.py"
    conftest.write_text(f"import os, time\nopen({str(began)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    (receipt,) = tree.receipts()
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, 'impl')\n"
        "from paritygate.receipts import read_parity_receipt; from paritygate.receipts.rerun import run_parity\n"
        "run_parity(Path(), 'cpu', read_parity_receipt(Path(sys.argv[1])), dict(os.environ))"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(receipt)], cwd=tree.root)
    until = time.monotonic() + 60
    while not (began.exists() and began.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    run.terminate()
    run.wait(timeout=10)
    assert not runs(int(began.read_text()))


def test_a_full_run_repeats_the_seed_of_the_receipt(bare: Tree) -> None:
    assert "parity: green" in bare.parity("-p", "_hypothesis_pytestplugin", "--hypothesis-seed", "7")
    done = bare.run("--service")
    assert (done.returncode, "ran 4.0" in done.stdout) == (0, True), done
    assert [read_parity_receipt(path).part("hypothesis")["seed"] for path in bare.receipts()] == ["7", "7"]


def test_a_forged_receipt_over_a_broken_loss(bare: Tree) -> None:
    bare.edit("impl/paritygate/losses/toy.py", "number * number", "abs(number)")
    bare.commit("a broken loss")
    forge(bare)
    done = bare.run()
    assert (done.returncode, "ran 2.0" in done.stdout) == (0, True), done  # a bare digest cannot show it
    full_run_refused(bare, "parity, run again in a clean worktree, is not green (parity: NOT green, no receipt: ")


def test_a_committed_forgery_is_not_taken_for_the_rerun_s(bare: Tree) -> None:
    bare.edit("impl/paritygate/losses/toy.py", "number * number", "abs(number)")
    forge(bare)
    bare.commit("a broken loss and a forged receipt")
    full_run_refused(bare, "is not green")


def test_a_forged_count(bare: Tree) -> None:
    comparisons = 31
    forge(bare, comparisons)
    full_run_refused(
        bare, f"does not tell what a parity run finds: other/sign has {comparisons} comparisons in it and 4"
    )


def test_a_session_with_poisoned_rules_is_a_forgery_too(bare: Tree) -> None:
    """pytest reads its cache of conftest.py before that can object: what comes of it lets local runs start, no more."""
    bare.edit("impl/paritygate/losses/toy.py", "number * number", "abs(number)")
    bare.commit("a broken loss")
    forged = {"comparisons": 30, "worst_margin": 0.5, "cells": [CELL]}
    configure = "def pytest_configure(config: pytest.Config) -> None:\n"
    lie = f"""    from paritygate.harness import session

    session.Session.reasons = lambda *_: []
    session.Ledger.results = lambda self: dict.fromkeys(session.required(self.spec, self.device), {forged!r})
"""
    poison_rewritten(bare, "tests/conftest.py", (configure, configure + lie))
    assert "parity: green" in bare.parity()
    done = bare.run()
    assert (done.returncode, "ran 2.0" in done.stdout) == (0, True), done
    full_run_refused(bare, "parity, run again in a clean worktree, is not green")


def test_a_full_run_is_of_a_commit(tree: Tree) -> None:
    tree.edit("impl/paritygate/losses/toy.py", '"""A toy loss', '"""The toy loss')
    for path in tree.receipts():
        path.unlink()
    assert "parity: green" in tree.parity()
    tree.accepted()
    full_run_refused(tree, "impl/paritygate/losses/toy.py was edited since the last commit")


def test_a_full_run_needs_git(tree: Tree, tmp_path: Path) -> None:
    (tree.root / ".git").rename(tmp_path / "git")
    tree.accepted()
    full_run_refused(tree, "gives no clean git worktree")


def test_hooks_and_filters_do_not_reach_the_worktree(tree: Tree) -> None:
    hook = tree.root / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch conftest.py\n")
    hook.chmod(0o755)
    (tree.root / ".git" / "info").mkdir(exist_ok=True)
    done = tree.run("--service")
    assert (done.returncode, "ran 4.0" in done.stdout) == (0, True), done
    (tree.root / ".git" / "info" / "attributes").write_text("*.py filter=evil\n")
    tree.git("config", "filter.evil.smudge", "sed s/number/numbers/")
    full_run_refused(tree, "was edited since the last commit")


# --trust-receipt ----------------------------------------------------------------------------------------------------


@pytest.fixture
def signed(bare: Tree, tmp_path: Path) -> tuple[Tree, Path]:
    """A tree with an allowed key, a receipt, and its signature; and the key."""
    key = new_key(tmp_path / "key")
    with (bare.root / "spec" / "allowed_signers").open("a") as file:
        file.write(f'reviewer@localhost namespaces="paritygate-parity" {key.with_suffix(".pub").read_text()}')
    assert "parity: green" in bare.parity()
    sign(bare.receipts()[0], key)
    return bare, key


def new_key(path: Path) -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed: signatures cannot be tried")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path


def sign(receipt: Path, key: Path, namespace: str = "paritygate-parity") -> None:
    signature = receipt.with_name(f"{receipt.name}.sig")
    signature.unlink(missing_ok=True)
    command = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", namespace, str(receipt)]
    subprocess.run(command, check=True, capture_output=True)


def test_a_signed_receipt_replaces_the_rerun(signed: tuple[Tree, Path]) -> None:
    tree, _ = signed
    done = tree.run("--service", "--trust-receipt")
    assert (done.returncode, "signed by reviewer@localhost" in done.stdout) == (0, True), done


def test_a_receipt_without_a_signature(signed: tuple[Tree, Path]) -> None:
    tree, _ = signed
    tree.receipts()[0].with_name(f"{tree.receipts()[0].name}.sig").unlink()
    full_run_refused(tree, "has no signature beside it", "--trust-receipt")


def test_a_signature_by_another_key_or_for_another_purpose(signed: tuple[Tree, Path], tmp_path: Path) -> None:
    tree, key = signed
    sign(tree.receipts()[0], new_key(tmp_path / "stranger"))
    full_run_refused(tree, "is not by a key in spec/allowed_signers", "--trust-receipt")
    sign(tree.receipts()[0], key, namespace="file")
    full_run_refused(tree, "does not verify for the bytes of", "--trust-receipt")


def test_a_signature_over_other_bytes(signed: tuple[Tree, Path]) -> None:
    tree, _ = signed
    (receipt,) = tree.receipts()
    statement = json.loads(receipt.read_bytes())
    session = statement["predicate"]["configuration"][3]
    session["annotations"]["tests"] += 1
    session["digest"]["sha256"] = hashlib.sha256(canonical(session["annotations"])).hexdigest()
    forged = write_parity_receipt(tree.root, statement)
    os.rename(f"{receipt}.sig", f"{forged}.sig")
    receipt.unlink()
    tree.accepted()
    full_run_refused(tree, "does not verify for the bytes of", "--trust-receipt")


def test_a_key_added_by_the_forger_asks_for_a_new_proof(tree: Tree, tmp_path: Path) -> None:
    key = new_key(tmp_path / "forger")
    with (tree.root / "spec" / "allowed_signers").open("a") as file:
        file.write(f"forger {key.with_suffix('.pub').read_text()}")
    sign(tree.receipts()[0], key)
    full_run_refused(tree, "spec/allowed_signers was edited since parity was shown", "--trust-receipt")
