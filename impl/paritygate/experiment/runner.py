"""The loop that takes a run through the protocol: the first phase without a receipt first."""

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paritygate.address import checked_url
from paritygate.errors import BadInputError, GateStopped, Refused
from paritygate.experiment.correctness.parity import is_full_run, refuse_another_service
from paritygate.experiment.protocol import PHASES, Phase
from paritygate.experiment.run.account.cost import prices_of
from paritygate.experiment.run.directory import (
    choose_directory,
    kept_where_there_is_no_room,
    make_directory,
    refuse_another_spec,
    write_spec,
)
from paritygate.experiment.run.entry_points import find, require
from paritygate.experiment.run.environment import load_source
from paritygate.experiment.run.journal import finite, read_lines
from paritygate.experiment.run.options import Options
from paritygate.experiment.run.outcome import Decided, PhaseStopped
from paritygate.experiment.run.progress import Progress
from paritygate.experiment.run.receipt import write_receipt, write_report
from paritygate.experiment.run.state import DEVIATIONS, State
from paritygate.receipts import PhaseChain, lock_run
from paritygate.receipts.environment import require_device
from paritygate.receipts.files import read_json
from paritygate.spec.experiment import Experiment

FREE = ("decide", "report")  # phases that a spent budget does not keep a run from


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Where a run stands: `verdict` is None until decided, `until` is the phase that --until asked for, if any."""

    directory: Path
    completed: tuple[str, ...]
    verdict: dict[str, Any] | None
    decided: dict[str, str]
    until: str | None = None

    def to_json(self) -> dict[str, Any]:
        """What --json prints."""
        return {**dataclasses.asdict(self), "directory": str(self.directory)}

    def text(self) -> str:
        """What came out and where it lies, in plain words."""
        if self.verdict is None:
            last = self.completed[-1] if self.completed else "nothing"
            return f"{last} is done; no verdict yet. The run lies in {self.directory}; --resume goes on."
        lines = [self.verdict["why"], self.decided.get("train", ""), self.decided.get("evaluate", "")]
        return "\n".join([*filter(None, lines), f"The run lies in {self.directory}; open report.html there."])


def run_experiment(
    exp: Experiment,
    *,
    root: Path,
    output: Path | None = None,
    resume: bool = False,
    until: str | None = None,
    device: str = "cpu",
    tau_bench: Path | str | None = None,
    trust_receipt: bool = False,
    environment: str = "own",
    prices: Path | None = None,
    quiet: bool = False,
    json: bool = False,
) -> RunResult:
    """Take the experiment through its phases, from the first without a receipt; see docs of `run.py`.

    Raises BadInputError (exit 2), Refused (3), GateStopped (4, logs kept), BackendError (5, to be resumed).
    """
    root = Path(root).resolve()
    phases = [phase for phase in PHASES if phase.applies(exp)]
    check_request(phases, until, device)
    if asks_the_service(phases, until) and is_full_run():
        checked_url(os.environ["TINKER_BASE_URL"], "TINKER_BASE_URL")
    directory = choose_directory(exp, root, output, resume=resume)
    refuse_unresolved(exp)
    options = Options(root, device, Path(tau_bench) if tau_bench else None, trust_receipt, environment, prices)
    refuse_another_run(exp, directory, environment)
    check_inputs(exp, options, directory, served=asks_the_service(phases, until))
    if asks_the_service(phases, until) and is_full_run():
        asyncio.run(meet_service(exp))
    make_directory(directory)
    progress = Progress(quiet=quiet or json)
    with kept_where_there_is_no_room(), lock_run(directory):
        write_spec(exp, directory)
        return asyncio.run(_walk(exp, phases, directory, options, progress, until))


def check_request(phases: list[Phase], until: str | None, device: str) -> None:
    """Bad arguments (exit 2), before anything is touched."""
    names = [phase.name for phase in phases]
    if until is not None and until not in names:
        raise BadInputError(f"--until {until}: no such phase in this experiment; its phases are {', '.join(names)}.")
    require_device(device)
    if device != "cpu":
        raise BadInputError(
            f"--device {device}: an experiment's model runs at the service and its advantages on the CPU, so CUDA "
            "would do nothing; --device cuda is for a synthetic component (spec/spod.json) and for pytest."
        )


def refuse_unresolved(exp: Experiment) -> None:
    """Raise Refused for a spec with revisions that are not pinned."""
    if exp.unresolved:
        raise Refused(
            f"{exp.path} is unresolved: no revision is pinned at {', '.join(exp.unresolved)}; pin them (spec/sdpo.json "
            "shows how), a full run is refused until then."
        )


def refuse_another_run(exp: Experiment, directory: Path, environment: str) -> None:
    """BadInputError for what this run cannot go on with, before anything is asked for that it could not use.

    That is another spec, another retail environment (its rewards would mix), or the embedded server instead of a
    service and the other way round.
    """
    if not directory.is_dir():
        return
    refuse_another_spec(exp, directory)
    chain = PhaseChain(directory)
    facts = {name: chain.record(name).get("facts", {}) for name in chain.completed}
    began = facts.get("spec_preflight", {}).get("environment", environment)
    if began != environment:
        raise BadInputError(f"{directory} was begun with --environment {began}: it cannot go on with {environment}.")
    refuse_another_service(directory, facts.get("service_preflight", {}).get("endpoint"))


def asks_the_service(phases: list[Phase], until: str | None) -> bool:
    """Whether a run up to the phase `until` comes to one that asks the service."""
    names = [phase.name for phase in phases]
    return until is None or names.index(until) >= names.index("service_preflight")


def check_inputs(exp: Experiment, options: Options, directory: Path, *, served: bool) -> None:
    """Data, prices and an address (exit 2), then the receipt (exit 3): nothing is created before all are there."""
    from paritygate.receipts import require_parity
    from paritygate.receipts.signature import require_signature

    load_source(options)
    prices_of(exp, options.prices)
    if served and not is_full_run() and exp.protocol.service.embedded_model is None:
        raise BadInputError(
            f"{exp.path} names no embedded model to stand in for {exp.base_model}: set TINKER_BASE_URL (and "
            "TINKER_API_KEY) to a service that has it."
        )
    if served and is_full_run() and exp.budget.gpu_hours == 0:
        raise BadInputError(
            f"{exp.path}: /budget/gpu_hours is 0, and an hour at a service counts as one: no step could be taken at "
            f"{os.environ['TINKER_BASE_URL']}."
        )
    for name in exp.entry_points:
        find(name)
    receipt = require_parity(options.root, exp.losses, options.device, resumed=directory)
    if options.trust_receipt and served and is_full_run() and not directory.exists():
        require_signature(options.root, receipt)
    for name in exp.entry_points:
        require(name, directory)


async def meet_service(exp: Experiment) -> None:
    """First contact, in seconds, before parity is shown: key, address, models and their uses, tokenizers (exit 5)."""
    from paritygate.backend import contact

    needs = [contact.Need("base model", exp.base_model, trained=True)]
    for role, partner in (("user simulator", exp.protocol.user), ("judge", exp.protocol.judge)):
        if partner.kind == "model" and partner.model is not None:
            needs.append(contact.Need(role, partner.model))
    met = await contact.first_contact(needs, os.environ["TINKER_BASE_URL"])
    from paritygate.agent import renderer  # after the address: its imports take a while

    for need in needs:  # harmony's vocabulary is asked for by its renderer
        tokenizer = met.tokenizers[need.model]
        if tokenizer is not None:
            renderer.load(exp.protocol.renderer if need.trained else "auto", tokenizer, model=need.model)


async def _walk(
    exp: Experiment, phases: list[Phase], directory: Path, options: Options, progress: Progress, until: str | None
) -> RunResult:
    state = State(exp, directory, options, progress)
    try:
        for position, phase in enumerate(phases, start=1):
            done = state.record(phase.name)
            if done.get("outcome") == "stopped":
                if not (state.directory / "receipt.json").is_file():
                    await _close_stopped(state)  # the process that stopped it was killed before it could
                raise GateStopped(f"{done['decided']} (this run was stopped there; gates are never tried again)")
            if not done:
                if phase.name != until:
                    _begin_early(state, phases[position : position + 1])
                await _take(state, phase, f"{position}/{len(phases)}")
            if phase.name == until:
                break
    finally:
        await state.close_service()
    return _finish(state, phases, until)


def _begin_early(state: State, following: Sequence[Phase]) -> None:
    """What the next phase may compute meanwhile; a gate that stops this one throws it away."""
    for phase in following:
        begin = phase.load_early()
        if begin is not None and not state.record(phase.name):
            state.begin_early(phase.name, begin(state))


async def _take(state: State, phase: Phase, position: str) -> None:
    stopped: GateStopped | None = None
    decided = Decided("", "", {})
    if phase.name not in FREE:
        state.account.check()
    state.account.begin(phase.name)
    with state.progress.phase(phase.name, position), state.timings.measure(phase.name, what="phase"):
        try:
            _refuse_again(state, phase)
            decided = await phase.load()(state)
        except GateStopped as stop:
            _record_stop(state, phase, stop)
            stopped = stop
        finally:
            await state.end_phase()
            state.account.record()
    if stopped is not None:
        await _close_stopped(state)
        raise stopped
    state.chain.append(phase.name, _receipt("done", decided), list(decided.files))
    await state.delete_superfluous()
    state.progress.line(f"      {decided.what}")


def _refuse_again(state: State, phase: Phase) -> None:
    """GateStopped where a process recorded a loss that was not finite, and was killed before its receipt."""
    for line in read_lines(state.directory / DEVIATIONS):
        if (line["phase"], line["kind"]) == (phase.name, "not_finite"):
            raise GateStopped(line["what"])


def _receipt(outcome: str, decided: Decided) -> dict[str, Any]:
    return {"outcome": outcome, "decided": decided.what, "because": decided.why, "facts": finite(decided.facts)}


def _record_stop(state: State, phase: Phase, stop: GateStopped) -> None:
    """A gate's refusal is a result: it is receipted, reported, and not tried again by --resume."""
    decided = stop.decided if isinstance(stop, PhaseStopped) else Decided(str(stop), "a gate stopped the run", {})
    files = decided.files or state.journal.files(f"{phase.name}-")
    state.chain.append(phase.name, _receipt("stopped", decided), files)


async def _close_stopped(state: State) -> None:
    """A stopped run is reported and receipted like a finished one, as far as it got."""
    await state.leave_as_found()
    await state.close_service()
    write_report(state)
    if list(state.directory.glob("parity-*.json")):
        write_receipt(state)


def _finish(state: State, phases: list[Phase], until: str | None) -> RunResult:
    """The receipt of a run that is through, and where it stands."""
    completed = tuple(phase.name for phase in phases if state.record(phase.name))
    if len(completed) == len(phases) and not (state.directory / "receipt.json").is_file():
        write_receipt(state)
    path = state.directory / "verdict.json"
    verdict = read_json(path) if path.is_file() else None
    decided = {name: state.record(name)["decided"] for name in completed}
    return RunResult(state.directory, completed, verdict, decided, until)
