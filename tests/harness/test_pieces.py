"""`python -m paritygate.harness new`: where the pieces of a loss go in this repository, and what its mutant names."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paritygate.errors import BadInputError
from paritygate.harness.pieces import mutants_base, project_for, write_pieces
from paritygate.spec.project import project_at

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def like_this_one(tmp_path: Path) -> Path:
    """Its configuration, spec, one loss and the mutants of that."""
    for name in ("pyproject.toml", "spec/losses.json", "impl/paritygate/losses/grpo.py", "tests/mutants/grpo.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_mutants_are_named_from_where_those_that_are_there_are(like_this_one: Path) -> None:
    project = project_at(like_this_one)
    assert mutants_base(project_at(ROOT)) == mutants_base(project) == "impl/paritygate"
    paths = write_pieces(project, "entropy_kl")
    assert "impl/paritygate/losses/entropy_kl.py" in paths
    assert all((like_this_one / path).is_file() for path in paths)
    text = (like_this_one / "tests/mutants/entropy_kl.py").read_text()
    assert '"losses/entropy_kl.py"' in text


def test_the_spec_gets_tolerance_classes_that_ask_for_a_reason_and_keeps_what_stands_there(like_this_one: Path) -> None:
    before = (ROOT / "spec/losses.json").read_text()
    write_pieces(project_at(like_this_one), "entropy_kl")
    after = (like_this_one / "spec/losses.json").read_text()
    assert set(before.split("\n")) <= set(after.split("\n"))
    old, spec = json.loads(before), json.loads(after)
    for name in ("entropy_kl", "entropy_kl_sixty_digits"):
        assert spec["tolerances"].pop(name)["because"].startswith("TODO")
    obligations = spec["losses"].pop("entropy_kl")["obligations"]
    assert {name: obligation["tolerances"] for name, obligation in obligations.items()} == {
        "entropy_kl/value": "entropy_kl",
        "entropy_kl/gradient": "entropy_kl",
        "entropy_kl/oracle": "entropy_kl_sixty_digits",
    }
    assert "float64 reference" in obligations["entropy_kl/oracle"]["claim"]
    assert spec == old


def test_without_mutants_they_are_named_from_the_root(like_this_one: Path) -> None:
    shutil.rmtree(like_this_one / "tests")
    project = project_at(like_this_one)
    assert mutants_base(project) == "."
    write_pieces(project, "entropy_kl")
    assert '"impl/paritygate/losses/entropy_kl.py"' in (like_this_one / "tests/mutants/entropy_kl.py").read_text()


@pytest.mark.parametrize("name", ["1x", "Hinge", "_hinge", "class", "a-b", ""])
def test_what_cannot_be_the_name_of_a_module_is_no_loss(name: str, tmp_path: Path) -> None:
    project, _ = project_for(tmp_path)
    with pytest.raises(BadInputError, match="is no name for a loss"):
        write_pieces(project, name)


def test_an_empty_folder_becomes_a_repository_and_a_pyproject_that_is_there_is_left_alone(tmp_path: Path) -> None:
    project, written = project_for(tmp_path)
    assert written == ["pyproject.toml"]
    assert project == project_at(tmp_path)
    assert (project.implementation, project.tests, project.receipts) == ("src/my_losses", "tests/parity", "receipts")
    write_pieces(project, "hinge")
    lines = (tmp_path / "spec/losses.json").read_text().splitlines()
    assert [line for line in lines if line.strip().startswith('"hinge/value": {"claim"')]  # an obligation a line
    assert project_for(tmp_path / "src") == (project, [])
    other = tmp_path.with_name("other")
    other.mkdir()
    (other / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(BadInputError, match=r"has no \[tool.paritygate\](.|\n)*src/my_losses"):
        project_for(other)
    assert (other / "pyproject.toml").read_text() == "[project]\nname = 'x'\n"


def test_the_drafts_are_linted_and_formatted(like_this_one: Path) -> None:
    harness = "impl/paritygate/harness"  # without it ruff takes the harness for a third party's
    (like_this_one / harness).symlink_to(ROOT / harness)
    paths = [path for path in write_pieces(project_at(like_this_one), "entropy_kl") if path.endswith(".py")]
    for command in (("check",), ("format", "--diff")):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", *paths]
        done = subprocess.run(ruff, cwd=like_this_one, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_drafts_once_filled_hold_the_gradient_to_sixty_digits_and_ask_for_each_todo(tmp_path: Path) -> None:
    """The loss is minus the sum of the unmasked log-probabilities; first with twice its gradient, in both."""
    project, _ = project_for(tmp_path)
    write_pieces(project, "hinge")
    reference, implementation, test = (
        tmp_path / name
        for name in ("reference/my_reference/hinge.py", "src/my_losses/hinge.py", "tests/parity/test_hinge.py")
    )

    def fill(path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert text.count(old) == 1, (path, old)
        path.write_text(text.replace(old, new))

    def session() -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--losses", "hinge"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False).stdout

    fill(reference, 'raise NotImplementedError("hinge has no def', 'return -float(np.sum(mask * logprobs))  # ("')
    fill(reference, 'raise NotImplementedError("hinge has no gra', 'return -2.0 * mask  # ("')
    fill(
        implementation,
        'raise NotImplementedError("',
        'return (logprobs.detach() - 2 * logprobs)[mask == 1].sum()  # ("',
    )
    fill(test, 'raise NotImplementedError("', 'return -sum(x for x, m in zip(logprobs, mask, strict=True) if m)  # ("')
    output = session()
    assert "hinge/oracle (float64, cpu, ordinary, against mpmath) at the gradient" in output, output
    fill(reference, "-2.0", "-1.0")
    fill(implementation, "logprobs.detach() - 2 * logprobs", "-logprobs")
    output = session()
    assert output.partition("parity: NOT green, no receipt: ")[2].splitlines()[:-1] == [
        "the source of hinge in the spec is still a TODO",
        "  the because of the tolerances of hinge/value in the spec is still a TODO",
        "  the because of the tolerances of hinge/gradient in the spec is still a TODO",
        "  the because of the tolerances of hinge/oracle in the spec is still a TODO",
    ], output
