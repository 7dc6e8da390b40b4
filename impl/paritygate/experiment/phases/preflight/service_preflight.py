"""Is the service there, does it serve what the spec asks, and does one trajectory go all the way through it?"""

import importlib.metadata
from collections.abc import Mapping

from paritygate.agent.judge import Judged
from paritygate.agent.rollouts import flat
from paritygate.backend import Trainer
from paritygate.errors import BackendError
from paritygate.experiment.correctness.parity import show_parity_of_a_resumed_run
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided
from paritygate.experiment.run.state import State, require_model
from paritygate.experiment.run.tokenizers import tokenizer_digest
from paritygate.experiment.run.trajectories import write_trajectories
from paritygate.experiment.step.batch import make_batch
from paritygate.experiment.step.collector import Collector
from paritygate.experiment.step.nonfinite import refuse_nonfinite
from paritygate.service.checks.wire import same_model
from paritygate.spec.experiment import Arm

PHASE = "service_preflight"
SHOWN = 300  # characters of an answer's end


async def service_preflight(state: State) -> Decided:
    """Names and versions as reported, then the single-trajectory probe, timed; raises BackendError (exit 5)."""
    shown_again = await show_parity_of_a_resumed_run(state)
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
        "parity_shown_again": shown_again,
    }
    collector = await Collector.of(state, state.settings())
    facts["tokenizers"] = {name: tokenizer_digest(tokenizer) for name, tokenizer in collector.tokenizers().items()}
    facts["prompt_tokens"] = len(collector.opening_tokens(collector.train_tasks()[0]))
    if collector.longest_trained < state.exp.max_seq_len:
        what = (
            f"{state.exp.base_model} has a context of {collector.longest_evaluated:,} tokens at this service: training "
            f"ends an episode at {collector.longest_trained:,}, not at max_seq_len, {state.exp.max_seq_len:,}"
        )
        state.deviation(PHASE, "short_context", what)
    path = await _probe(state, collector, facts)
    what = "the embedded server" if backend.embedded else backend.endpoint
    return Decided(
        f"{what} serves {state.exp.base_model} (tinker SDK {facts['sdk']}); the prompt before an episode takes "
        f"{facts['prompt_tokens']:,} of {state.exp.max_seq_len:,} tokens",
        f"one trajectory was sampled, judged and scored, and each of {len(state.exp.arms)} arms trained on it",
        facts,
        [path],
    )


async def _probe(state: State, collector: Collector, facts: Record) -> str:
    """One episode, one judgement, teacher scores; one forward_backward and optim_step an arm; clients thrown away."""
    measure, adam = state.timings.measure, state.exp.adam
    with measure(PHASE, what="clients"):
        trainers = {arm.name: await new_client(state, arm) for arm in state.exp.arms}
        await _require_made(state, trainers)
        sampler = await trainers[state.exp.arms[0].name].snapshot(PHASE)
    with measure(PHASE, what="episode"):
        state.progress.update("one episode")
        teacher = sampler if any(arm.needs_teacher for arm in state.exp.arms) else None
        groups = await collector.groups(PHASE, 0, collector.train_tasks()[:1], sampler, teacher, rollouts=1)
    [rollout] = flat(groups)
    if rollout.trajectory.fault is not None:
        raise BackendError(f"the probe's episode was spoilt: {rollout.trajectory.fault}.")
    path = write_trajectories(state.directory, PHASE, [rollout])
    if rollout.judged.judgement is None:
        raise BackendError(_no_judgement(state, rollout.judged))
    for arm in state.exp.arms:
        state.progress.update(f"training with {arm.name}")
        with measure(PHASE, what="forward_backward", arm=arm.name):
            batch = await make_batch(state.exp, arm, groups, sampler, sampler)
            passed = await trainers[arm.name].forward_backward(batch.datums, batch.loss_fn)
        refuse_nonfinite(f"{PHASE}, arm {arm.name}: stopped, since", batch, passed)
        with measure(PHASE, what="optim_step", arm=arm.name):
            await trainers[arm.name].optim_step(arm.lr, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps)
    facts["probe"] = {
        "base_model": {name: trainer.base_model for name, trainer in trainers.items()},
        "lora_rank": {name: trainer.rank for name, trainer in trainers.items()},
        "tokens": len(rollout.trajectory.tokens),
        "turns": rollout.trajectory.turns,
        "ended_by": rollout.trajectory.ended_by,
        "judged": True,  # else the probe has failed
        "judge_tries": rollout.judged.tries,
    }
    return path


async def _require_made(state: State, trainers: Mapping[str, Trainer]) -> None:
    """BackendError unless each client is of the spec's model and rank, as reported; an alias is a deviation."""
    models = (await state.backend()).models
    for name, trainer in trainers.items():
        reported = trainer.base_model
        same = same_model(state.exp.base_model, reported, models)
        if same is False:
            raise BackendError(
                f"the service made {name} an adapter of {reported or 'a model without a name'}, asked was "
                f"{state.exp.base_model}."
            )
        if same is None:
            what = f"the service calls {state.exp.base_model} {reported}: names do not tell whether that is one model"
            state.deviation(PHASE, "model_name", what)
        if trainer.rank not in (None, state.exp.lora_rank):
            raise BackendError(
                f"the service made {name} a LoRA of rank {trainer.rank}, asked was {state.exp.lora_rank}."
            )


def _no_judgement(state: State, judged: Judged) -> str:
    """What the judge answered instead of a judgement, shown: a run with it would end without a verdict."""
    shown = "; ".join(
        f"{answer.error} ({answer.stop_reason}, {answer.tokens} tokens): {answer.text[-SHOWN:]!r}"
        for answer in judged.answers
    )
    name = state.model_name("judge")
    return (
        f"the judge {name} gave no judgement of the probe's episode in {judged.tries} tries: {shown}. Its answers lie "
        f"in trajectories/{PHASE}.jsonl; give it more tokens (protocol.judge) or another reasoning effort."
    )


async def new_client(state: State, arm: Arm) -> Trainer:
    """A client as the service makes it for this arm, before any warm start."""
    backend = await state.backend()
    return await backend.training(state.exp.base_model, rank=state.exp.lora_rank, seed=arm.seed)
