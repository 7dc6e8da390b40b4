"""All mutants: those of every module of this folder, and of those in it, that has MUTANTS or HARMLESS."""

import importlib
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import Mutant


def collected(kind: str) -> Iterator[Mutant]:
    """The mutants in the tuple called `kind` of each module here, the modules by name."""
    here = Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        if f"\n{kind} = (" in path.read_text():
            name = ".".join(path.relative_to(here).with_suffix("").parts)
            yield from getattr(importlib.import_module(f"tests.mutants.{name}"), kind)


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
    "thresholds-dropped",
    "service-gspo-mask-ignored",
    "checkpoints-are-rounded",
)  # killed in `make test`; `make mutants` kills all
