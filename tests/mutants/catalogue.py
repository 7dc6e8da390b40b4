"""All mutants: those of every module of this folder that has MUTANTS or HARMLESS."""

import importlib
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import Mutant


def collected(kind: str) -> Iterator[Mutant]:
    """The mutants in the tuple called `kind` of each module here, the modules by name."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if f"\n{kind} = (" in path.read_text():
            yield from getattr(importlib.import_module(f"tests.mutants.{path.stem}"), kind)


MUTANTS = tuple(collected("MUTANTS"))
HARMLESS = tuple(collected("HARMLESS"))
"""Edits that change nothing and have to live."""

QUICK = (
    "flat-mean",
    "std-left-in",
    "divided-by-positions",
    "clip-after-mask",
    "masked-nan-leaks",
    "gate-at-a-tie",
)  # killed in `make test`; `make mutants` kills all
