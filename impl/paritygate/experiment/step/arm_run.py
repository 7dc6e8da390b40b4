"""One arm's way through one phase: a fresh client, then step after step, each committed whole, resumable."""

import secrets
from contextlib import AbstractContextManager
from typing import Any

from paritygate.backend import Sampler, Trainer
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.options import Settings
from paritygate.experiment.run.state import State
from paritygate.experiment.step.metrics import add_tallies, measured_over
from paritygate.spec.experiment import Arm

PROCESS = secrets.token_hex(4)  # in the names of saved states: a killed run's server may still be writing there


class ArmRun:
    """An arm in a phase, under given settings; its trainer stands where the last committed step left it.

    variant: the name of a fallback, "" without. steps: the records committed so far. initial_sampler: the weights that
    the phase began with, where they teach. sampler_path: what the step under way samples from.
    """

    def __init__(
        self,
        state: State,
        phase: str,
        arm: Arm,
        settings: Settings,
        variant: str,
        trainer: Trainer,
        steps: list[Record],
    ) -> None:
        self.state = state
        self.phase = phase
        self.arm = arm
        self.settings = settings
        self.variant = variant
        self.trainer = trainer
        self.steps = steps
        self.initial_sampler: Sampler | None = None
        self.sampler_path: str | None = None

    @classmethod
    async def open(cls, state: State, phase: str, arm: Arm, settings: Settings, variant: str = "") -> "ArmRun":
        """A fresh client (from the warm start where there is one), gone on from the last committed step, if any."""
        run = cls(state, phase, arm, settings, variant, await fresh_trainer(state, arm), [])
        run.steps += [state.journal.committed(unit) or {} for unit in state.journal.units(f"{run.key}/step-")]
        if arm.needs_teacher and settings.teacher == "frozen_initial":
            run.initial_sampler = await run.trainer.snapshot(f"{run.key}-initial-{PROCESS}")
        if run.steps:
            await run.trainer.load(run.steps[-1]["state"])
            what = f"{run.key} went on from its saved state after step {run.done - 1} (checkpoint_restore is false)"
            state.deviation(phase, "resumed_from_saved_state", what)
        return run

    @property
    def key(self) -> str:
        """The name that its units, files and saved states carry."""
        return "-".join(filter(None, [self.phase, self.arm.name, self.variant]))

    @property
    def done(self) -> int:
        """Steps committed so far, and the index of the next one."""
        return len(self.steps)

    def timed(self, part: str) -> AbstractContextManager[Record]:
        """Times a part of the step under way; timings.jsonl gets the seconds."""
        timings = self.state.timings
        return timings.measure(self.phase, what=part, arm=self.arm.name, variant=self.variant, step=self.done)

    async def commit(self, record: Record) -> Record:
        """The step counts from here on; then delete what that made superfluous: its sampler, the state before it."""
        self.steps.append(self.state.journal.commit(f"{self.key}/step-{self.done:03d}", record))
        paths = [self.sampler_path, *(step["state"] for step in self.steps[-2:-1])]
        await self.state.delete([path for path in paths if path is not None])
        return self.steps[-1]

    def tally(self) -> dict[str, float]:
        """The counts of all committed steps, added."""
        return add_tallies([step["tally"] for step in self.steps])

    def measured(self) -> dict[str, Any]:
        """Every activation metric over all committed steps."""
        return measured_over(self.steps)


async def fresh_trainer(state: State, arm: Arm) -> Trainer:
    """A new client with the arm's seed, at the warm-started weights where the spec has a warm start; Adam is fresh."""
    backend = await state.backend(state.exp.arms.index(arm))
    warm = state.facts("warm_start").get("state")
    if warm is not None:
        return await backend.restored(warm, optimizer=False)
    return await backend.training(state.exp.base_model, rank=state.exp.lora_rank, seed=arm.seed)
