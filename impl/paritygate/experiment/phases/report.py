"""The last phase: report.html from the files of the run; receipt.json follows when everything else is on the disk."""

import shutil

from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided
from paritygate.experiment.run.receipt import COST, write_report
from paritygate.experiment.run.state import SERVICE, State

REPORT = "report.html"


async def report(state: State) -> Decided:
    """report.html from the files of the run alone; receipt.json follows when everything else is on the disk."""
    await state.leave_as_found()
    await state.close_service()
    keep_products(state)
    write_report(state)
    adapters = state.facts("train")["samplers"]
    facts: Record = {"adapters": adapters, "left_to_their_time_limit": state.left_over(), "cost": state.cost().line()}
    return Decided(
        f"the page is {state.directory / REPORT}; trained adapters: {', '.join(adapters.values())}",
        "made from the run's files alone; it opens offline",
        facts,
        [REPORT, COST],
    )


def keep_products(state: State) -> None:
    """Of what the embedded server saved, keep the trained arms (their last state and sampler) and delete the rest."""
    last = f"step-{state.exp.steps - 1:03d}"
    arms = [state.journal.committed(f"train-{arm.name}/{last}") or {} for arm in state.exp.arms]
    paths = [arm["state"] for arm in arms] + list(state.facts("train")["samplers"].values())
    kept = {state.saved(path) for path in paths}
    for folder in sorted((state.directory / SERVICE).glob("*/*/*")):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in sorted((state.directory / SERVICE).glob("**/"), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
