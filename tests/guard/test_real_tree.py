"""One attack of each kind on the real tree. What needs a whole parity session runs at full counts only (make soak)."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paritygate.receipts.parity import read_parity_receipt, statement_of, write_parity_receipt
from paritygate.receipts.subjects import subjects
from paritygate.spec import load
from paritygate.spec.losses import load_losses
from tests.counts import SOAK
from tests.guard.run_directory import build_run, recount
from tests.guard.small_tree import ROOT, Tree
from tests.guard.test_changed_files import fake_torch
from tests.guard.test_false_sessions import plugin, poison

full = pytest.mark.skipif(not SOAK, reason="needs a whole parity session: make soak")
VERIFY = ("impl/verify.py", "--parity")
NARROW = "tests/parity/test_averaging.py"
LOSS = "impl/paritygate/losses/averaging.py"


def copy_of_the_tree(root: Path) -> Tree:
    """The subjects of the real tree and its experiments, committed, without a receipt."""
    specs = [path.relative_to(ROOT).as_posix() for path in (ROOT / "spec").glob("*.json")]
    for name in [*subjects(ROOT), *specs, ".gitignore", "receipts/README.md"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    tree = Tree(root)
    tree.git("init", "-q", "-b", "main")
    tree.commit("the real tree")
    return tree


@pytest.fixture(scope="module")
def bare_real(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return copy_of_the_tree(tmp_path_factory.mktemp("real") / "bare")


@pytest.fixture(scope="module")
def green_real(bare_real: Tree, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    tree = bare_real.copy(tmp_path_factory.mktemp("real") / "green")
    output = tree.parity()
    assert "parity: green" in output, output[-2000:]
    return tree


@pytest.fixture
def real(bare_real: Tree, tmp_path: Path) -> Tree:
    return bare_real.copy(tmp_path / "tree")


@pytest.fixture
def green(green_real: Tree, tmp_path: Path) -> Tree:
    return green_real.copy(tmp_path / "tree")


def refused(tree: Tree, sentence: str, command: tuple[str, ...] = VERIFY, **environment: str) -> None:
    done = tree.python(*command, **environment)
    assert (done.returncode, sentence in done.stderr) == (3, True), done
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("paritygate: compiling ")]
    assert len(lines) == 1, done.stderr


def not_green(tree: Tree, output: str, sentence: str) -> None:
    assert "parity: NOT green, no receipt" in output, output[-2000:]
    assert sentence in output, output[-2000:]
    refused(tree, "no parity receipt in")


# What is refused before any session, and narrow sessions ----------------------------------------------------------


def test_no_receipt_for_a_check_a_local_run_and_the_synthetic_component(real: Tree, tau_bench_dir: Path) -> None:
    refused(real, "no parity receipt in")
    refused(real, "no parity receipt in", ("impl/run.py", "--spec", "spec/spod.json"))
    local = ("impl/run.py", "--spec", "spec/sdpo-local.json", "--tau-bench", str(tau_bench_dir))
    refused(real, "no parity receipt in", local)
    assert not (real.root / "runs").exists()


@full
def test_an_edit_during_the_session(real: Tree, tmp_path: Path) -> None:
    text = f"def pytest_collection_finish(session):\n    open({str(real.root / LOSS)!r}, 'a').write('# edited')\n"
    output = real.python("-m", "pytest", NARROW, "-p", "attack", **plugin(tmp_path / "attack", text)).stdout
    not_green(real, output, f"{LOSS} was edited during the session")


@full
def test_a_single_file(real: Tree) -> None:
    not_green(real, real.python("-m", "pytest", NARROW).stdout, "grpo/")


def test_python_optimised(real: Tree) -> None:
    refused(real, "python -O removes the assertions", ("-O", *VERIFY))
    refused(real, "python -O removes the assertions", ("-O", "impl/run.py", "--spec", "spec/spod.json"))


@full
def test_a_plugin_with_too_few_examples(real: Tree, tmp_path: Path) -> None:
    text = 'import hypothesis\ntype.__setattr__(hypothesis.settings, "max_examples", property(lambda self: 1))\n'
    output = real.python("-m", "pytest", NARROW, "-p", "attack", **plugin(tmp_path / "attack", text)).stdout
    not_green(real, output, "averaging/value has ")


def test_poisoned_bytecode(real: Tree) -> None:
    poison(
        real, "impl/paritygate/receipts/parity.py", "if not candidates:", "if True:\n        return None\n    if True:"
    )
    poison(real, "impl/paritygate/spec/__init__.py", '"""Specs', 'raise SystemExit("poisoned")\n"""Specs')
    refused(real, "no parity receipt in", (*VERIFY, "--spec", "spec/sdpo-local.json"))


def test_paritygate_from_outside_the_tree(real: Tree, tmp_path: Path) -> None:
    elsewhere = real.copy(tmp_path / "elsewhere").root / "impl"
    (elsewhere / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(elsewhere)!r})\nimport paritygate\n"
    )
    refused(real, "paritygate was imported from", PYTHONPATH=str(elsewhere))
    run = ("impl/run.py", "--spec", "spec/spod.json")
    refused(real, "paritygate was imported from", run, PYTHONPATH=str(elsewhere))


@full
def test_workers_and_reruns(real: Tree) -> None:
    for flags, sentence in (
        (("-n", "1"), "spread over workers, whose comparisons are not merged"),
        (("--reruns", "1"), "failing tests would have been run again"),
    ):
        not_green(real, real.python("-m", "pytest", NARROW, *flags).stdout, sentence)


# On a tree whose parity was shown ---------------------------------------------------------------------------------


@full
def test_the_tree_is_accepted_fast_and_in_another_clone(green: Tree, tmp_path: Path) -> None:
    start = time.perf_counter()
    done = green.python(*VERIFY)
    seconds = time.perf_counter() - start
    assert (done.returncode, seconds <= 2.0) == (0, True), (done, seconds)
    green.commit("the receipt")
    green.git("clone", "-q", str(green.root), str(tmp_path / "clone"))
    clone = Tree(tmp_path / "clone")
    for path in clone.root.rglob("*.py"):
        os.utime(path, (1e9, 1e9))
    for spec in ("spec/sdpo-local.json", "spec/sdpo.json", "spec/spod.json"):
        done = clone.python(*VERIFY, "--spec", spec)
        assert done.returncode == 0, done


@full
def test_another_torch_device_or_precision(green: Tree, tmp_path: Path) -> None:
    refused(green, "torch is 9.9.9 here", PYTHONPATH=fake_torch(tmp_path / "a", "9.9.9", "None"))
    refused(green, "matmul_precision is", TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")
    refused(green, "no parity receipt for device cuda", (*VERIFY, "--device", "cuda"))


@full
def test_edited_added_deleted_hidden_and_linked_files_and_a_cut_receipt(green: Tree, tmp_path: Path) -> None:
    def undo() -> None:
        green.git("checkout", "-q", "--", ".")

    green.edit("spec/losses.json", '"rtol": 1e-06', '"rtol": 1e-02')
    refused(green, "spec/losses.json was edited since parity was shown")
    undo()
    (green.root / "tests/mutants/conftest.py").write_text("")
    refused(green, "tests/mutants/conftest.py was added since parity was shown")
    (green.root / "tests/mutants/conftest.py").unlink()
    (green.root / "reference/paritygate_reference/spod.py").unlink()
    refused(green, "reference/paritygate_reference/spod.py was deleted since parity was shown")
    undo()
    green.git("update-index", "--assume-unchanged", LOSS)
    (green.root / LOSS).write_text((green.root / LOSS).read_text() + "\n")
    assert LOSS not in green.git("status", "--porcelain")
    refused(green, f"{LOSS} was edited since parity was shown")
    green.git("update-index", "--no-assume-unchanged", LOSS)
    undo()
    (green.root / LOSS).rename(tmp_path / "moved.py")
    (green.root / LOSS).symlink_to(tmp_path / "moved.py")
    refused(green, f"{LOSS} is a symbolic link")
    (green.root / LOSS).unlink()
    undo()
    assert green.python(*VERIFY).returncode == 0
    (receipt,) = green.receipts()
    receipt.write_bytes(receipt.read_bytes()[:-1])
    refused(green, "was edited or cut short")


@full
def test_bytes_flipped_anywhere(green: Tree) -> None:
    from paritygate.errors import Refused
    from paritygate.receipts import require_parity

    rng = random.Random(2)
    (receipt,) = green.receipts()
    losses = list(load_losses(green.root)["losses"])
    names = [*subjects(green.root), *[str(receipt.relative_to(green.root))] * 20]
    flipped = 0
    while flipped < 500:
        path = green.root / rng.choice(names)
        data = path.read_bytes()
        if not data:
            continue
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        with pytest.raises(Refused):
            require_parity(green.root, losses, "cpu")
        path.write_bytes(data)
        flipped += 1
    require_parity(green.root, losses, "cpu")


@full
def test_a_finished_run_is_verified_from_the_command_line(green: Tree, tmp_path: Path) -> None:
    losses = load(ROOT / "spec" / "sdpo-local.json").losses
    run_dir = build_run(green, tmp_path / "run", losses)
    # Its receipts hold; it is no run of the whole protocol, which tests/experiment/test_audit.py holds against itself.
    refused(green, "are not the phases of", ("impl/verify.py", str(run_dir)))
    for path in sorted(path for path in run_dir.rglob("*") if path.is_file()):
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        refused(green, path.name, ("impl/verify.py", str(run_dir)))
        path.write_bytes(data)
    (run_dir / "items.jsonl").write_bytes((run_dir / "items.jsonl").read_bytes().replace(b'"reward":1', b'"reward":0'))
    recount(green, run_dir, losses)
    refused(green, "verdict.json is not the verdict", ("impl/verify.py", str(run_dir)))
    refused(green, "receipt.json is missing", ("impl/verify.py", str(tmp_path / "nothing")))


@full
def test_two_runs_resumed_at_once(green: Tree, tau_bench_dir: Path) -> None:
    run = ["impl/run.py", "--spec", "spec/sdpo-local.json", "--tau-bench", str(tau_bench_dir), "--output", "runs/a"]
    first = green.python(*run, "--until", "design_check", "--quiet")
    assert first.returncode == 0, first
    command = [sys.executable, *run, "--resume", "--until", "service_preflight", "--quiet"]
    pair = [
        subprocess.Popen(command, cwd=green.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate()[1] for process in pair]
    assert sorted(process.returncode for process in pair) == [0, 3], errors
    assert any("another run is at work in" in error for error in errors), errors


@full
def test_a_forged_receipt_and_a_run_against_a_service(green: Tree, tau_bench_dir: Path) -> None:
    (receipt,) = green.receipts()
    shown = read_parity_receipt(receipt)
    receipt.unlink()
    green.edit("impl/paritygate/losses/grpo.py", "rewards", "rewards ")
    text = (green.root / "impl/paritygate/losses/grpo.py").read_text()
    (green.root / "impl/paritygate/losses/grpo.py").write_text(f"{text}\n_right = group_mean_advantage\n{WRONG}")
    green.commit("a loss that divides by the standard deviation")
    statement = statement_of(
        green.root,
        device="cpu",
        files=subjects(green.root),
        results=shown.part("obligations"),
        hypothesis=shown.part("hypothesis"),
        session={key: shown.part("session")[key] for key in ("arguments", "tests", "dtypes")},
    )
    write_parity_receipt(green.root, statement)
    assert green.python(*VERIFY).returncode == 0  # a bare digest cannot show it
    run = ("impl/run.py", "--spec", "spec/sdpo-local.json", "--tau-bench", str(tau_bench_dir), "--quiet")
    service = {"TINKER_BASE_URL": "http://127.0.0.1:9", "TINKER_API_KEY": "tml-none"}
    refused(green, "parity, run again in a clean worktree, is not green", run, **service)
    assert green.git("worktree", "list").count("\n") == 0


WRONG = '''

def group_mean_advantage(rewards):
    """Divided by the standard deviation."""
    right = _right(rewards)
    return right / (right.std(correction=0) + 1e-6)
'''
