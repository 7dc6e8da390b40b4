"""All arms side by side, in step: the same tasks at the same step, committed in the order of the arms."""

import asyncio
import time
from collections.abc import Callable, Sequence

from paritygate.experiment.run.journal import Record
from paritygate.experiment.step.arm_run import ArmRun
from paritygate.experiment.step.collector import Collector
from paritygate.experiment.step.training_step import training_step


async def advance(
    runs: Sequence[ArmRun],
    steps: int,
    collector: Collector,
    after: Callable[[ArmRun, Record], None] = lambda run, record: None,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Take all runs to `steps` committed steps; `after` sees every committed step, `before` may refuse the next one.

    The first failure is raised once all arms have ended that step; the arms before it are committed, no others.
    """
    tasks = collector.train_tasks()
    per_step, taken, started = collector.exp.protocol.rollout.tasks_per_step, 0, time.monotonic()
    for step in range(steps):
        due = [run for run in runs if run.done == step]
        if not due:
            continue
        collector.state.account.check()
        before()
        tasks_of_step = [tasks[place % len(tasks)] for place in range(step * per_step, (step + 1) * per_step)]
        collector.state.progress.update(f"step {step + 1} of {steps}")
        records = await asyncio.gather(
            *(training_step(run, tasks_of_step, collector) for run in due), return_exceptions=True
        )
        collector.state.account.record(due[0].variant)
        for run, record in zip(due, records, strict=True):
            if isinstance(record, BaseException):
                raise record
            after(run, await run.commit(record))
        taken += 1
        left = (time.monotonic() - started) / taken * (steps - step - 1)
        name = " ".join(filter(None, [due[0].phase, due[0].variant]))
        means = ", ".join(f"{run.arm.name} {shown(run.steps[-1]['metrics']['composite_rubric_score'])}" for run in due)
        collector.state.log(f"{name}, step {step + 1} of {steps}: composite {means}", left)


def shown(value: float | None) -> str:
    """A mean for the log; a dash where nothing was judged."""
    return "-" if value is None else f"{value:.3f}"
