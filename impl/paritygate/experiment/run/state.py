"""What every phase reads: the spec, the run directory, the data, the service; nothing here decides anything."""

import asyncio
import shutil
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paritygate.errors import BackendError
from paritygate.experiment.run.account.budget import Account
from paritygate.experiment.run.account.cost import Cost, cost_of, keep_prices
from paritygate.experiment.run.account.meter import MeteredBackend
from paritygate.experiment.run.account.saved_states import SavedStates
from paritygate.experiment.run.environment import load_source
from paritygate.experiment.run.journal import Journal, Record, Timings, append_line, drop_torn_tail, read_lines
from paritygate.experiment.run.options import Options, Settings
from paritygate.experiment.run.progress import Progress
from paritygate.receipts import PhaseChain
from paritygate.server.engine.cores import cores_of_this_process
from paritygate.spec.experiment import Experiment

if TYPE_CHECKING:
    from paritygate.backend import Backend, Sampler
    from paritygate.retail import Source

TIMINGS = "timings.jsonl"
DEVIATIONS = "deviations.jsonl"
SERVICE = "service"


class State:
    """One open run. The service is connected on first use; `close_service` leaves it."""

    def __init__(self, exp: Experiment, directory: Path, options: Options, progress: Progress) -> None:
        self.exp = exp
        self.directory = directory
        self.options = options
        self.progress = progress
        self.chain = PhaseChain(directory)
        self.chain.verify()  # what is gone on with, or reported again, is what the phases vouch for
        for name in (TIMINGS, DEVIATIONS):
            drop_torn_tail(directory / name)
        self.journal = Journal(directory)
        self.timings = Timings(directory / TIMINGS)
        self.account = Account(self.timings, exp.budget)
        self.prices = keep_prices(directory, exp, options.prices)
        self.states = SavedStates(directory)
        self._grant_budget()
        self._connection, self._phase = AsyncExitStack(), AsyncExitStack()
        self._connecting = asyncio.Lock()
        self._services: list[Backend] = []
        self._sessions: dict[int, Backend] = {}
        self._policy: Sampler | None = None
        self._early: dict[str, asyncio.Task[Any]] = {}

    def _grant_budget(self) -> None:
        """A run that is resumed with its budget spent may use as much again: that is recorded, each time."""
        granted = [line for line in read_lines(self.directory / DEVIATIONS) if line["kind"] == "over_budget"]
        self.account.grants += len(granted)
        self.account.gpus = int(self.facts("service_preflight").get("endpoint", "embedded") != "embedded")
        exceeded = self.account.exceeded()
        if exceeded is not None:
            self.deviation("run", "over_budget", f"{exceeded}; the run was resumed nevertheless")
            self.account.grants += 1

    async def backend(self, arm: int = 0) -> "Backend":
        """The phase's own session at the service: TINKER_BASE_URL where it is set, else the embedded server.

        The embedded server keeps saved states in the run directory; what a phase does not save goes with its session.
        It computes on one core, so on a machine with several each further arm gets a server for itself (same folder).
        """
        place = 0
        if arm and (await self.backend()).embedded:
            place = arm % self.side_by_side()
        async with self._connecting:  # arms may ask at the same time
            service = await self._service(place)
            if place not in self._sessions:
                session = await self._phase.enter_async_context(service.session())
                metered = MeteredBackend(session, self.account.usage, self.states)
                self._sessions[place] = cast("Backend", metered)
        return self._sessions[place]

    async def _service(self, place: int) -> "Backend":
        while len(self._services) <= place:
            await self._connect()
        return self._services[place]

    async def spare_server(self) -> "Backend | None":
        """The embedded server that phases of one client leave idle; None at a service, and on one core.

        Its sessions are the caller's: they outlive phases, and nothing of them is metered.
        """
        async with self._connecting:
            if self.side_by_side() == 1 or not (await self._service(0)).embedded:
                return None
            return await self._service(1)

    def begin_early(self, phase: str, work: Coroutine[Any, Any, object]) -> None:
        """Begin what `phase` will take by `early`; it is cancelled where the service is left before that."""
        self._early[phase] = asyncio.create_task(work)

    async def early(self, phase: str) -> Any:
        """What was begun for `phase`, once it is there; None where nothing was. It raises what that raised."""
        task = self._early.pop(phase, None)
        return None if task is None else await task

    @staticmethod
    def side_by_side() -> int:
        """How many arms embedded servers carry at once: one for each core that this process may run on."""
        return cores_of_this_process()

    async def _connect(self) -> None:
        from paritygate.backend import connect

        asked = self.exp.protocol.service
        service = await self._connection.enter_async_context(
            connect(
                embedded_model=asked.embedded_model,
                embedded_dtype=asked.embedded_dtype,
                state_dir=self.directory / SERVICE,
            )
        )
        self._services.append(service)
        self.account.gpus = 0 if service.embedded else 1
        where = "the embedded server" if service.embedded else "the service"
        self.progress.line(f"      using {where} at {service.endpoint}")
        began = self.facts("service_preflight").get("endpoint")
        if began is not None and not service.embedded and service.endpoint != began:
            self.deviation(**moved_to(began, service.endpoint))
        await self.delete_superfluous()  # what a process saved, or no longer needed, when it was killed

    async def end_phase(self) -> None:
        """Close the phase's sessions: their clients are thrown away at the service."""
        self._sessions, self._policy = {}, None
        await self._phase.aclose()

    async def close_service(self) -> None:
        """Leave the service; embedded servers end, and with them everything that writes into the run directory."""
        while self._early:
            _, task = self._early.popitem()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.end_phase()
        self._services = []
        await self._connection.aclose()

    async def policy(self) -> "Sampler":
        """A sampler of the untuned base model: where its tokenizer comes from."""
        if self._policy is None:
            backend = await self.backend()
            require_model(backend, self.exp.base_model, "base model")
            self._policy = await backend.sampling(base_model=self.exp.base_model)
        return self._policy

    @cached_property
    def source(self) -> "Source":
        """The benchmark's data, read once."""
        return load_source(self.options)

    def cost(self) -> Cost:
        """What the run has used so far, in tokens, hours and money."""
        self.account.record()
        return cost_of(self.exp, self.account.used(), self.account.hours(), self.prices)

    def log(self, what: str, seconds_left: float) -> None:
        """A line that stays, in logs too: where a phase is, what the run has used so far, how long the phase takes."""
        self.progress.line(f"      {what}; {self.cost().line()}; about {seconds_left / 60:.1f} min of this phase to go")

    async def delete_superfluous(self) -> None:
        """Delete at the service what this run saved there and nothing needs any more; nothing where none is connected.

        The embedded server's states lie in the run directory, which the last phase tidies up.
        """
        if self._services and not self._services[0].embedded:
            await self._reconcile()
            needed = self.needed()
            await self.delete([path for path in self.states.left() if path not in needed])

    def left_over(self) -> list[str]:
        """What the run saved at a service and did not delete; nothing on the embedded server, whose files stay here."""
        if self.facts("service_preflight").get("endpoint", "embedded") == "embedded":
            return []
        needed = self.needed()
        return [path for path in self.states.left() if path not in needed]

    async def leave_as_found(self) -> None:
        """Delete at the service all that is no result: a run that was killed before it could has to ask once more."""
        at_a_service = self.facts("service_preflight").get("endpoint", "embedded") != "embedded"
        if self._services:
            await self.delete_superfluous()
        elif at_a_service and (self.left_over() or self.states.unanswered()):
            try:
                await self.backend()  # connecting deletes them
            except BackendError as error:
                self.progress.line(f"      {error}")

    async def _reconcile(self) -> None:
        """Ask the service what came of the saves without an answer, and list those that are there.

        One that it does not have is asked for again each time: what a killed process sent may still arrive.
        """
        for client, name in self.states.unanswered():
            try:
                there = await self._services[0].checkpoints(client)
            except BackendError as error:
                self.progress.line(f"      whether {name} was saved is not known, and not deleted: {error}")
                continue
            for path in there:
                if path.rsplit("/", 1)[-1] == name and path not in self.states.ever():
                    self.states.add(client, name, path)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete saved states; one that the service does not let go of is said so, and left to its time limit."""
        service, failed = self._services[0], ""
        for path in paths:
            try:
                if service.embedded:
                    shutil.rmtree(self.saved(path), ignore_errors=True)
                else:
                    await service.delete(path)
            except BackendError as error:
                failed = str(error)
            else:
                self.states.drop(path)
        if failed:
            self.progress.line(f"      a saved state could not be deleted and is left to its time limit: {failed}")

    def needed(self) -> set[str]:
        """The saved states that are results, or that --resume goes on from: an arm's last step, the warm start's."""
        results = set(self.facts("train").get("samplers", {}).values())
        done = self.chain.completed
        if "train" in done or any(self.record(phase).get("outcome") == "stopped" for phase in done):
            return results
        last = {unit.partition("/")[0]: unit for unit in self.journal.units()}  # units are in the order of their steps
        open_units = [unit for key, unit in last.items() if not key.startswith(tuple(f"{phase}-" for phase in done))]
        records = [self.journal.committed(unit) or {} for unit in (*open_units, *self.journal.units("warm_start/"))]
        return results | {str(record["state"]) for record in records if "state" in record}

    def saved(self, path: str) -> Path:
        """The folder of a state that the embedded server saved (tinker://RUN/KIND/NAME)."""
        return self.directory.joinpath(SERVICE, *path.removeprefix("tinker://").split("/"))

    def settings(self) -> Settings:
        """The spec's own settings, or those that the activation pilot's fallback adopted."""
        adopted = self.record("activation_pilot").get("facts", {}).get("settings")
        if adopted is not None:
            return Settings(**adopted)
        return Settings(self.exp.protocol.rollout.max_turns, self.exp.protocol.advantage.teacher)

    def record(self, phase: str) -> Record:
        """The receipt of a completed phase; {} where it has none."""
        return self.chain.record(phase) if phase in self.chain.completed else {}

    def facts(self, phase: str) -> Record:
        """The facts that a completed phase left."""
        return self.record(phase).get("facts", {})

    def deviation(self, phase: str, kind: str, what: str) -> None:
        """Record once that something departs from the spec as asked for."""
        line = {"phase": phase, "kind": kind, "what": what}
        if line not in read_lines(self.directory / DEVIATIONS):
            append_line(self.directory / DEVIATIONS, line)

    def model_name(self, kind: str) -> str | None:
        """The served model of the user simulator or judge; None where none is served."""
        part = self.exp.protocol.user if kind == "user" else self.exp.protocol.judge
        return part.model if part.kind == "model" else None


def moved_to(began: str, here: str) -> Record:
    """The deviation of a run that goes on at another address: a service may have moved, or its tunnel."""
    return {
        "phase": "run",
        "kind": "another_address",
        "what": f"begun with the service at {began}, the run went on at {here}",
    }


def require_model(backend: "Backend", name: str, role: str) -> None:
    """Raise BackendError (exit 5) unless the service lists `name`."""
    if backend.models and name not in backend.models:
        served = ", ".join(backend.models)
        raise BackendError(
            f"the service at {backend.endpoint} does not serve {name}, the {role} of this spec; it serves {served}. "
            "Set TINKER_BASE_URL to a service that has it."
        )
