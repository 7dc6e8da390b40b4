"""Sessions: devices, the implementation under test, and the hooks that decide green and write the parity receipt.

A session that collects a test marked `obligation` is a parity session. It is green, and writes a receipt, when every
obligation that spec/losses.json declares for the device was met, every test in the session passed, no obligation test
was left out, and the subjects have the same bytes before and after. No flag is looked for: what was not compared is
missing. `--implementation MODULE` holds another implementation to the same obligations: a table, and no receipt.
"""

import importlib
import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).resolve().parents[1]
# No test, and no process that one starts, inherits what points elsewhere: in a hook or `git rebase --exec` GIT_DIR is
# the caller's repository, TINKER_* name a service that costs money, PYTEST_ADDOPTS steers sessions inside sessions.
ELSEWHERE = ("GIT_", "TINKER_", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
for elsewhere in [name for name in os.environ if name.startswith(ELSEWHERE)]:
    del os.environ[elsewhere]
os.environ["TINKER_TELEMETRY"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: two threads that wait for each other are slower than one
PREFIX, sys.pycache_prefix = sys.pycache_prefix, os.devnull  # no cached bytecode of what is imported next can exist
from paritygate import bootstrap  # noqa: E402

bootstrap.read_sources_only(ROOT / "impl", ROOT / "reference", ROOT / "tests")
CACHE_DIR = rewrite.get_cache_dir
# ... nor of our test files, which pytest rewrites and caches by itself.
rewrite.get_cache_dir = lambda path: Path(os.devnull) if path.is_relative_to(ROOT / "tests") else CACHE_DIR(path)
from paritygate.errors import Refused  # noqa: E402
from paritygate.receipts import parity  # noqa: E402
from paritygate.receipts.subjects import difference, subjects  # noqa: E402
from paritygate.spec.losses import device_class, load_losses, required, shortfalls  # noqa: E402
from tests import ledger  # noqa: E402

sys.pycache_prefix = PREFIX


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption("--device", default="cpu", metavar="D", help="torch device of the obligations: cpu, cuda, cuda:1")
    group.addoption(
        "--implementation",
        metavar="MODULE",
        help="hold MODULE (submodules and names of paritygate.losses) to the obligations: a table, no receipt",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "obligation(*names): this test shows these obligations of spec/losses.json")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; with --device cuda every obligation test has it too")
    config.addinivalue_line("markers", "upstream: compares with another project, where that is installed")
    device = config.getoption("--device")
    if device_class(device) not in ("cpu", "cuda"):
        raise pytest.UsageError(f"--device {device}: parity is shown on cpu or cuda.")
    if device_class(device) == "cuda":
        require_cuda(device)
    elif config.getoption("markexpr").strip() == "gpu":
        raise pytest.UsageError("-m gpu runs on a CUDA device: add --device cuda.")
    seed = hypothesis_profile(config)
    try:
        spec = load_losses(ROOT)
    except Refused as refusal:
        raise pytest.UsageError(str(refusal)) from refusal
    ledger.LEDGER = ledger.Ledger(spec, device)
    config.pluginmanager.register(Session(config, ledger.LEDGER, seed), "parity-session")


def require_cuda(device: str) -> None:
    """Stop at once, with one sentence, where torch cannot use `device`."""
    import torch

    index = int(device.partition(":")[2] or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise pytest.UsageError(
            f"--device {device}: torch {torch.__version__} finds {found} CUDA devices here; leave it out for the cpu."
        )


def hypothesis_profile(config: pytest.Config) -> str | None:
    """Load the profile of every session, derandomised unless --hypothesis-seed is given, and return that seed."""
    import hypothesis

    seed = config.getoption("--hypothesis-seed", default=None)
    hypothesis.configuration.set_hypothesis_home_dir(ROOT / ".hypothesis")
    hypothesis.settings.register_profile(
        "parity",
        derandomize=seed is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a busy machine is no finding
    )
    hypothesis.settings.load_profile("parity")
    return None if seed is None else str(seed)


class Session:
    """One pytest session as a parity session: what was collected, run, left out, and what it comes to."""

    def __init__(self, config: pytest.Config, book: ledger.Ledger, seed: str | None) -> None:
        self.config, self.book, self.seed = config, book, seed
        self.module = config.getoption("--implementation")
        self.before: dict[str, str] = {}
        self.parity = False
        self.seen: set[str] = set()
        self.collected: set[str] = set()
        self.failed: set[str] = set()  # obligations whose test failed otherwise than by a comparison
        self.runs: Counter[str] = Counter()
        self.troubles: list[str] = []
        self.lines: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        try:
            self.before = subjects(ROOT)
        except Refused as refusal:
            self.troubles.append(str(refusal))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cuda = device_class(self.book.device) == "cuda"
        for item in items:
            names = obligations_of(item)
            if unknown := names - self.book.obligations.keys():
                raise pytest.UsageError(f"{item.nodeid}: spec/losses.json declares no obligation {min(unknown)!r}.")
            self.seen |= names
            if names and cuda:
                item.add_marker("gpu")
        if not cuda:
            gone = [item for item in items if item.get_closest_marker("gpu")]
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]
            if gone:
                self.lines.append(f"{len(gone)} tests need a GPU and were left out: pytest -m gpu --device cuda")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.troubles.extend(f"{item.nodeid} was deselected" for item in items if obligations_of(item))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.collected |= obligations_of(item)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.book.current, before = obligations_of(item), len(self.book.failures)
        failures = item.session.testsfailed
        try:
            return (yield)
        finally:
            if item.session.testsfailed > failures and len(self.book.failures) == before:
                self.failed |= self.book.current
            self.book.current = frozenset()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        self.runs[item.nodeid] += 1
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        if obligations_of(item):
            if hasattr(report, "wasxfail"):
                self.troubles.append(f"{item.nodeid} is marked xfail")
            elif report.outcome != "passed":
                self.troubles.append(f"{item.nodeid} {report.outcome}")
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.parity |= "obligation" in report.keywords

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not (self.parity or self.seen) or self.config.getoption("collectonly"):
            return
        if self.module:
            self.lines.extend(self.table())
            return
        wanted = required(self.book.spec, self.book.device)
        troubles = self.reasons(exitstatus, wanted)
        if not troubles:
            try:
                path = parity.write_parity_receipt(ROOT, self.statement())
                self.lines.append(f"parity: green, {len(wanted)} obligations; receipts/{path.name}")
                return
            except Refused as refusal:
                troubles = [str(refusal)]
        self.lines.append(f"parity: NOT green, no receipt: {troubles[0]}")
        self.lines.extend(f"  {trouble}" for trouble in troubles[1:])
        if exitstatus == pytest.ExitCode.OK and self.collected >= wanted.keys():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def reasons(self, exitstatus: int, wanted: dict[str, Any]) -> list[str]:
        """Everything that keeps this session from being green."""
        found = list(dict.fromkeys(self.troubles))
        if hasattr(self.config, "workerinput") or self.config.getoption("dist", default="no") != "no":
            found.append("it was spread over workers, whose comparisons are not merged: run it without -n")
        if repeated := [node for node, count in self.runs.items() if count > 1]:
            found.append(
                f"{repeated[0]} was run {self.runs[repeated[0]]} times: a rerun is no proof; run without reruns"
            )
        if self.config.getoption("reruns", default=None) or self.config.getoption("force_flaky", default=False):
            found.append("failing tests would have been run again: run without reruns")
        if sys.flags.optimize:
            found.append("python -O removes the assertions: run without -O")
        if self.before:
            found.extend(self.changes())
        found.extend(self.book.failures)
        found.extend(shortfalls(wanted, self.book.results()))
        if exitstatus != pytest.ExitCode.OK and not found:
            found.append(f"pytest ended with exit code {int(exitstatus)}")
        return found

    def changes(self) -> list[str]:
        """What shows that the code that ran is not the code of the subjects."""
        try:
            bootstrap.refuse_foreign(ROOT)
            if change := difference(self.before, subjects(ROOT)):
                return [f"{change} during the session"]
        except Refused as refusal:
            return [str(refusal)]
        loaded = {os.path.relpath(path, ROOT): value for path, value in bootstrap.LOADED.items()}
        return [
            f"{name} ran with other bytes than it has: it was edited during the session"
            for name, value in sorted(loaded.items())
            if self.before.get(name) != value and not name.startswith("..")
        ]

    def statement(self) -> dict[str, Any]:
        import hypothesis

        results = self.book.results()
        return parity.statement_of(
            ROOT,
            device=self.book.device,
            files=self.before,
            results=results,
            hypothesis={"derandomized": self.seed is None, "seed": self.seed, "version": hypothesis.__version__},
            session={
                "arguments": [str(argument) for argument in self.config.invocation_params.args],
                "tests": len(self.runs),
                "dtypes": sorted({cell["dtype"] for result in results.values() for cell in result["cells"]}),
            },
        )

    def table(self) -> list[str]:
        """One line for each obligation: how far the implementation under test departs from the definition."""
        results, width = self.book.results(), max(map(len, self.seen))
        lines = [
            f"{self.module} against the definitions ({self.book.device}); a margin over 1 is outside the tolerance"
        ]
        lines.append(f"{'obligation':<{width}}  {'compared':>8}  {'worst margin':>12}")
        for name in sorted(self.seen):
            result = results.get(name, {"comparisons": 0, "worst_margin": 0.0})
            margin = f"{result['worst_margin']:.3g}" if result["comparisons"] else "-"
            verdict = "agrees" if result["comparisons"] else "not compared"
            verdict = "departs" if result["worst_margin"] > 1 else "fails" if name in self.failed else verdict
            lines.append(f"{name:<{width}}  {result['comparisons']:>8}  {margin:>12}  {verdict}")
        return lines

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.lines:
            terminalreporter.write_line(line)


def obligations_of(item: pytest.Item) -> frozenset[str]:
    """Names in the `obligation` markers of a test."""
    return frozenset(name for marker in item.iter_markers("obligation") for name in marker.args)


class Implementation:
    """The implementation under test, or a submodule of it: a name of the spec that it lacks is not tested for."""

    def __init__(self, module: Any, names: frozenset[str]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name, None)
        if value is None and name in self._names:
            value = self._submodule(f"{self._module.__name__}.{name}")
        if value is None and name in self._names:
            pytest.skip(f"{self._module.__name__} has no {name}")
        if value is None:
            raise AttributeError(name)
        return Implementation(value, self._names) if isinstance(value, ModuleType) else value

    def _submodule(self, name: str) -> ModuleType | None:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, self._module.__name__):
                raise
            return None


@pytest.fixture(scope="session")
def losses(pytestconfig: pytest.Config) -> Any:
    """The losses under test: `paritygate.losses`, or the module of --implementation."""
    assert ledger.LEDGER is not None
    declared = ledger.LEDGER.spec["losses"]
    module = pytestconfig.getoption("--implementation")
    if module:
        functions = {name for loss in declared.values() for name in loss["functions"]}
        return Implementation(importlib.import_module(module), frozenset(declared.keys() | functions))
    for name in declared:
        importlib.import_module(f"paritygate.losses.{name}")
    return importlib.import_module("paritygate.losses")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The torch device string of --device."""
    return pytestconfig.getoption("--device")


@pytest.fixture(scope="session")
def tau_bench_dir() -> Path:
    """The folder of tau-bench retail that PARITYGATE_TAU_BENCH names; skips without it, fails under CI."""
    folder = os.environ.get("PARITYGATE_TAU_BENCH", "")
    if folder and (Path(folder) / "tools_info.json").is_file():
        return Path(folder)
    message = f"PARITYGATE_TAU_BENCH ({folder or 'not set'}) names no tau-bench retail folder: make data fetches one"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
