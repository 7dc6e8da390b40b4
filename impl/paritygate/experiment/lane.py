"""One arm's way through one phase: a fresh client, step after step, each committed whole; resumable at any step.

A step is: snapshot, rollouts, judgements, teacher scores, advantages, one forward_backward, one optim_step, saved
state, commit. A kill before the commit leaves the last committed state as the truth: it is loaded and the step is taken
again from there, so no optimiser step is ever applied twice.
"""

import asyncio
import dataclasses
import math
import re
import secrets
from collections.abc import Callable, Sequence

from paritygate.backend import Datum, FwdBwd, Sampler, Trainer
from paritygate.errors import BackendError, GateStopped
from paritygate.experiment.batch import Batch, make_batch
from paritygate.experiment.collect import Collector
from paritygate.experiment.journal import Record
from paritygate.experiment.metrics import advantage_metrics, episode_metrics, gate_values, logprob_difference, tally
from paritygate.experiment.rollouts import Group, flat
from paritygate.experiment.state import Settings, State
from paritygate.experiment.trajectories import write_trajectories
from paritygate.spec.experiment import Arm

FLOAT32_MAX = 3.4028235e38  # the service sums in float32
NONFINITE = re.compile(r"loss of datum (\d+) is -?(?:nan|inf)", re.IGNORECASE)  # how the embedded server refuses
PROCESS = secrets.token_hex(4)  # in the names of saved states: a killed run's server may still be writing its own


@dataclasses.dataclass(frozen=True)
class Lane:
    """Which arm, in which phase, under which settings; `variant` names a fallback."""

    phase: str
    arm: Arm
    settings: Settings
    variant: str = ""

    @property
    def key(self) -> str:
        """The name that its units, files and saved states carry."""
        return "-".join(filter(None, [self.phase, self.arm.name, self.variant]))

    def unit(self, step: int) -> str:
        """The journal's name of one step."""
        return f"{self.key}/step-{step:03d}"


class LaneRun:
    """An open lane: its trainer stands where the last committed step left it."""

    def __init__(
        self, state: State, lane: Lane, trainer: Trainer, initial: Sampler | None, steps: list[Record]
    ) -> None:
        self.state = state
        self.lane = lane
        self.trainer = trainer
        self.initial = initial
        self.steps = steps
        self._sampled: str | None = None

    @classmethod
    async def open(cls, state: State, lane: Lane) -> "LaneRun":
        """A fresh client (from the warm start where there is one), gone on from the last committed step, if any."""
        steps = [state.journal.committed(unit) or {} for unit in state.journal.units(f"{lane.key}/step-")]
        trainer = await fresh_trainer(state, lane.arm)
        initial = None
        if lane.arm.needs_teacher and lane.settings.teacher == "frozen_initial":
            initial = await trainer.snapshot(f"{lane.key}-initial-{PROCESS}")
        if steps:
            await trainer.load(steps[-1]["state"])
            what = f"{lane.key} went on from its saved state after step {len(steps) - 1} (checkpoint_restore is false)"
            state.deviation(lane.phase, "resumed_from_saved_state", what)
        return cls(state, lane, trainer, initial, steps)

    @property
    def done(self) -> int:
        """Steps committed so far."""
        return len(self.steps)

    async def step(self, tasks: Sequence[int], collector: Collector) -> Record:
        """Take the next step on `tasks`, to be committed; GateStopped before the optimiser step on NaN or infinity."""
        state, lane, step = self.state, self.lane, self.done
        timing = {"arm": lane.arm.name, "variant": lane.variant, "step": step}
        measure = state.timings.measure
        with measure(lane.phase, what="snapshot", **timing):
            sampler = await self.trainer.snapshot(f"{lane.key}-{step}-{PROCESS}")
        with measure(lane.phase, what="rollouts", **timing):
            teacher = (self.initial or sampler) if lane.arm.needs_teacher else None
            groups = await collector.groups(lane.phase, step, tasks, sampler, teacher)
        with measure(lane.phase, what="advantages", **timing):
            batch = await self._batch(step, groups, sampler)
            path = write_trajectories(state.directory, f"{lane.key}-{step:03d}", flat(groups), batch.advantages)
        with measure(lane.phase, what="forward_backward", **timing):
            passed = await self._forward_backward(step, batch, sampler)
        with measure(lane.phase, what="optim_step", **timing):
            adam = state.exp.adam
            await self.trainer.optim_step(lane.arm.lr, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps)
        with measure(lane.phase, what="save", **timing):
            saved = await self.trainer.save(f"{lane.key}-{step + 1}-{PROCESS}")
        metrics = self._metrics(step, tasks, groups, batch, passed)
        self._sampled = sampler.path
        return {"state": saved, "trajectories": path, "tally": tally(groups), "metrics": metrics}

    def commit(self, record: Record) -> Record:
        """The step counts from here on; then delete what that made superfluous: its sampler, the state before it."""
        self.steps.append(self.state.journal.commit(self.lane.unit(self.done), record))
        if self._sampled is not None:
            self.state.forget(self._sampled)
        if len(self.steps) > 1:
            self.state.forget(self.steps[-2]["state"])
        return self.steps[-1]

    async def _batch(self, step: int, groups: Sequence[Group], sampler: Sampler) -> Batch:
        try:
            return await make_batch(self.state.exp, self.lane.arm, groups, sampler, self.initial or sampler)
        except ValueError as error:
            raise GateStopped(f"{self._where(step)} no advantage can be computed: {error}") from None

    async def _forward_backward(self, step: int, batch: Batch, sampler: Sampler) -> FwdBwd:
        """Gradients of the batch; a loss that is not finite stops the run, whoever notices it first."""
        try:
            passed = await self.trainer.forward_backward(batch.datums, batch.loss_fn)
        except BackendError as error:
            named = NONFINITE.search(str(error))
            if named is None:
                raise
            index = int(named.group(1))
            scored = tuple(value or 0.0 for value in await sampler.score(batch.datums[index].tokens))[1:]
            refuse_nonfinite(self._where(step), batch.only(index), FwdBwd(math.nan, (scored,), {}))
            raise GateStopped(f"{self._where(step)} {error}") from None
        refuse_nonfinite(self._where(step), batch, passed)
        return passed

    def _where(self, step: int) -> str:
        return f"{self.lane.phase}, arm {self.lane.arm.name}, step {step}: stopped before the optimiser step, since"

    def _metrics(
        self, step: int, tasks: Sequence[int], groups: Sequence[Group], batch: Batch, passed: FwdBwd
    ) -> Record:
        rollouts = flat(groups)
        counts = tally(groups)
        return {
            "phase": self.lane.phase,
            "arm": self.lane.arm.name,
            "variant": self.lane.variant,
            "step": step,
            "tasks": list(tasks),
            "loss": passed.loss,
            "datums": len(batch.datums),
            "groups_with_mixed_composite": counts["groups_with_variance"],
            "groups_with_mixed_reward": counts["groups_with_mixed_reward"],
            **gate_values(counts, self.trainer.base_model),
            **{name: counts[name] for name in TEACHER_COUNTS if name in counts},
            **episode_metrics(rollouts),
            **advantage_metrics(rollouts, batch.advantages, self.state.exp.protocol.advantage.clip),
            **logprob_difference([rollouts[index] for index in batch.sent], passed.logprobs),
            **batch.facts,
        }


TEACHER_COUNTS = ("teacher_with_sibling", "teacher_shortened", "teacher_told_unsuccessful")


async def advance(
    runs: Sequence[LaneRun],
    steps: int,
    collector: Collector,
    after: Callable[[LaneRun, Record], None] = lambda run, record: None,
) -> None:
    """Take all lanes to `steps` steps, side by side and in step: each step is committed in the order of the arms.

    `after` sees every committed step. The first lane's failure is raised once all lanes have ended that step.
    """
    per_step = collector.exp.protocol.rollout.tasks_per_step
    tasks = collector.train_tasks()
    for step in range(steps):
        due = [run for run in runs if run.done == step]
        chosen = [tasks[place % len(tasks)] for place in range(step * per_step, (step + 1) * per_step)]
        collector.state.progress.update(f"step {step + 1} of {steps}")
        taken = await asyncio.gather(*(run.step(chosen, collector) for run in due), return_exceptions=True)
        for run, record in zip(due, taken, strict=True):
            if isinstance(record, BaseException):
                raise record
            after(run, run.commit(record))


async def fresh_trainer(state: State, arm: Arm) -> Trainer:
    """A new client with the arm's seed, at the warm-started weights where the spec has a warm start; Adam is fresh."""
    backend = await state.backend(state.exp.arms.index(arm))
    warm = state.facts("warm_start").get("state")
    if warm is not None:
        return await backend.restored(warm, optimizer=False)
    return await backend.training(state.exp.base_model, rank=state.exp.lora_rank, seed=arm.seed)


def refuse_nonfinite(where: str, batch: Batch, passed: FwdBwd) -> None:
    """Raise GateStopped, naming trajectory, position and token, unless the loss and every term of it is finite."""
    for datum, label, row in zip(batch.datums, batch.labels, passed.logprobs, strict=False):
        for t, logprob in enumerate(row):
            term = loss_term(datum, t, logprob)
            if not abs(term) <= FLOAT32_MAX:
                raise GateStopped(
                    f"{where} the loss term is {term:g} (logprob {logprob:g}) in the trajectory of {label} at position "
                    f"{t + 1}, token {datum.tokens[t + 1]}."
                )
    if not math.isfinite(passed.loss):
        raise GateStopped(
            f"{where} the loss of {', '.join(batch.labels)} is {passed.loss}, though its terms are finite."
        )


def loss_term(datum: Datum, t: int, logprob: float) -> float:
    """What target `t` adds to the loss (0 without a weight, whatever stands there); its logprob for cross-entropy."""
    if "advantages" in datum.inputs:
        advantage, sampled = datum.inputs["advantages"][t], datum.inputs["logprobs"][t]
        assert not isinstance(advantage, list)
        assert not isinstance(sampled, list)
        if advantage == 0:
            return 0.0
        return -math.exp(min(logprob - sampled, 700.0)) * advantage
    weights = datum.inputs["weights"][t]
    read = any(weights) if isinstance(weights, list) else bool(weights)
    return logprob if read else 0.0
