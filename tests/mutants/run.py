"""Show that the proof can fail: every mutant dies by what it names, harmless edits survive.

`python tests/mutants/run.py [NAME | OBLIGATION | LOSS | service ...]`: a loss stands for all that die by its
obligations, `service` for the harmless servers. A green baseline of what the mutants die by comes
first: a broken one would kill everything. A mutant of the losses is a copy with its edits, imported in a process of its
own and held to its obligation alone; the compiled kernels' are expressions of one library of which a number chooses
one; an embedded server with a mistake is proved as a service; every other is made in a copy of the tree, where its test
runs in a pytest of its own. Exit code 1 where anything is not as the catalogue says, 2 for an unknown name.
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "impl"), str(ROOT / "reference"), str(ROOT)]

import torch  # noqa: E402, F401 - once, before the processes part

from paritygate.spec.losses import load_losses  # noqa: E402
from tests.mutants import hold_service, kernels  # noqa: E402
from tests.mutants.catalogue import HARMLESS, MUTANTS, with_obligations  # noqa: E402
from tests.mutants.hold import Outcome, forked, of_kernels, of_losses  # noqa: E402
from tests.mutants.mutant import Mutant  # noqa: E402

Checked = tuple[Outcome, str | None]  # the second is what is not as the catalogue says


def is_test(mutant: Mutant) -> bool:
    """Whether a test has to notice it, not an obligation."""
    return "::" in mutant.dies_by


def is_service(mutant: Mutant) -> bool:
    """Whether it is a service with a mistake, or a harmless one."""
    return not is_test(mutant) and mutant.file.startswith("server/")


@cache
def library() -> bytes:
    """The compiled kernels with every mistake, made in another process: this one never imports the losses."""
    made = forked(lambda: kernels.switched_library(halves=True))
    if isinstance(made, Outcome):
        raise RuntimeError(made.words)
    return made


def hold(mutant: Mutant, obligations: Sequence[str]) -> Outcome:
    """What becomes of a mutant of the losses."""
    if mutant in kernels.MUTANTS:
        return of_kernels(library(), kernels.MUTANTS.index(mutant) + 1, obligations)
    return of_losses(mutant, obligations)


def baseline(obligations: list[str]) -> Checked:
    """The losses as they are have to meet the obligations."""
    outcome = of_losses(None, obligations)
    return outcome, None if outcome.colour == "green" else outcome.words


def kernels_baseline(obligations: list[str]) -> Checked:
    """The compiled kernels with no mistake switched on, too."""
    outcome = of_kernels(library(), 0, obligations)
    return outcome, None if outcome.colour == "green" else outcome.words


def kill(mutant: Mutant) -> Checked:
    """Hold a mutant to its obligation."""
    outcome = hold(mutant, [mutant.dies_by])
    if outcome.colour == "broken":
        return outcome, f"{mutant.name} shows nothing: {outcome.words}"
    if outcome.colour == "green":
        return outcome, f"{mutant.name} survived {mutant.dies_by}: {mutant.why}"
    return outcome, None


def spare(mutant: Mutant) -> Checked:
    """Hold a harmless edit to all obligations of its loss."""
    outcome = of_losses(mutant, list(load_losses(ROOT)["losses"][mutant.dies_by]["obligations"]))
    alive = outcome.colour == "green"
    return outcome, None if alive else f"{mutant.name} changes nothing and died: {outcome.words}"


def groups(names: Collection[str]) -> list[list[str]]:
    """The obligations of the chosen mutants, or all, loss by loss."""
    declared = [list(entry["obligations"]) for entry in load_losses(ROOT)["losses"].values()]
    wanted = {m.dies_by for m in (*MUTANTS, *HARMLESS) if m.name in names or m.dies_by in names}
    if names:
        declared = [[o for o in group if {o, o.partition("/")[0]} & wanted] for group in declared]
    return [group for group in declared if group]


def side_by_side(jobs: Sequence[tuple[Callable[[Any], Checked], Any]]) -> Iterator[tuple[int, Checked]]:
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


def held(
    kills: tuple[Callable[[Mutant], Checked], Sequence[Mutant]],
    spares: tuple[Callable[[Mutant], Checked], Sequence[Mutant]],
) -> list[str]:
    """Each mutant killed and each harmless one spared, by the function beside it; what is not as the catalogue says."""
    checks = [(word, check, m) for word, (check, some) in (("killed", kills), ("spared", spares)) for m in some]
    complaints: list[str] = []
    for number, (outcome, complaint) in side_by_side([check[1:] for check in checks]):
        word, _, mutant = checks[number]
        complaints += [complaint] if complaint else []
        say("WRONG" if complaint else word, mutant, outcome.seconds)
    return complaints


def passes(tree: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests pass in `tree`, and pytest's last lines; RuntimeError where pytest ran none of them.

    A process that a signal ends (a kernel that reads what is not there) has not passed.
    """
    data = os.environ.get("PARITYGATE_TAU_BENCH") or str(ROOT.parent / "shared" / "tau_bench_retail")
    environment = os.environ | {"PARITYGATE_TAU_BENCH": data, "CI": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if run.returncode < 0:
        return False, f"ended by signal {-run.returncode}"
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {run.returncode}: {run.stdout[-800:]}{run.stderr[-800:]}")
    error = [line for line in run.stdout.splitlines() if line.startswith("E ")]
    return run.returncode == 0, (error or [""])[0][1:].strip()[:160]


def by_tests(mutants: Sequence[Mutant]) -> list[str]:
    """Make each mutant in a copy of the tree and run its test there; what is not as the catalogue says."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("impl", "reference", "tests", "spec", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, tree)
        green, words = passes(tree, sorted({mutant.dies_by for mutant in mutants}))
        print(f"baseline of the tests: {'green' if green else 'red'}", flush=True)
        if not green:
            return [f"no kill by a test would mean anything: {words}"]
        complaints = []
        for mutant in mutants:
            started = time.monotonic()
            originals = {file: (tree / "impl/paritygate" / file).read_text() for file, _, _ in mutant.edits}
            for file, old, new in mutant.edits:
                path = tree / "impl/paritygate" / file
                path.write_text(path.read_text().replace(old, new))
            green, _ = passes(tree, [mutant.dies_by])
            for file, text in originals.items():
                (tree / "impl/paritygate" / file).write_text(text)
            complaint = f"{mutant.name} survived {mutant.dies_by}: {mutant.why}" if green else None
            complaints += [complaint] if complaint else []
            say("WRONG" if complaint else "killed", mutant, time.monotonic() - started)
        return complaints


def by_obligations(mutants: Sequence[Mutant], harmless: Sequence[Mutant], names: Collection[str]) -> list[str]:
    """Baseline, kills and survivals of the mutants of the losses; what is not as the catalogue says."""
    started = time.monotonic()
    plain: list[tuple[Callable[[Any], Checked], Any]] = [(baseline, group) for group in groups(names)]
    if compiled := sorted({m.dies_by for m in mutants if m in kernels.MUTANTS}):
        library()  # before the processes part
        plain.append((kernels_baseline, compiled))
    wrong = [words for _, (_, words) in side_by_side(plain) if words]
    print(f"baseline: {'red' if wrong else 'green'} ({time.monotonic() - started:.0f} s)", flush=True)
    if wrong:
        return [f"no kill would mean anything: {wrong[0]}"]
    return held((kill, mutants), (spare, harmless))


def depart(mutant: Mutant) -> Checked:
    """A service with a mistake departs from its obligation."""
    started = time.monotonic()
    results = hold_service.proved(mutant, [mutant.dies_by])
    seconds = time.monotonic() - started
    if isinstance(results, str):
        return Outcome("broken", results, seconds), f"{mutant.name} shows nothing: {results}"
    result = results[mutant.dies_by]
    if result.outcome != "departs":
        words = f"{mutant.name} is {result.outcome} at {mutant.dies_by}: {mutant.why} ({result.because})"
        return Outcome("green", result.because, seconds), words
    return Outcome("red", result.because, seconds), None


def stay(mutant: Mutant) -> Checked:
    """A harmless service departs from nothing."""
    started = time.monotonic()
    results = hold_service.proved(mutant, [])
    seconds = time.monotonic() - started
    if isinstance(results, str):
        return Outcome("broken", results, seconds), f"{mutant.name} shows nothing: {results}"
    wrong = [f"{r.name} ({r.because})" for r in results.values() if r.outcome == "departs"]
    complaint = f"{mutant.name} is right, and is said to depart from {'; '.join(wrong)}" if wrong else None
    return Outcome("red" if wrong else "green", "; ".join(wrong), seconds), complaint


def by_service(mutants: Sequence[Mutant], harmless: Sequence[Mutant]) -> list[str]:
    """Baseline, departures and harmless variants of the embedded server; what is not as the catalogue says."""
    started = time.monotonic()
    hold_service.preload()
    names = sorted({mutant.dies_by for mutant in mutants})
    plain = hold_service.proved(None, names)
    red = (
        plain if isinstance(plain, str) else [f"{r.name}: {r.because}" for r in plain.values() if r.outcome != "holds"]
    )
    print(f"baseline of the service: {'red' if red else 'green'} ({time.monotonic() - started:.0f} s)", flush=True)
    if red:
        return [f"no departure would mean anything: {red}"]
    return held((depart, mutants), (stay, harmless))


def say(word: str, mutant: Mutant, seconds: float) -> None:
    """One line about a mutant."""
    print(f"{word:<7} {mutant.name:<34} {mutant.dies_by.rpartition('::')[2]:<26} {seconds:.1f} s", flush=True)


def main(words: Sequence[str]) -> int:
    """The chosen mutants, or all; 1 where anything is not as the catalogue says, 2 for an unknown name."""
    names = with_obligations(words)
    if unknown := set(names) - {x for m in (*MUTANTS, *HARMLESS) for x in (m.name, m.dies_by)}:
        print(f"no mutant is called, nor dies by, {', '.join(sorted(unknown))}")
        losses = {name.partition("/")[0] for name in unknown}
        if near := sorted({m.dies_by for m in MUTANTS if m.dies_by.partition("/")[0] in losses}):
            print(f"there mutants die by {', '.join(near)}")
        return 2
    mutants, harmless = (
        [m for m in catalogue if not names or m.name in names or m.dies_by in names]
        for catalogue in (MUTANTS, HARMLESS)
    )
    complaints: list[str] = []
    served, spared = ([m for m in some if is_service(m)] for some in (mutants, harmless))
    losses = [m for m in mutants if not is_test(m) and not is_service(m)]
    others, harmless = [m for m in mutants if is_test(m)], [m for m in harmless if not is_service(m)]
    count = len(mutants) + len(harmless) + len(spared)
    if losses or harmless:
        complaints += by_obligations(losses, harmless, names)
    if served or spared:
        complaints += by_service(served, spared)
    if others:
        complaints += by_tests(others)
    for line in complaints:
        print(line)
    print(f"{len(complaints)} of {count} are not as the catalogue says")
    return 1 if complaints else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants, what they die by, or losses; all by default")
    sys.exit(main(parser.parse_args().names))
