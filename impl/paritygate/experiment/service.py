"""Is the service there, does it serve what the spec asks, and does one trajectory go all the way through it?"""

import importlib.metadata

from paritygate.experiment.batch import make_batch
from paritygate.experiment.collect import Collector
from paritygate.experiment.journal import Record
from paritygate.experiment.lane import refuse_nonfinite
from paritygate.experiment.rollouts import Group, flat
from paritygate.experiment.state import Decided, State, require_model
from paritygate.experiment.trajectories import write_trajectories
from paritygate.spec.experiment import Arm

PHASE = "service_preflight"


async def service_preflight(state: State) -> Decided:
    """Names and versions as reported, then the single-trajectory probe, timed; raises BackendError (exit 5)."""
    backend = await state.backend()
    wanted = {"base model": state.exp.base_model, "user simulator": state.model_name("user")}
    wanted["judge"] = state.model_name("judge")
    for role, name in wanted.items():
        if name is not None:
            require_model(backend, name, role)
    facts: Record = {
        "endpoint": "embedded" if backend.embedded else backend.endpoint,
        "models": list(backend.models),
        "context_lengths": dict(backend.context_lengths),
        "asked_for": wanted,
        "sdk": importlib.metadata.version("tinker"),
    }
    collector = await Collector.of(state, state.settings())
    facts["prompt_tokens"] = len(collector.opening_tokens(collector.train_tasks()[0]))
    files = [await _probe(state, arm, collector, facts) for arm in state.exp.arms]
    what = "the embedded server" if backend.embedded else backend.endpoint
    return Decided(
        f"{what} serves {state.exp.base_model} (tinker SDK {facts['sdk']}); the prompt before an episode takes "
        f"{facts['prompt_tokens']:,} of {state.exp.max_seq_len:,} tokens",
        f"each of {len(state.exp.arms)} throw-away clients sampled, judged, scored and trained on one trajectory",
        facts,
        files,
    )


async def _probe(state: State, arm: Arm, collector: Collector, facts: Record) -> str:
    """One episode, judgement, teacher scores, forward_backward and optim_step; the client is thrown away."""
    measure = state.timings.measure
    state.progress.update(f"probing with {arm.name}")
    with measure(PHASE, what="client", arm=arm.name):
        trainer = await (await state.backend()).training(state.exp.base_model, rank=state.exp.lora_rank, seed=arm.seed)
        sampler = await trainer.snapshot(f"probe-{arm.name}")
    task = collector.train_tasks()[0]
    with measure(PHASE, what="episode", arm=arm.name):
        teacher = sampler if arm.needs_teacher else None
        groups = await collector.groups(PHASE, 0, [task], sampler, teacher, rollouts=1)
    with measure(PHASE, what="forward_backward", arm=arm.name):
        batch = await make_batch(state.exp, arm, groups, sampler, sampler)
        passed = await trainer.forward_backward(batch.datums, batch.loss_fn)
    refuse_nonfinite(f"{PHASE}, arm {arm.name}: stopped, since", batch, passed)
    with measure(PHASE, what="optim_step", arm=arm.name):
        adam = state.exp.adam
        await trainer.optim_step(arm.lr, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps)
    facts[f"probe_{arm.name}"] = _seen(groups, trainer.base_model)
    return write_trajectories(state.directory, f"{PHASE}-{arm.name}", flat(groups), batch.advantages)


def _seen(groups: list[Group], base_model: str) -> Record:
    [rollout] = flat(groups)
    return {
        "base_model": base_model,
        "tokens": len(rollout.trajectory.tokens),
        "turns": rollout.trajectory.turns,
        "ended_by": rollout.trajectory.ended_by,
        "judged": rollout.judged.judgement is not None,
    }
