"""One pytest session as a parity session: what decides green, and the receipt of it.

A session that collects a test marked `obligation` is a parity session. It is green, and writes a receipt, when every
obligation that the spec declares for the device (and the losses of --losses) was met, every test in the session passed,
no obligation test was left out, and the subjects have the same bytes before and after. No flag is looked for: what was
not compared is missing. `--implementation MODULE` holds another implementation: a table, and no receipt. With
`--obligations NAMES` nothing else is compared, and there is no receipt either.
"""

import os
import sys
from collections import Counter
from typing import Any

import hypothesis
import hypothesis.core
import pytest

from paritygate import bootstrap
from paritygate.errors import Refused
from paritygate.harness.ledger import Ledger
from paritygate.receipts import parity
from paritygate.receipts.origins import refuse_shadowed
from paritygate.receipts.subjects import difference, subjects
from paritygate.spec.losses import device_class, required, shortfalls, unwritten
from paritygate.spec.project import Project


class Session:
    """One pytest session as a parity session: what was collected, run, left out, and what it comes to."""

    def __init__(self, config: pytest.Config, project: Project, book: Ledger, seed: str | None) -> None:
        self.config, self.project, self.book, self.seed = config, project, book, seed
        chosen = config.getoption("--losses")
        self.losses: list[str] | None = chosen.split(",") if chosen else None
        self.claimed = frozenset(required(book.spec, book.device, self.losses)) | frozenset(
            name for loss in self.losses or book.spec["losses"] for name in book.spec["losses"][loss]["obligations"]
        )
        names: str | None = config.getoption("--obligations")
        self.alone = names is not None
        if names is not None:
            self.claimed = book.wanted = frozenset(names.split(","))
            if unknown := self.claimed - required(book.spec, book.device, self.losses).keys():
                raise Refused(
                    f"{project.spec} declares no obligation {min(unknown)!r} of these losses and this device."
                )
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
            self.before = subjects(self.project.root)
        except Refused as refusal:
            self.troubles.append(str(refusal))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cuda = device_class(self.book.device) == "cuda"
        for item in items:
            names = obligations_of(item)
            if unknown := names - self.book.obligations.keys():
                raise pytest.UsageError(f"{item.nodeid}: {self.project.spec} declares no obligation {min(unknown)!r}.")
            self.seen |= names & self.claimed
            if names and cuda:
                item.add_marker("gpu")
        items[:] = [item for item in items if self.claimed >= (names := obligations_of(item)) or self.claimed & names]
        if not cuda:
            gone = [item for item in items if item.get_closest_marker("gpu")]
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]
            if gone:
                self.lines.append(f"{len(gone)} tests need a GPU and were left out: pytest -m gpu --device cuda")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.troubles.extend(f"{item.nodeid} was deselected" for item in items if obligations_of(item) & self.claimed)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.collected |= obligations_of(item) & self.claimed

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
        if obligations_of(item) & self.claimed and other_examples(self.seed):
            self.troubles.append("Hypothesis drew examples by another profile or seed: leave --hypothesis-profile out")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        if obligations_of(item) & self.claimed:
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
        wanted = required(self.book.spec, self.book.device, self.losses)
        if self.alone:
            wanted = {name: wanted[name] for name in self.claimed}
        troubles = self.reasons(exitstatus, wanted)
        if self.alone and not troubles:
            self.lines.append(f"parity: {', '.join(sorted(wanted))}: met; no receipt")
            return
        if not troubles:
            try:
                path = parity.show_parity(self.project.root, self.statement(), self.book.device, self.losses)
                self.lines.append(f"parity: green, {len(wanted)} obligations; {self.project.receipts}/{path.name}")
                return
            except Refused as refusal:
                troubles = [str(refusal)]
        self.lines.append(f"parity: NOT green, no receipt: {troubles[0]}")
        self.lines.extend(f"  {trouble}" for trouble in troubles[1:])
        met = {name.partition("/")[0] for name in self.collected}
        if self.losses is None and 0 < len(met) < len(self.book.spec["losses"]):
            self.lines.append(f"A receipt for what was collected alone: --losses {','.join(sorted(met))}")
        if exitstatus == pytest.ExitCode.OK and self.collected >= wanted.keys():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def reasons(self, exitstatus: int, wanted: dict[str, Any]) -> list[str]:
        """Everything that keeps this session from being green."""
        reasons = list(dict.fromkeys(self.troubles))
        if hasattr(self.config, "workerinput") or self.config.getoption("dist", default="no") != "no":
            reasons.append("it was spread over workers, whose comparisons are not merged: run it without -n")
        if repeated := [node for node, count in self.runs.items() if count > 1]:
            reasons.append(
                f"{repeated[0]} was run {self.runs[repeated[0]]} times: a rerun is no proof; run without reruns"
            )
        if self.config.getoption("reruns", default=None) or self.config.getoption("force_flaky", default=False):
            reasons.append("failing tests would have been run again: run without reruns")
        if sys.flags.optimize:
            reasons.append("python -O removes the assertions: run without -O")
        if self.before:
            reasons.extend(self.changes())
        reasons.extend(self.book.failures)
        reasons.extend(shortfalls(wanted, self.book.results()))
        if not self.alone:
            reasons.extend(unwritten(self.book.spec, self.losses or self.book.spec["losses"]))
        if exitstatus != pytest.ExitCode.OK and not reasons:
            reasons.append(f"pytest ended with exit code {int(exitstatus)}")
        return reasons

    def changes(self) -> list[str]:
        """What shows that the code that ran is not the code of the subjects."""
        try:
            tests = self.project.tests.partition("/")[0]
            homes = {tests: self.project.root / tests, **self.project.homes}
            bootstrap.refuse_foreign(self.project.root, homes)
            refuse_shadowed(self.project.root, homes)
            if change := difference(self.before, subjects(self.project.root)):
                return [f"{change} during the session"]
        except Refused as refusal:
            return [str(refusal)]
        loaded = {os.path.relpath(path, self.project.root): value for path, value in bootstrap.LOADED.items()}
        return [
            f"{name} ran with other bytes than it has: it was edited during the session"
            for name, value in sorted(loaded.items())
            if self.before.get(name) != value and not name.startswith("..")
        ]

    def statement(self) -> dict[str, Any]:
        results = self.book.results()
        return parity.statement_of(
            self.project.root,
            device=self.book.device,
            files=self.before,
            results=results,
            hypothesis={
                "derandomized": not other_examples(self.seed) and self.seed is None,
                "seed": self.seed,
                "version": hypothesis.__version__,
            },
            session={
                "arguments": [str(argument) for argument in self.config.invocation_params.args],
                "tests": len(self.runs),
                "dtypes": sorted({cell["dtype"] for result in results.values() for cell in result["cells"]}),
            },
        )

    def table(self) -> list[str]:
        """A line for each obligation that was compared or failed: how far the implementation under test departs."""
        results = self.book.results()
        shown = sorted(self.seen & (results.keys() | self.failed))
        width = max(map(len, shown), default=10)
        lines = [
            f"{self.module} against the definitions ({self.book.device}); a margin over 1 is outside the tolerance"
        ]
        lines.append(f"{'obligation':<{width}}  {'compared':>8}  {'worst margin':>12}")
        for name in shown:
            result = results.get(name, {"comparisons": 0, "worst_margin": 0.0})
            margin = f"{result['worst_margin']:.3g}" if result["comparisons"] else "-"
            verdict = "departs" if result["worst_margin"] > 1 else "fails" if name in self.failed else "agrees"
            lines.append(f"{name:<{width}}  {result['comparisons']:>8}  {margin:>12}  {verdict}")
        return lines

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.lines:
            terminalreporter.write_line(line)


def obligations_of(item: pytest.Item) -> frozenset[str]:
    """Names in the `obligation` markers of a test."""
    return frozenset(name for marker in item.iter_markers("obligation") for name in marker.args)


def other_examples(seed: str | None) -> bool:
    """Whether Hypothesis draws its examples by another profile than ours, or by another seed than `seed`."""
    ours, now = hypothesis.settings.get_profile("parity"), hypothesis.settings.default
    assert now is not None
    forced = hypothesis.core.global_force_seed
    return (ours.derandomize, ours.max_examples, ours.database, seed) != (
        now.derandomize,
        now.max_examples,
        now.database,
        None if forced is None else str(forced),
    )
