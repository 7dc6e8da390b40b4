"""A small copy of the tree: the real receipts, guard and ledger, two toy losses, a parity run of a second."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from paritygate.errors import Refused
from paritygate.receipts import require_parity
from paritygate.receipts.git import git

ROOT = Path(__file__).resolve().parents[2]

COPIED = (
    "constraints.txt",
    "pyproject.toml",
    "impl/verify.py",
    "impl/paritygate/__init__.py",
    "impl/paritygate/bootstrap.py",
    "impl/paritygate/errors.py",
    "spec/allowed_signers",
    "spec/service.json",
    "tests/conftest.py",
    "impl/paritygate_pytest.py",
)

LOSS = '''"""A toy loss: the mean of squares."""


def value(numbers):
    return sum(number * number for number in numbers) / len(numbers)
'''

REFERENCE = '''"""What the toy loss means."""

import math


def value(numbers):
    return math.fsum(number**2 for number in numbers) / len(numbers)
'''

PARITY = '''"""The toy loss against its definition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paritygate.harness import compare
from paritygate_reference import NAME as reference

NUMBERS = st.lists(st.floats(-8, 8), min_size=1, max_size=8)


@pytest.mark.obligation("NAME/value")
@settings(max_examples=30)
@given(numbers=NUMBERS)
def test_value(numbers, losses):
    compare("NAME/value", losses.NAME.value(numbers), reference.value(numbers), dtype="float64")


@pytest.mark.obligation("NAME/sign")
@pytest.mark.parametrize("number", [-2.0, -1.0, 0.0, 3.0])
def test_sign(number, losses):
    compare("NAME/sign", losses.NAME.value([number]) >= 0.0, True, dtype="float64")
'''

RUN = '''"""The least that a run is: the guard, then the loss, then whether it was the code that was shown."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
sys.pycache_prefix = os.devnull
from paritygate.bootstrap import bootstrap
from paritygate.errors import ParityGateError

try:
    root = bootstrap(__file__)
    from paritygate.receipts import guard

    service, trust = "--service" in sys.argv, "--trust-receipt" in sys.argv
    receipt = guard(root, ["toy", "other"], "cpu", full_run=service, trust_receipt=trust, say=print)
except ParityGateError as error:
    print(f"run.py: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)

from paritygate.losses import toy
from paritygate.receipts import refuse_other_code

try:
    value = toy.value([2.0])
    refuse_other_code(root, receipt)
except ParityGateError as error:
    print(f"run.py: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)
print("ran", value, receipt.path.name)
'''

OBLIGATION = {
    "claim": "It is the definition's.",
    "min_comparisons": 20,
    "tolerances": [{"dtype": "float64", "device": "any", "regime": "ordinary", "rtol": 1e-12, "atol": 1e-12}],
}


@dataclass(frozen=True)
class Tree:
    """A small tree at `root`; every command runs in a process of its own, in the environment that it is given."""

    root: Path
    interpreter: str = sys.executable

    def git(self, *arguments: str) -> str:
        """Output of a git command in the tree."""
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
        return git(self.root, *identity, *arguments)

    def commit(self, message: str = "a change") -> None:
        """Commit everything."""
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter in the tree."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        command = [self.interpreter, *arguments]
        variables = kept | {"OMP_NUM_THREADS": "1"} | environment
        return subprocess.run(command, cwd=self.root, env=variables, capture_output=True, text=True, check=False)

    def parity(self, *arguments: str, flags: Iterable[str] = (), **environment: str) -> str:
        """Output of a parity session."""
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment  # a fifth of the time
        done = self.python(*flags, "-m", "pytest", "tests/parity", "-q", *arguments, **environment)
        return done.stdout + done.stderr

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`impl/run.py`, the least that a run is."""
        return self.python("impl/run.py", *arguments, **environment)

    def refused(self, sentence: str, *arguments: str, **environment: str) -> None:
        """The run ends with exit code 3 and one line that holds `sentence`, before the loss is reached."""
        done = self.run(*arguments, **environment)
        assert done.returncode == 3, done
        assert sentence in done.stderr, (sentence, done.stderr)
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("paritygate: compiling ")]
        assert len(lines) == 1, done.stderr
        assert "ran" not in done.stdout.split(), done.stdout

    def refused_here(self, sentence: str) -> None:
        """The same check in this process: the sentence, and the exit code that it carries."""
        with pytest.raises(Refused) as refusal:
            require_parity(self.root, ["toy", "other"], "cpu")
        assert sentence in str(refusal.value)
        assert refusal.value.exit_code == 3

    def check_refused(self, sentence: str, *arguments: str, **environment: str) -> None:
        """verify.py --parity says the same."""
        done = self.python("impl/verify.py", "--parity", *arguments, **environment)
        assert (done.returncode, sentence in done.stderr) == (3, True), done

    def accepted(self, *arguments: str, **environment: str) -> None:
        """The run starts, and verify.py agrees."""
        done = self.run(*arguments, **environment)
        assert (done.returncode, "ran 4.0" in done.stdout) == (0, True), done
        done = self.python("impl/verify.py", "--parity", **environment)
        assert (done.returncode, "parity holds for" in done.stdout) == (0, True), done

    def receipts(self) -> list[Path]:
        """The parity receipts of the tree."""
        return sorted((self.root / "receipts").glob("parity-*.json"))

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace `old`, which must be there, in a file."""
        path = self.root / name
        text = path.read_text()
        assert old in text, (name, old)
        path.write_text(text.replace(old, new))

    def copy(self, to: Path) -> "Tree":
        """The same tree, files and git, at another path."""
        shutil.copytree(self.root, to, symlinks=True)
        return Tree(to)


def virtual_environment(folder: Path) -> tuple[str, Path]:
    """An interpreter with site-packages of its own, and that folder: what lies there hides what this one has."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    (site / "inherited.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return str(folder / "bin" / "python"), site


def build(root: Path) -> Tree:
    """A small tree at `root`, committed, without a receipt."""
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    clean = shutil.ignore_patterns("__pycache__")
    for package in ("harness", "native", "receipts", "spec"):
        shutil.copytree(ROOT / "impl/paritygate" / package, root / "impl/paritygate" / package, ignore=clean)
    shutil.copytree(ROOT / "spec/schema", root / "spec/schema")
    spec = {"version": 1, "losses": {}}
    files = {
        "impl/run.py": RUN,
        "impl/paritygate/losses/__init__.py": "",
        "reference/paritygate_reference/__init__.py": "",
    }
    for name in ("toy", "other"):
        obligations = {f"{name}/value": OBLIGATION, f"{name}/sign": OBLIGATION | {"min_comparisons": 4}}
        spec["losses"][name] = {"title": name, "source": "ours", "functions": ["value"], "obligations": obligations}
        files[f"impl/paritygate/losses/{name}.py"] = LOSS
        files[f"reference/paritygate_reference/{name}.py"] = REFERENCE
        files[f"tests/parity/test_{name}.py"] = PARITY.replace("NAME", name)
    files["spec/losses.json"] = json.dumps(spec, indent=2)
    files["receipts/README.md"] = "written by a parity session\n"
    files[".gitignore"] = "__pycache__/\n.hypothesis/\n.pytest_cache/\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    tree = Tree(root)
    tree.git("init", "-q", "-b", "main")
    tree.commit("a small tree")
    return tree
