"""One training step of an arm, top to bottom: rollouts, advantages, forward_backward, optim_step, saved state.

Everything is sampled and scored with the weights that the step begins with. Nothing counts before the caller commits
the record that this returns: after a kill the last committed state is loaded and the step is taken again from there.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from paritygate.agent.rollouts import Group, flat
from paritygate.backend import FwdBwd, Sampler
from paritygate.errors import BackendError, GateStopped
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.trajectories import write_trajectories
from paritygate.experiment.step.arm_run import PROCESS, ArmRun
from paritygate.experiment.step.batch import StepBatch, make_batch
from paritygate.experiment.step.collector import Collector
from paritygate.experiment.step.metrics import derived_metrics, logprob_difference, tally
from paritygate.experiment.step.nonfinite import named_datum, refuse_nonfinite


async def training_step(run: ArmRun, tasks: Sequence[int], collector: Collector) -> Record:
    """The next step of `run` on `tasks`, a record to be committed: saved state, trajectories, tally, metrics.

    GateStopped, before the optimiser step, where a loss or advantage is not finite; BackendError after the retries.
    """
    exp, trainer, step = run.state.exp, run.trainer, run.done

    with run.timed("snapshot"):
        sampler = await trainer.snapshot(f"{run.key}-{step}-{PROCESS}")
        run.sampler_path = sampler.path

    with run.timed("rollouts"):  # tasks_per_step groups of rollouts_per_task episodes, judged and scored by the teacher
        teacher = (run.initial_sampler or sampler) if run.arm.needs_teacher else None
        groups = await collector.groups(run.phase, step, tasks, sampler, teacher)

    with run.timed("advantages"):
        batch = await advantages_and_datums(run, groups, sampler)
        name = f"{run.key}-{step:03d}"
        trajectories = write_trajectories(run.state.directory, name, flat(groups), batch.advantages)

    with run.timed("forward_backward"):
        output = await forward_backward(run, batch, sampler)

    with run.timed("optim_step"):  # Adam is passed whole: the service's defaults are not the experiment's
        await trainer.optim_step(run.arm.lr, beta1=exp.adam.beta1, beta2=exp.adam.beta2, eps=exp.adam.eps)

    with run.timed("save"):
        saved = await trainer.save(f"{run.key}-{step + 1}-{PROCESS}")

    metrics = step_metrics(run, groups, batch, output)
    counts = tally(groups, success_wording=exp.protocol.advantage.success_wording)
    return {"state": saved, "trajectories": trajectories, "tally": counts, "metrics": metrics}


async def advantages_and_datums(run: ArmRun, groups: Sequence[Group], sampler: Sampler) -> StepBatch:
    """The arm's advantages of all rollouts, and a datum for each that moves anything."""
    try:
        return await make_batch(run.state.exp, run.arm, groups, sampler, run.initial_sampler or sampler)
    except ValueError as error:
        raise GateStopped(f"{stopped(run)} no advantage can be computed: {error}") from None


async def forward_backward(run: ArmRun, batch: StepBatch, sampler: Sampler) -> FwdBwd:
    """Gradients of the batch; a loss that is not finite stops the run, whoever notices it first."""
    try:
        output = await run.trainer.forward_backward(batch.datums, batch.loss_fn)
    except BackendError as error:
        index = named_datum(error)
        if index is None:
            raise
        scored = tuple(value or 0.0 for value in await sampler.score(batch.datums[index].tokens))[1:]
        with recorded(run):
            refuse_nonfinite(stopped(run), batch.only(index), FwdBwd(float("nan"), (scored,), {}))
            raise GateStopped(f"{stopped(run)} {error}") from None
    with recorded(run):
        refuse_nonfinite(stopped(run), batch, output)
    return output


@contextmanager
def recorded(run: ArmRun) -> Generator[None]:
    """A loss that is not finite stops the run, and is a deviation from the experiment as it was asked for."""
    try:
        yield
    except GateStopped as stop:
        run.state.deviation(run.phase, "not_finite", str(stop))
        raise


def stopped(run: ArmRun) -> str:
    """How the sentence of a stop begins."""
    return f"{run.phase}, arm {run.arm.name}, step {run.done}: stopped before the optimiser step, since"


def step_metrics(run: ArmRun, groups: Sequence[Group], batch: StepBatch, output: FwdBwd) -> Record:
    """One line of metrics.jsonl."""
    rollouts, rule = flat(groups), run.state.exp.protocol.advantage
    return {
        "phase": run.phase,
        "arm": run.arm.name,
        "variant": run.variant,
        "step": run.done,
        "loss": output.loss,
        "datums": len(batch.datums),
        **derived_metrics(groups, batch.advantages, run.trainer.base_model, rule),
        **logprob_difference([rollouts[index] for index in batch.sent], output.logprobs),
        **batch.metrics,
    }
