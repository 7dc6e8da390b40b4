"""Mutants that nobody thought of: cosmic-ray's operators on the losses, each held to the tests that reach its line.

`python tests/mutants/sweep.py --module averaging --module checks [--jobs 2] [--json FILE]`. A first pass runs parity,
properties and the kernels' tests once and notes the lines of the losses that each of them runs. Every mutant then has a
forked process of its own, where tests that reach its statement run, until one raises or they have taken their budget:
those that take no time, then one case of each other, then a second one of each, and so on. What outlives them is
printed; design/013 says what such survivors were. Exit code 1 where the losses as they are fail, 0 else: a survivor is
something to read, not an error.
"""

import argparse
import ast
import gc
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import pytest
import transformers  # noqa: F401 - once, before the processes part
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutants.hold import ROOT, cases, hypothesis, ledger, load_losses, parity_modules, paritygate

LOSSES = ROOT / "impl/paritygate/losses"
TESTS = (
    *(
        f"tests.properties.test_{name}"
        for name in ("bad_input", "contract", "numerics", "derivatives", "invariances", "forms")
    ),
    *parity_modules(load_losses(ROOT)),
    *(f"tests.kernels.test_{name}" for name in ("rows", "divergence", "fused", "truncated")),
)
# Bit and integer arithmetic where floats are divided and multiplied: torch refuses them at the first test.
LEFT_OUT = re.compile(r"core/ReplaceBinaryOperator_\w+_(FloorDiv|Mod|Pow|LShift|RShift|BitOr|BitAnd|BitXor)")
MEMORY = 16 << 30  # bytes of address space: a mutant may ask for anything


class Site(NamedTuple):
    """A mutant: the operator's n-th place in a file, where that is, and whether an import runs the statement there."""

    file: str
    operator: str
    occurrence: int
    line: int
    column: int
    lines: tuple[int, int]  # of the statement; of a compound one, of its head
    at_import: bool


class Test(NamedTuple):
    """A test with one choice of its parameters, and the obligations that it may compare for."""

    function: Callable[..., None]
    arguments: dict[str, Any]
    obligations: frozenset[str]


class Fate(NamedTuple):
    """What became of a mutant: killed, survived, or unreached; by which test and with what words; the line's text."""

    site: Site
    end: str
    by: str
    words: str
    was: str
    became: str


def sites(file: str) -> list[Site]:
    """Every mutant of a file of the losses that an operator makes which takes no arguments and is not left out."""
    source = (LOSSES / file).read_text()
    nodes, spans = list(ast_nodes(get_ast(source))), statements(source)
    mutants = []
    for name in sorted(operator_names()):
        if get_operator(name).arguments() or LEFT_OUT.match(name):
            continue
        operator = get_operator(name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, ((line, column), _) in enumerate(places):
            within = [x for x in spans if x[0] <= line <= x[1]]
            first, last, at_import = min(within, key=lambda x: x[1] - x[0])
            mutants.append(Site(file, name, occurrence, line, column, (first, last), at_import))
    return sorted(mutants, key=lambda site: (site.line, site.column, site.operator))


def statements(source: str) -> list[tuple[int, int, bool]]:
    """First and last line of each statement (of a compound one, of its head), and whether an import runs it."""
    spans: list[tuple[int, int, bool]] = []

    def visit(body: list[Any], at_import: bool) -> None:
        for node in body:
            inner = [x for name in ("body", "orelse", "finalbody") for x in getattr(node, name, [])]
            first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
            last = max(node.lineno, node.body[0].lineno - 1) if inner else node.end_lineno
            spans.append((first, last, at_import))
            visit(inner, at_import and not isinstance(node, ast.FunctionDef))

    visit(ast.parse(source).body, True)
    return spans


def reach(site: Site, seen: dict[str, dict[str, set[int]]]) -> set[str]:
    """Names of the tests that run the statement of a mutant; of those that run its file, or none, where imports do."""
    if site.at_import:  # those that run none look at signatures
        return {name for name, files in seen.items() if site.file in files or not files}
    span = range(site.lines[0], site.lines[1] + 1)
    return {name for name, files in seen.items() if not files.get(site.file, set()).isdisjoint(span)}


def chosen(reached: set[str], seconds: dict[str, float], budget: float) -> list[str]:
    """The tests to run, in order, until they have taken `budget`: what takes no time, then case by case of each."""
    order = sorted(reached, key=lambda n: (seconds[n] > 0.05 and 1 + int(n.partition("[")[2][:-1]), seconds[n]))
    spent = itertools.accumulate(seconds[name] for name in order)
    return [name for name, before in zip(order, [0.0, *spent], strict=False) if before < budget]


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Test]]:
    """Import losses from `folder` and the tests on top: what fixtures give, and every test of the CPU by its name."""
    paritygate.__path__.insert(0, str(folder))
    hypothesis.settings.register_profile(
        "sweep",
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("sweep")
    spec = load_losses(ROOT)
    losses = importlib.import_module("paritygate.losses")
    for name in spec["losses"]:
        importlib.import_module(f"paritygate.losses.{name}")
    ledger.LEDGER = ledger.Ledger(spec, "cpu")
    given = {"losses": losses, "device": "cpu", "monkeypatch": pytest.MonkeyPatch()}
    return given, dict(every_test(given.keys()))


def every_test(fixtures: Any) -> Iterator[tuple[str, Test]]:
    """The tests of TESTS that need no other fixture and no GPU."""
    for module in (importlib.import_module(name) for name in TESTS):
        for name, function in vars(module).items():
            marks = getattr(function, "pytestmark", [])
            if not name.startswith("test_") or any(mark.name == "gpu" for mark in marks):
                continue
            obligations = frozenset(x for mark in marks if mark.name == "obligation" for x in mark.args)
            for i, arguments in enumerate(cases(function)):
                if wanted_by(function) <= fixtures | arguments.keys():
                    yield f"{module.__name__}::{name}[{i}]", Test(function, arguments, obligations)


def wanted_by(function: Callable[..., None]) -> set[str]:
    """Names of the arguments that pytest would have to give."""
    if hasattr(function, "hypothesis"):
        return set()
    return set(function.__code__.co_varnames[: function.__code__.co_argcount])


def run_test(test: Test, given: dict[str, Any]) -> None:
    """Run one test; it raises where it fails."""
    assert ledger.LEDGER is not None
    ledger.LEDGER.current = test.obligations
    try:
        test.function(**{name: {**given, **test.arguments}[name] for name in wanted_by(test.function)})
    finally:
        given["monkeypatch"].undo()


def copied(folder: str) -> Path:
    """A folder with a copy of the losses in it."""
    shutil.copytree(LOSSES, Path(folder) / "losses", ignore=shutil.ignore_patterns("__pycache__"))
    return Path(folder)


def measure(answers: Any) -> None:
    """Every test once on the losses as they are: {name: (seconds, {file: lines})}, or words about a failure."""
    with tempfile.TemporaryDirectory() as folder:
        given, tests = load(copied(folder))
        prefix, seen = f"{folder}/losses/", {}
        files: dict[str, set[int]] = {}

        def trace(frame: Any, event: str, _: Any) -> Any:
            if not frame.f_code.co_filename.startswith(prefix):
                return None
            lines = files.setdefault(frame.f_code.co_filename.removeprefix(prefix), set())

            def note(frame: Any, event: str, _: Any) -> Any:
                lines.add(frame.f_lineno)
                return note

            return note(frame, event, None)

        for name, test in tests.items():
            files.clear()
            started = time.monotonic()
            sys.settrace(trace)
            try:
                run_test(test, given)
            except BaseException as error:
                answers.put(f"{name}: {type(error).__name__}: {error}")
                return
            finally:
                sys.settrace(None)
            seen[name] = (time.monotonic() - started, {file: set(lines) for file, lines in files.items()})
        answers.put(seen)


def graft(old: dict[str, Any], new: dict[str, Any], module: str) -> None:
    """Give the functions of a module, and of its classes, the code of their namesakes: who imported them has it too."""
    for name, value in new.items():
        if inspect.isclass(value) and value.__module__ == module and name in old:
            graft(vars(old[name]), vars(value), module)  # pyright: ignore[reportArgumentType]
            continue
        pair = [x.fget if isinstance(x, property) else getattr(x, "__func__", x) for x in (old.get(name), value)]
        mine, theirs = (inspect.unwrap(x) if callable(x) else x for x in pair)
        if inspect.isfunction(theirs) and theirs.__module__ == module:
            mine.__code__ = theirs.__code__


def hold(site: Site, source: str, names: Sequence[str], loaded: Any, answers: Any) -> None:
    """Run the named tests with one mutant until one raises; sends (test, words), or None. Ends with its process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if loaded is None:
                (copied(folder) / "losses" / site.file).write_text(source)
                given, tests = load(Path(folder))
            else:
                given, tests = loaded
                module = sys.modules[f"paritygate.losses.{site.file.removesuffix('.py').replace('/', '.')}"]
                fresh = {"__name__": module.__name__, "__package__": module.__package__, "__file__": module.__file__}
                exec(compile(source, str(module.__file__), "exec"), fresh)
                graft(vars(module), fresh, module.__name__)
        except BaseException as error:
            answers.send(("import", f"{type(error).__name__}: {error}"))
            return
        for name in names:
            try:
                run_test(tests[name], given)
            except BaseException as error:
                answers.send((name, f"{type(error).__name__}: {error}".partition("\n")[0][:300]))
                return
        answers.send(None)


def fate(site: Site, seconds: dict[str, float], names: list[str], loaded: Any) -> Fate:
    """`hold` in a process of its own, ended where it takes ten times as long as the tests do."""
    original = (LOSSES / site.file).read_text()
    source = mutate_code(original, get_operator(site.operator)(), site.occurrence)
    pairs = zip(original.splitlines(), source.splitlines(), strict=False)
    was, became = next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))
    if not names:
        return Fate(site, "unreached", "", "", was, became)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(site, source, names, loaded, theirs))
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(60 + 10 * sum(seconds[name] for name in names)) else ("time", "did not end")
    except EOFError:
        answer = ("process", "ended without a word")
    process.kill()
    process.join()
    end, (by, words) = ("survived", ("", "")) if answer is None else ("killed", answer)
    return Fate(site, end, by, words, was, became)


def worker(mutants: list[tuple[Site, list[str]]], seconds: dict[str, float], fates: Any) -> None:
    """The fates of some mutants: a copy each where an import runs the statement, else grafted onto what is loaded."""
    for site, names in mutants:
        if site.at_import:
            fates.put(fate(site, seconds, names, None))
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(copied(folder))
        gc.collect()
        gc.freeze()
        for site, names in mutants:
            if not site.at_import:
                fates.put(fate(site, seconds, names, loaded))


def first_pass(cache: Path | None) -> dict[str, tuple[float, dict[str, set[int]]]] | str:
    """`measure` in a process of its own; read from `cache` where it is, else written there."""
    if cache and cache.is_file():
        stored = json.loads(cache.read_text())
        return {
            name: (spent, {file: set(rows) for file, rows in files.items()}) for name, (spent, files) in stored.items()
        }
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=measure, args=(answers,))
    process.start()
    seen = answers.get()
    process.join()
    if cache and not isinstance(seen, str):
        cache.write_text(json.dumps(seen, default=sorted))
    return seen


def sweep(
    files: Sequence[str], jobs: int, budget: float, cache: Path | None, part: tuple[int, int]
) -> list[Fate] | str:
    """The fates of every mutant of these files, or what is wrong with the losses as they are."""
    context = multiprocessing.get_context("fork")
    seen = first_pass(cache)
    if isinstance(seen, str):
        return seen
    seconds = {name: spent for name, (spent, _) in seen.items()}
    lines = {name: lines_run for name, (_, lines_run) in seen.items()}
    mutants = [(site, chosen(reach(site, lines), seconds, budget)) for file in files for site in sites(file)]
    mutants = mutants[part[0] - 1 :: part[1]]
    print(f"{len(seen)} tests green, {sum(seconds.values()):.0f} s with traces; {len(mutants)} mutants", flush=True)
    queue = context.SimpleQueue()
    workers = [context.Process(target=worker, args=(mutants[i::jobs], seconds, queue)) for i in range(jobs)]
    for process in workers:
        process.start()
    fates = []
    for _ in mutants:
        fates.append(queue.get())
        if fates[-1].end != "killed":
            print(f"{len(fates)} {sentence(fates[-1])}", flush=True)
    for process in workers:
        process.join()
    return sorted(fates, key=lambda f: (files.index(f.site.file), f.site.line, f.site.column, f.site.operator))


def sentence(fate: Fate) -> str:
    """A survivor in a line."""
    site = fate.site
    place = f"{site.file}:{site.line}:{site.column}"
    return f"{fate.end} {place} {site.operator.removeprefix('core/')}: {fate.was}  ->  {fate.became}"


def main(arguments: argparse.Namespace) -> int:
    """Sweep, print, and write what became of each mutant to --json."""
    modules: list[str] = arguments.module
    part = tuple(int(number) for number in arguments.part.split("/"))
    files = [f"{module}.py" for module in modules]
    fates = sweep(files, arguments.jobs, arguments.budget, arguments.first_pass, part)
    if isinstance(fates, str):
        print(f"no kill would mean anything: {fates}")
        return 1
    by_operator = Counter((f.site.operator.removeprefix("core/"), f.end) for f in fates)
    print(f"\n{'operator':<44} {'killed':>7} {'survived':>9} {'unreached':>10}")
    for operator in sorted({operator for operator, _ in by_operator}):
        counts = [by_operator[operator, end] for end in ("killed", "survived", "unreached")]
        print(f"{operator:<44} {counts[0]:>7} {counts[1]:>9} {counts[2]:>10}")
    print()
    for f in fates:
        if f.end != "killed":
            print(sentence(f))
    for module in modules:
        ends = Counter(f.end for f in fates if f.site.file == f"{module}.py")
        print(f"{module}: {sum(ends.values())} mutants, {dict(ends)}")
    if arguments.json:
        arguments.json.write_text(json.dumps([{**f._asdict(), "site": f.site._asdict()} for f in fates], indent=1))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--module", action="append", required=True, choices=[p.stem for p in LOSSES.glob("*.py")])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, default=12.0, help="seconds of tests a mutant, as the first pass took")
    parser.add_argument("--json", type=Path, help="write every mutant and its end here")
    parser.add_argument("--first-pass", type=Path, metavar="FILE", help="keep what the first pass found, or read it")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th mutant, from the I-th: for N machines")
    sys.exit(main(parser.parse_args()))
