"""The built wheel in an environment of its own, and the repository of examples/own_loss beside it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stranger:
    """A repository at `root` of somebody who has the wheel: `python` is an interpreter that has it installed."""

    root: Path
    python: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter there, with nothing of this session's environment that steers."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        variables = kept | {"OMP_NUM_THREADS": "1"} | environment
        command = [str(self.python), *arguments]
        return subprocess.run(command, cwd=self.root, env=variables, capture_output=True, text=True, check=False)

    def session(self, *arguments: str, **environment: str) -> str:
        """Output of a parity session."""
        done = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, **environment)
        return done.stdout + done.stderr

    def receipts(self) -> list[Path]:
        """The receipts there."""
        return sorted((self.root / "receipts").glob("parity-*.json"))

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace `old`, which must be there, in a file."""
        text = (self.root / name).read_text()
        assert old in text, (name, old)
        (self.root / name).write_text(text.replace(old, new))

    def refused(self, sentence: str, *flags: str, **environment: str) -> None:
        """train.py ends with exit code 3 and one line that holds `sentence`, before it trains."""
        done = self.run(*flags, "train.py", **environment)
        assert (done.returncode, sentence in done.stderr) == (3, True), done
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert "one step" not in done.stdout

    def copy(self, root: Path) -> "Stranger":
        """The same repository at another path."""
        shutil.copytree(self.root, root, symlinks=True)
        return Stranger(root, self.python)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


def environment_with(wheel: Path, folder: Path) -> Path:
    """An interpreter in which the wheel is installed, and everything that is installed here behind it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    site = Path(next(iter(folder.glob("lib/python*/site-packages"))))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "inherited.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with(wheel, tmp_path_factory.mktemp("installed") / "venv")


@pytest.fixture(scope="session")
def bare_template(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    root = tmp_path_factory.mktemp("stranger") / "bare"
    clean = shutil.ignore_patterns("__pycache__", ".hypothesis", "parity-*.json")
    shutil.copytree(ROOT / "examples" / "own_loss", root, ignore=clean)
    return Stranger(root, installed)


@pytest.fixture(scope="session")
def green_template(bare_template: Stranger, tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    green = bare_template.copy(tmp_path_factory.mktemp("stranger") / "green")
    output = green.session("--losses", "gspo")
    assert "parity: green, 3 obligations; receipts/parity-" in output, output
    return green


@pytest.fixture
def bare(bare_template: Stranger, tmp_path: Path) -> Stranger:
    """Without a receipt."""
    return bare_template.copy(tmp_path / "bare")


@pytest.fixture
def green(green_template: Stranger, tmp_path: Path) -> Stranger:
    """With a green one."""
    return green_template.copy(tmp_path / "green")
