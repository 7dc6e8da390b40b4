"""What every phase reads: the spec, the run directory, the data, the service; nothing here decides anything."""

import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from paritygate.errors import BackendError, GateStopped
from paritygate.experiment.journal import Journal, Record, Timings, append_line, drop_torn_tail, read_lines
from paritygate.experiment.progress import Progress
from paritygate.receipts import PhaseChain
from paritygate.spec.experiment import Experiment

if TYPE_CHECKING:
    from paritygate.backend import Backend, Sampler

TIMINGS = "timings.jsonl"
DEVIATIONS = "deviations.jsonl"


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run was asked for; none of it may change a result."""

    root: Path
    device: str = "cpu"
    tau_bench: Path | None = None
    trust_receipt: bool = False
    environment: str = "own"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a fallback of the activation pilot may change, for both arms."""

    max_turns: int
    teacher: str


@dataclasses.dataclass(frozen=True)
class Decided:
    """What a phase leaves: one sentence of what was decided, one of why, the facts, and the files they rest on."""

    what: str
    why: str
    facts: Record
    files: Sequence[str] = ()


class PhaseStopped(GateStopped):
    """A gate stopped the run; `decided` is what its receipt says."""

    def __init__(self, decided: Decided) -> None:
        super().__init__(decided.what)
        self.decided = decided


class State:
    """One open run. The service is connected on first use and closed with `resources`."""

    def __init__(
        self, exp: Experiment, directory: Path, options: Options, progress: Progress, resources: AsyncExitStack
    ) -> None:
        self.exp = exp
        self.directory = directory
        self.options = options
        self.progress = progress
        self.resources = resources
        for name in (TIMINGS, DEVIATIONS):
            drop_torn_tail(directory / name)
        self.journal = Journal(directory)
        self.timings = Timings(directory / TIMINGS)
        self.chain = PhaseChain(directory)
        self._backend: Backend | None = None
        self._policy: Sampler | None = None

    async def backend(self) -> "Backend":
        """The service: TINKER_BASE_URL where it is set, else the embedded server, its state in the run directory."""
        if self._backend is None:
            from paritygate.backend import connect

            self._backend = await self.resources.enter_async_context(
                connect(
                    embedded_model=self.exp.protocol.service.embedded_model,
                    state_dir=self.directory / "service",
                )
            )
            where = "the embedded server" if self._backend.embedded else "the service"
            self.progress.line(f"using {where} at {self._backend.endpoint}")
        return self._backend

    async def close_service(self) -> None:
        """Leave the service; the embedded server ends, and with it everything that writes into the run directory."""
        self._backend = self._policy = None
        await self.resources.aclose()

    async def policy(self) -> "Sampler":
        """A sampler of the untuned base model: where its tokenizer comes from."""
        if self._policy is None:
            backend = await self.backend()
            require_model(backend, self.exp.base_model, "base model")
            self._policy = await backend.sampling(base_model=self.exp.base_model)
        return self._policy

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


def require_model(backend: "Backend", name: str, role: str) -> None:
    """Raise BackendError (exit 5) unless the service lists `name`."""
    if backend.models and name not in backend.models:
        served = ", ".join(backend.models)
        raise BackendError(
            f"the service at {backend.endpoint} does not serve {name}, the {role} of this spec; it serves {served}. "
            "Set TINKER_BASE_URL to a service that has it."
        )
