"""Hold losses with a mistake in them to an obligation, in a process of its own; comparisons for others do not count."""

import importlib
import itertools
import multiprocessing
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis

import paritygate
from paritygate.harness import ledger
from paritygate.spec.losses import load_losses
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_CACHES = shutil.ignore_patterns("__pycache__")


class Outcome(NamedTuple):
    """How the tests of some obligations ended: green, red, or broken (by anything but a comparison or a refusal)."""

    colour: str
    words: str
    seconds: float


def copy_losses(folder: Path, mutant: Mutant | None) -> None:
    """Write a copy of paritygate/losses, and of any other package that the mutant edits, with its edits to `folder`.

    ValueError: a text is not there once.
    """
    edits = mutant.edits if mutant else ()
    for package in {"losses", *(name.partition("/")[0] for name, _, _ in edits)}:
        shutil.copytree(ROOT / "impl/paritygate" / package, folder / package, ignore=WITHOUT_CACHES)
    for name, old, new in edits:
        path = folder / name
        source = path.read_text()
        if source.count(old) != 1:
            raise ValueError(f"{mutant}: {name} holds the text to edit {source.count(old)} times: {old!r}")
        path.write_text(source.replace(old, new))


def cases(function: Callable[..., None], first: str = "float64") -> Iterator[dict[str, Any]]:
    """The arguments that its parametrize marks give a test, one dtype first: in float64 torch computes, no kernel."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
            axes.append([dict(zip(names, v if len(names) > 1 else [v], strict=True)) for v in mark.args[1]])
    product = [{key: value for part in c for key, value in part.items()} for c in itertools.product(*axes)]
    yield from sorted(product, key=lambda arguments: arguments.get("dtype") != first)


def parity_modules(spec: dict[str, Any]) -> list[str]:
    """The modules of parity tests, loss by loss; test_sdpo_logits is one of sdpo's, too."""
    paths = [path for loss in spec["losses"] for path in sorted((ROOT / "tests/parity").glob(f"test_{loss}*.py"))]
    return list(dict.fromkeys(f"tests.parity.{path.stem}" for path in paths))


def tests_of(spec: dict[str, Any], obligations: Sequence[str]) -> Iterator[tuple[Callable[..., None], frozenset[str]]]:
    """Parity tests that carry any of the obligations, with all that they carry."""
    for module in map(importlib.import_module, parity_modules(spec)):
        for name, function in vars(module).items():
            carried = {x for m in getattr(function, "pytestmark", []) if m.name == "obligation" for x in m.args}
            if name.startswith("test_") and carried & set(obligations):
                yield function, frozenset(carried)


def judge(folder: Path | None, obligations: Sequence[str], first: str = "float64") -> Outcome:
    """Run the tests of `obligations` on the losses in `folder`, in this process, until something goes red.

    None takes the losses as they are; cases of the dtype `first` come first.
    """
    started = time.monotonic()
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=[hypothesis.Phase.generate]
    )
    hypothesis.settings.load_profile("mutants")
    if folder:
        paritygate.__path__.insert(0, str(folder))
    spec = load_losses(ROOT)
    losses = importlib.import_module("paritygate.losses")
    for package in folder.iterdir() if folder else ():
        source = str(importlib.import_module(f"paritygate.{package.name}").__file__)
        if not source.startswith(str(folder)):
            raise RuntimeError(f"the {package.name} under test come from {source}")
    for name in spec["losses"]:
        importlib.import_module(f"paritygate.losses.{name}")
    ledger.LEDGER = book = ledger.Ledger(spec, "cpu", wanted=frozenset(obligations))
    fixtures = {"losses": losses, "device": "cpu"}
    for function, carried in tests_of(spec, obligations):
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        for arguments in cases(function, first):
            book.current = carried
            try:
                function(**{name: {**fixtures, **arguments}[name] for name in parameters})
            except Exception as error:
                # A comparison that fails, or a loss that refuses what the reference takes.
                colour = "red" if book.failures or isinstance(error, ValueError) else "broken"
                words = book.failures[0] if book.failures else traceback.format_exception_only(error)[0].strip()
                return Outcome(colour, f"{function.__name__}: {words}", time.monotonic() - started)
    compared = {name for name, *_ in book.cells}
    if missing := set(obligations) - compared:
        return Outcome("broken", f"nothing was compared for {min(missing)}", time.monotonic() - started)
    return Outcome("green", "", time.monotonic() - started)


def forked(work: Callable[[], Any]) -> Any:
    """What `work` comes to in its own process, whose imports nobody else sees; a broken Outcome where it fails."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def target() -> None:
        try:
            answers.put(work())
        except BaseException as error:
            answers.put(Outcome("broken", f"{type(error).__name__}: {error}", 0.0))

    process = context.Process(target=target)
    process.start()
    outcome = answers.get()
    process.join()
    return outcome


def of_losses(mutant: Mutant | None, obligations: Sequence[str]) -> Outcome:
    """Hold a copy of the Python losses with the mutant's edits, or as they are, to `obligations`."""

    def work() -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            copy_losses(Path(folder), mutant)
            return judge(Path(folder), obligations)

    return forked(work)


def of_kernels(library: bytes, number: int, obligations: Sequence[str]) -> Outcome:
    """Hold the losses over the compiled kernels with mistake `number` (0: none) to `obligations`, float32 first."""

    def work() -> Outcome:
        from tests.mutants import kernels

        kernels.use(library, number)
        return judge(None, obligations, first="float32")

    return forked(work)
