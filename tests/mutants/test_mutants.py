"""A few mutants die in every test run, and every edit fits the code; `make mutants` kills all."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from paritygate.spec.losses import load_losses
from tests.mutants import catalogue, hold_service
from tests.mutants.catalogue import HARMLESS, MUTANTS, QUICK, with_obligations
from tests.mutants.mutant import Mutant

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_some_die_by_name_and_one_harmless_edit_lives() -> None:
    """In a process of its own, because the losses are imported there in many versions."""
    names = (*QUICK, next(mutant.name for mutant in HARMLESS if mutant.dies_by != "service"))
    run = subprocess.run(
        [sys.executable, str(HERE / "run.py"), *names], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "baseline: green" in run.stdout
    assert "baseline of the service: green" in run.stdout
    assert run.stdout.count("\nkilled ") == len(QUICK)
    assert run.stdout.count("\nspared ") == 1


@pytest.mark.parametrize("mutant", [*MUTANTS, *HARMLESS], ids=lambda mutant: mutant.name)
def test_the_text_of_each_edit_stands_in_the_code_once(mutant: Mutant) -> None:
    for file, old, new in mutant.edits:
        assert (ROOT / "impl/paritygate" / file).read_text().count(old) == 1, f"{file}: {old!r}"
        assert old != new


def test_what_a_mutant_dies_by_exists() -> None:
    losses = load_losses(ROOT)["losses"]
    obligations = {name for loss in losses.values() for name in loss["obligations"]} | set(hold_service.names())
    for mutant in MUTANTS:
        file, _, test = mutant.dies_by.partition("::")
        assert file in obligations or f"def {test}(" in (ROOT / file).read_text(), mutant.name
    assert {mutant.dies_by for mutant in HARMLESS} <= {*losses, "service"}


def test_every_file_here_with_mutants_is_in_the_catalogue() -> None:
    """The catalogue looks for the text, so that importing it does not import the runner."""
    written = [path.read_text() for path in HERE.rglob("*.py")]
    counted = sum(text.count("\n    Mutant(\n") + text.count("\n    noise(") for text in written)
    assert counted == len(MUTANTS) + len(HARMLESS)
    assert min(Counter(mutant.file.partition("/")[0] for mutant in MUTANTS).values()) > 0


def test_names_are_unique() -> None:
    counts = Counter(mutant.name for mutant in (*MUTANTS, *HARMLESS))
    assert max(counts.values()) == 1
    assert set(QUICK) <= counts.keys()


def test_the_name_of_a_loss_stands_for_what_its_mutants_die_by(monkeypatch: pytest.MonkeyPatch) -> None:
    died = {"grpo/value", "grpo/equal_rewards", "grpo/constant"}
    assert with_obligations(["flat-mean"]) == {"flat-mean"}
    assert with_obligations(["grpo"]) == {"grpo", *died}
    monkeypatch.setattr(catalogue, "HARMLESS", ())
    assert with_obligations(["grpo"]) == died  # all that the catalogue knows of
