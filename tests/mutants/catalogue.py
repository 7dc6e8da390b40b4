"""All mutants: those of every module of this folder, and of those in it, that has MUTANTS or HARMLESS."""

import importlib
from collections.abc import Collection, Iterator
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


def with_obligations(names: Collection[str]) -> set[str]:
    """The names, and for a loss among them what its mutants die by, and itself where it has harmless edits."""
    of_losses = {m.dies_by: m.dies_by.partition("/")[0] for m in MUTANTS if "::" not in m.dies_by}
    left = {*of_losses.values()} - {m.dies_by for m in HARMLESS}
    return {*names} - left | {obligation for obligation, loss in of_losses.items() if loss in names}


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
