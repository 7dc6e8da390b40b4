"""Does the service do what the arms' losses say? Its proof, for the obligations that this experiment stands on."""

import asyncio
import json

from paritygate.errors import Refused
from paritygate.experiment.plan.service_obligations import JSON, PAGE, RECEIPT, proof_settings, stands_on
from paritygate.experiment.run.account.meter import MeteredProof
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided
from paritygate.experiment.run.state import State
from paritygate.service import report as reports
from paritygate.service.lab import Settings
from paritygate.service.proof import prove_at
from paritygate.service.receipt import receipt
from paritygate.service.report import Report
from paritygate.service.runner import Result, outcomes

PHASE = "service_proof"
LIMIT = 600.0  # seconds for one call


async def service_proof(state: State) -> Decided:
    """Raises Refused (exit 3) where an obligation departs, or is neither shown nor allowed by name in the spec.

    An unfinished proof is gone on with; the service receipt is part of the run.
    """
    backend = await state.backend()
    obligations, files = stands_on(state.exp), state.directory

    def save(report: Report) -> None:
        state.account.record()  # what is committed is counted, wherever the process ends
        reports.write_json(files / JSON, report)
        reports.write(files / PAGE, reports.page(report, obligations))
        if report.results:
            last = report.results[-1]
            state.progress.update(f"{len(report.results)}/{len(obligations.entries)} {last.name}: {last.outcome}")

    earlier = reports.read(files / JSON)
    if earlier is not None and backend.embedded:
        earlier.endpoint = backend.endpoint  # the run's own server has another port each time
    report = await asyncio.to_thread(
        prove_at,
        backend.endpoint,
        backend.api_key,
        state.exp.base_model,
        obligations,
        settings=Settings(**proof_settings(state.exp)),
        limit=LIMIT,
        earlier=earlier,
        usage=MeteredProof(state.account.usage, state.states),
        save=save,
    )
    signed = receipt(report, obligations)
    reports.write(files / RECEIPT, json.dumps(signed, indent=1) + "\n")
    judge(state, report)
    counts = outcomes(report.results)
    shown = max(
        (r.figure for r in report.results if r.name.startswith("gradient/") and r.figure is not None), default=0
    )
    facts: Record = {
        "sha256": signed["sha256"],
        "outcomes": counts,
        "noise": report.noise,
        "obligations": {result.name: _fact(result) for result in report.results},
    }
    return Decided(
        f"of {len(report.results)} obligations {counts['holds']} hold at {report.endpoint}, none departs",
        f"gradients within {shown:.2g} of their definitions; {report.calls} calls, {report.tokens:,} tokens",
        facts,
        [JSON, PAGE, RECEIPT],
    )


def judge(state: State, report: Report) -> None:
    """Refused for a departure, and for what is not shown unless the spec gives a reason to go on without it."""
    allowed = state.exp.protocol.service.undecided
    departed = [result for result in report.results if result.outcome == "departs"]
    if departed:
        first = departed[0]
        raise Refused(
            f"{report.endpoint} departs from {first.name}: {first.because} (figure {first.figure}, bound {first.bound})"
            f"; {PAGE} in {state.directory} has a program that shows it. The run does not start."
        )
    for result in report.results:
        if result.outcome == "holds":
            continue
        if result.name not in allowed:
            raise Refused(
                f"{report.endpoint} does not show {result.name} ({result.outcome}): {result.because}. Allow it by "
                "name, with a reason, in /protocol/service/undecided of the spec, or use another service."
            )
        state.deviation(PHASE, "undecided", f"{result.name} ({result.because}): {allowed[result.name]}")


def _fact(result: Result) -> Record:
    return {"outcome": result.outcome, "figure": result.figure, "bound": result.bound}
