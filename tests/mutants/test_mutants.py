"""A few of the catalogue's mistakes die in every test run, and its edits fit the code; `make mutants` kills all."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.catalogue import HARMLESS, MUTANTS, QUICK
from tests.mutants.elsewhere import MISTAKES

HERE = Path(__file__).parent
LOSSES = HERE.parents[1] / "impl/paritygate/losses"


def test_some_die_by_name_and_one_harmless_edit_lives() -> None:
    """In a process of its own, because the losses are imported there in many versions."""
    names = (*QUICK, HARMLESS[0].name)
    run = subprocess.run(
        [sys.executable, str(HERE / "run.py"), *names], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "baseline: green" in run.stdout
    assert run.stdout.count("\nkilled ") == len(QUICK)
    assert run.stdout.count("\nspared ") == 1


@pytest.mark.parametrize("mutant", [*MUTANTS, *HARMLESS], ids=lambda mutant: mutant.name)
def test_the_text_of_each_edit_stands_in_the_code_once(mutant: object) -> None:
    for file, old, new in mutant.edits:  # type: ignore[attr-defined]
        assert (LOSSES / file).read_text().count(old) == 1, f"{file}: {old!r}"
        assert old != new


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistakes_elsewhere_stand_in_the_code_once_too_and_so_does_their_test(mistake: object) -> None:
    root = HERE.parents[1]
    assert (root / "impl/paritygate" / mistake.file).read_text().count(mistake.old) == 1  # type: ignore[attr-defined]
    file, _, name = mistake.test.partition("::")  # type: ignore[attr-defined]
    assert f"def {name}(" in (root / file).read_text()


def test_names_are_unique() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    counts = Counter(mutant.name for mutant in (*MUTANTS, *HARMLESS))
    assert max(counts.values()) == 1
    assert set(QUICK) <= counts.keys()
