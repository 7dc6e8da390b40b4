"""Sessions that are asked for something else: another device, another implementation, a seed, the data."""

import os
from pathlib import Path

from paritygate.receipts.parity import read_parity_receipt
from tests.guard.small_tree import Tree, virtual_environment

FAKE_TORCH = """
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)


__version__ = "2.99.0+cu131"
get_float32_matmul_precision = lambda: "highest"
get_num_threads = lambda: 3
"""


def with_gpu(folder: Path) -> tuple[str, dict[str, str]]:
    """The interpreter and environment of a machine with a GPU, as far as a session can tell."""
    interpreter, site = virtual_environment(folder)
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text(FAKE_TORCH)
    (site / "torch" / "version.py").write_text("__version__ = '2.99.0+cu131'\ncuda: Optional[str] = '13.1'\n")
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1'\n")
    (folder / "nvidia-smi").chmod(0o755)
    return interpreter, {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_a_cuda_session_shows_the_same_obligations_and_leaves_a_receipt_for_that_device(
    tree: Tree, tmp_path: Path
) -> None:
    interpreter, machine = with_gpu(tmp_path / "machine")
    tree = Tree(tree.root, interpreter)
    (cuda_receipt,) = tree.receipts()
    done = tree.python("-m", "pytest", "-q", "-m", "gpu", "--device", "cuda", **machine)
    assert "parity: green, 4 obligations" in done.stdout, done
    (receipt,) = [read_parity_receipt(path) for path in tree.receipts() if path != cuda_receipt]
    shown = receipt.part("environment")
    expected = {"device": "cuda", "gpu": "NVIDIA H200", "driver": "570.1", "cuda": "13.1", "torch": "2.99.0+cu131"}
    assert {key: shown[key] for key in expected} == expected
    assert tree.python("impl/verify.py", "--parity", "--device", "cuda", **machine).returncode == 0
    tree.check_refused("no CUDA device can be named here", "--device", "cuda", PATH="/usr/bin:/bin")
    tree.check_refused("torch is 2.99.0+cu131 here", **machine)  # the cpu receipt is for another torch


def test_cuda_where_there_is_none_stops_at_once(bare: Tree) -> None:
    for arguments, sentence in (
        (("--device", "cuda"), "ERROR: --device cuda: CUDA is unavailable (torch "),
        (("--device", "cuda:x"), "ERROR: --device cuda:x: cpu or cuda is expected"),
        (("-m", "gpu"), "ERROR: -m gpu runs on a CUDA device: add --device cuda."),
        (("--device", "tpu"), "ERROR: --device tpu: cpu or cuda is expected"),
    ):
        done = bare.python("-m", "pytest", "-q", *arguments, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 4, done
        assert sentence in done.stderr
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("paritygate: compiling ")]
        assert len(lines) == 1, done.stderr


def test_another_implementation_gets_a_table_and_no_receipt(bare: Tree, tmp_path: Path) -> None:
    adapter = tmp_path / "elsewhere" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "__init__.py").write_text("")
    (adapter / "toy.py").write_text("def value(numbers):\n    return max(number * number for number in numbers)\n")
    done = bare.python("-m", "pytest", "tests/parity", "--implementation", "adapter", PYTHONPATH=str(adapter.parent))
    rows = {
        line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith(("toy/", "other/"))
    }
    assert "adapter against the definitions (cpu)" in done.stdout
    assert rows["toy/sign"] == ["4", "0", "agrees"]
    assert rows["toy/value"][-1] == "departs"
    assert "other/value" not in rows, "what it does not have is not listed"
    assert "adapter has no other" in done.stdout
    assert bare.receipts() == []
    assert done.returncode == 1
    done = bare.python("-m", "pytest", "tests/parity", "--implementation", "paritygate.losses")
    assert done.stdout.count("agrees") == 4
    (adapter / "toy.py").write_text(
        "from paritygate.harness import Unsupported\n\ndef value(numbers):\n    raise Unsupported('no squares')\n"
    )
    done = bare.python("-m", "pytest", "tests/parity", "--implementation", "adapter", PYTHONPATH=str(adapter.parent))
    assert "unsupported: no squares" in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith(("toy/", "other/"))]
    assert (done.returncode, bare.receipts()) == (0, [])
    done = bare.python("-m", "pytest", "tests/parity", "--implementation", "paritygate.losses")
    assert (done.returncode, bare.receipts()) == (0, [])


def test_an_implementation_that_raises_does_not_agree(bare: Tree, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "__init__.py").write_text("")
    (tmp_path / "adapter" / "toy.py").write_text(
        "def value(numbers):\n    return numbers[0] ** 2 / (numbers[0] != 3)\n"
    )
    done = bare.python("-m", "pytest", "tests/parity", "--implementation", "adapter", PYTHONPATH=str(tmp_path))
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith("toy/")}
    assert rows["toy/sign"] == ["3", "0", "fails"]


def test_an_obligation_that_the_spec_does_not_declare(bare: Tree) -> None:
    bare.edit("tests/parity/test_toy.py", 'obligation("toy/sign")', 'obligation("toy/sing")')
    done = bare.python("-m", "pytest", "tests/parity")
    assert "spec/losses.json declares no obligation 'toy/sing'" in done.stdout + done.stderr
    assert (done.returncode, bare.receipts()) == (4, [])


def test_sessions_without_obligations_say_nothing_of_parity(bare: Tree) -> None:
    (bare.root / "tests" / "test_plain.py").write_text("def test_plain():\n    pass\n")
    done = bare.python("-m", "pytest", "tests", "--ignore", "tests/parity")
    assert (done.returncode, "parity:" in done.stdout) == (0, False), done


def test_the_whole_suite_may_show_parity_too(bare: Tree) -> None:
    (bare.root / "tests" / "test_plain.py").write_text("def test_plain():\n    pass\n")
    assert "parity: green, 4 obligations" in bare.python("-m", "pytest").stdout
    for path in bare.receipts():
        path.unlink()
    (bare.root / "tests" / "test_plain.py").write_text("def test_plain():\n    assert False\n")
    done = bare.python("-m", "pytest")
    assert "parity: NOT green, no receipt: pytest ended with exit code 1" in done.stdout, done
    assert bare.receipts() == []


DATA = "def test_data(tau_bench_dir):\n    assert tau_bench_dir.is_dir()\n"


def test_the_data_may_be_missing_but_not_under_ci(bare: Tree, tmp_path: Path) -> None:
    (bare.root / "tests" / "test_data.py").write_text(DATA)
    command = ("-m", "pytest", "-q", "tests/test_data.py")
    assert "1 skipped" in bare.python(*command).stdout
    done = bare.python(*command, CI="1")
    assert (done.returncode, "names no tau-bench retail folder" in done.stdout) == (1, True), done
    (tmp_path / "tools_info.json").write_text("[]")
    assert "1 passed" in bare.python(*command, CI="1", PARITYGATE_TAU_BENCH=str(tmp_path)).stdout
