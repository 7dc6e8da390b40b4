"""Show that the proof can fail: every mistake of the catalogue dies by its named obligation, harmless edits survive.

`python tests/mutants/run.py [NAME ...]`. Each mutant is a copy of the losses with one edit, imported in a process of
its own and held to its obligation alone: comparisons for others do not count. A green baseline of all obligations comes
first: a broken one would kill everything. Exit code 1 where anything is not as the catalogue says.
"""

import argparse
import importlib
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "impl"), str(ROOT / "reference"), str(ROOT)]

import hypothesis  # noqa: E402
import torch  # noqa: E402, F401 - once, before the processes part

import paritygate  # noqa: E402
from paritygate.spec.losses import load_losses  # noqa: E402
from tests import ledger  # noqa: E402
from tests.mutants.catalogue import HARMLESS, MUTANTS  # noqa: E402
from tests.mutants.mutant import Mutant  # noqa: E402

TEST_FILES = ("averaging", "grpo", "policy_gradient", "sdpo", "spod")


class Outcome(NamedTuple):
    """How the tests of some obligations ended: green, red, or broken (by anything but a comparison or a refusal)."""

    colour: str
    words: str
    seconds: float


class Attributed(ledger.Ledger):
    """A ledger that counts comparisons for the `wanted` obligations alone."""

    wanted: frozenset[str] = frozenset()

    def compare(self, obligation: str, actual: Any, expected: Any, **about: Any) -> None:
        """As every ledger, for a wanted obligation."""
        if obligation in self.wanted:
            super().compare(obligation, actual, expected, **about)


def mutate(mutant: Mutant, folder: Path) -> None:
    """Write a copy of paritygate/losses with the mutant's edits to `folder`; ValueError: a text is not there once."""
    shutil.copytree(ROOT / "impl/paritygate/losses", folder / "losses", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in mutant.edits:
        path = folder / "losses" / name
        source = path.read_text()
        if source.count(old) != 1:
            raise ValueError(f"{mutant.name}: {name} holds the text to edit {source.count(old)} times: {old!r}")
        path.write_text(source.replace(old, new))


def cases(function: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments that its parametrize marks give a test, float64 first: in it torch computes, and no kernel."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
            axes.append([dict(zip(names, v if len(names) > 1 else [v], strict=True)) for v in mark.args[1]])
    found = [{key: value for part in c for key, value in part.items()} for c in itertools.product(*axes)]
    yield from sorted(found, key=lambda arguments: arguments.get("dtype") != "float64")


def tests_of(obligations: Sequence[str]) -> Iterator[tuple[Callable[..., None], frozenset[str]]]:
    """Parity tests that carry any of the obligations, with all that they carry."""
    for file in TEST_FILES:
        module = importlib.import_module(f"tests.parity.test_{file}")
        for name, function in vars(module).items():
            carried = {x for m in getattr(function, "pytestmark", []) if m.name == "obligation" for x in m.args}
            if name.startswith("test_") and carried & set(obligations):
                yield function, frozenset(carried)


def judge(folder: Path, obligations: Sequence[str]) -> Outcome:
    """Run the tests of `obligations` on the losses in `folder`, in this process, until something goes red."""
    paritygate.__path__.insert(0, str(folder))
    started = time.monotonic()
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=[hypothesis.Phase.generate]
    )
    hypothesis.settings.load_profile("mutants")
    spec = load_losses(ROOT)
    losses = importlib.import_module("paritygate.losses")
    if not str(losses.__file__).startswith(str(folder)):
        raise RuntimeError(f"the losses under test come from {losses.__file__}")
    for name in spec["losses"]:
        importlib.import_module(f"paritygate.losses.{name}")
    ledger.LEDGER = book = Attributed(spec, "cpu")
    book.wanted = frozenset(obligations)
    given = {"losses": losses, "device": "cpu"}
    for function, carried in tests_of(obligations):
        wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
        for arguments in cases(function):
            book.current = carried
            try:
                function(**{name: {**given, **arguments}[name] for name in wanted})
            except Exception as error:
                # A comparison that fails, or a loss that refuses what the reference takes.
                colour = "red" if book.failures or isinstance(error, ValueError) else "broken"
                words = book.failures[0] if book.failures else traceback.format_exception_only(error)[0].strip()
                return Outcome(colour, f"{function.__name__}: {words}", time.monotonic() - started)
    compared = {name for name, *_ in book.cells}
    if missing := set(obligations) - compared:
        return Outcome("broken", f"nothing was compared for {min(missing)}", time.monotonic() - started)
    return Outcome("green", "", time.monotonic() - started)


def _process(mutant: Mutant, obligations: Sequence[str], answers: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            mutate(mutant, Path(folder))
            answers.put(judge(Path(folder), obligations))
        except BaseException as error:
            answers.put(Outcome("broken", f"{type(error).__name__}: {error}", 0.0))


def outcome_of(mutant: Mutant, obligations: Sequence[str]) -> Outcome:
    """`judge` the mutant in a process of its own."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_process, args=(mutant, obligations, answers))
    process.start()
    outcome = answers.get()
    process.join()
    return outcome


def baseline(names: Sequence[str]) -> list[list[str]]:
    """The obligations of the named mutants, or all, loss by loss: the losses as they are have to meet them first."""
    groups = [list(entry["obligations"]) for entry in load_losses(ROOT)["losses"].values()]
    chosen = {m.obligation for m in (*MUTANTS, *HARMLESS) if m.name in names}
    if names:
        groups = [[o for o in group if {o, o.partition("/")[0]} & chosen] for group in groups]
    return [group for group in groups if group]


def plain(obligations: list[str]) -> tuple[Outcome, str | None]:
    """Hold the losses as they are to some obligations."""
    outcome = outcome_of(Mutant("baseline", "", "", ()), obligations)
    return outcome, None if outcome.colour == "green" else outcome.words


def kill(mutant: Mutant) -> tuple[Outcome, str | None]:
    """Hold a mutant to its obligation; the second is what is not as the catalogue says."""
    outcome = outcome_of(mutant, [mutant.obligation])
    if outcome.colour == "broken":
        return outcome, f"{mutant.name} shows nothing: {outcome.words}"
    if outcome.colour == "green":
        return outcome, f"{mutant.name} survived {mutant.obligation}: {mutant.mistake}"
    return outcome, None


def spare(mutant: Mutant) -> tuple[Outcome, str | None]:
    """Hold a harmless edit to all obligations of its loss."""
    outcome = outcome_of(mutant, list(load_losses(ROOT)["losses"][mutant.obligation]["obligations"]))
    alive = outcome.colour == "green"
    return outcome, None if alive else f"{mutant.name} changes nothing and died: {outcome.words}"


def side_by_side(jobs: Sequence[tuple[Callable[[Any], Any], Any]]) -> Iterator[tuple[int, tuple[Outcome, str | None]]]:
    """(number, what the function makes of its argument) of each job, as they end; a process for each processor."""
    context = multiprocessing.get_context("fork")
    answers, count = context.SimpleQueue(), max(1, min(len(jobs), os.cpu_count() or 1))

    def work(first: int) -> None:
        for number in range(first, len(jobs), count):
            function, argument = jobs[number]
            answers.put((number, function(argument)))

    workers = [context.Process(target=work, args=(first,)) for first in range(count)]
    for worker in workers:
        worker.start()
    for _ in jobs:
        yield answers.get()
    for worker in workers:
        worker.join()


def main(names: Sequence[str]) -> int:
    """Baseline, mutants, harmless edits; 1 where anything is not as the catalogue says, 2 for an unknown name."""
    if unknown := set(names) - {m.name for m in (*MUTANTS, *HARMLESS)}:
        print(f"the catalogue has no {', '.join(sorted(unknown))}")
        return 2
    started = time.monotonic()
    wrong = [words for _, (_, words) in side_by_side([(plain, group) for group in baseline(names)]) if words]
    print(f"baseline: {'red' if wrong else 'green'} ({time.monotonic() - started:.0f} s)", flush=True)
    if wrong:
        print(f"no kill would mean anything: {wrong[0]}")
        return 1
    checks = [("killed", kill, m) for m in MUTANTS] + [("spared", spare, m) for m in HARMLESS]
    checks = [check for check in checks if not names or check[2].name in names]
    complaints: list[str] = []
    for number, (outcome, complaint) in side_by_side([check[1:] for check in checks]):
        word, _, mutant = checks[number]
        complaints += [complaint] if complaint else []
        word = "WRONG" if complaint else word
        print(f"{word:<7} {mutant.name:<34} {mutant.obligation:<26} {outcome.seconds:.1f} s", flush=True)
    for line in complaints:
        print(line)
    print(f"{len(complaints)} of {len(checks)} are not as the catalogue says")
    return 1 if complaints else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants of the catalogue; all by default")
    sys.exit(main(parser.parse_args().names))
