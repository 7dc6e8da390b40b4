"""The budget binds the run, over kills and resumes: what was spent is on the disk, and is looked at between steps."""

import math
import time
from collections import Counter

from paritygate.errors import ParityGateError
from paritygate.experiment.run.account.meter import Usage
from paritygate.experiment.run.journal import Timings
from paritygate.spec.experiment import Budget

SPENT = "spent"


class BudgetSpentError(ParityGateError):
    """The budget is spent (exit 4). No gate refused anything, so nothing is receipted and --resume may go on."""

    exit_code = 4


class Account:
    """Wall time and tokens that a run has used, appended to timings.jsonl as it goes: a kill loses at most one step's.

    grants: how many budgets the run may use; one, and one more for each time that it was resumed after spending all.
    gpus: GPUs that the run holds while it runs (0 on the embedded server).
    usage: what was asked of the service since it was last written down.
    """

    def __init__(self, timings: Timings, budget: Budget) -> None:
        self.grants = 1
        self.gpus = 0
        self.usage: Usage = Counter()
        self._timings = timings
        self._budget = budget
        self._phase = ""
        self._mark = time.perf_counter()

    def begin(self, phase: str) -> None:
        """What is spent from here on belongs to `phase`."""
        self._phase, self._mark = phase, time.perf_counter()

    def record(self, variant: str = "") -> None:
        """Write down what was spent since the last call, for a fallback's `variant` where one is piloted."""
        now = time.perf_counter()
        seconds, used = round(now - self._mark, 4), dict(self.usage)
        self._timings.append(self._phase, what=SPENT, variant=variant, seconds=seconds, used=used)
        self._mark = now
        self.usage.clear()

    def used(self, phase: str | None = None) -> Usage:
        """Tokens by `role/kind` and saved states so far, of one phase or of all."""
        total: Usage = Counter(self.usage)
        for entry in self._timings.entries(phase):
            total.update(entry.get("used", {}))
        return total

    def hours(self) -> tuple[float, float]:
        """Hours spent so far, and GPU hours."""
        hours = self.seconds() / 3600
        return hours, self.gpus * hours

    def seconds(self, phase: str | None = None, *, fallbacks: bool = False) -> float:
        """Seconds spent so far, of one phase or of all; of the pilots of fallbacks alone where that is asked."""
        entries = [entry for entry in self._timings.entries(phase) if entry.get("what") == SPENT]
        return round(math.fsum(entry["seconds"] for entry in entries if entry["variant"] or not fallbacks), 4)

    def exceeded(self) -> str | None:
        """What was spent beyond the budget, in words; None up to exactly all of it, as for the projection."""
        minutes = self.seconds() / 60
        hours = self.gpus * minutes / 60
        if minutes > self.grants * self._budget.max_wall_minutes:
            return f"{minutes:.1f} minutes are spent, {self.grants * self._budget.max_wall_minutes:g} are allowed"
        if hours > self.grants * self._budget.gpu_hours:
            return f"{hours:.2f} GPU hours are spent, {self.grants * self._budget.gpu_hours:g} are allowed"
        return None

    def check(self) -> None:
        """Raise BudgetSpentError (exit 4) where more than all of it is spent."""
        exceeded = self.exceeded()
        if exceeded is not None:
            raise BudgetSpentError(
                f"{exceeded}: the run stops between two steps, all of it kept. --resume goes on with as much again, "
                "which is recorded as a deviation."
            )
