"""isolation: requests in order, and nobody in anybody's way."""

from collections.abc import Callable

import numpy as np

from paritygate.service.checks.optimiser import gradient_norm
from paritygate.service.checks.sampling import forward_logprobs, nats
from paritygate.service.client import Array, Datum, Sampler, Session, read_sampled
from paritygate.service.connection import Refusal
from paritygate.service.lab import Lab, Moved
from paritygate.service.outcome import Measured, Undecided


def _data(lab: Lab, salt: int = 7) -> list[Datum]:
    return lab.weighted(lab.data(2, 16, salt=salt))


def pipelined(lab: Lab) -> Measured:
    """gradient, step, gradient, step sent without waiting is the same sent one after another."""
    slow, quick = lab.weighted(lab.data(24, 48, salt=70, least=2), lab.weight / 12), _data(lab)
    journal = lab.connection.journal
    adam = ", ".join(f"{k}={v:.9g}" for k, v in lab.adam.items())
    with lab.session() as session:

        def train(*, waiting: bool) -> Moved:
            trainer = session.restore(lab.warmed())
            calls: list[Callable[[], object]] = []
            for data in (slow, quick):
                calls.append(trainer.start_pass("forward_backward", data, "cross_entropy", None))
                calls.append(trainer.start_step(**lab.adam))
                end = ".result()" if waiting else ""
                code = ", ".join(datum.code() for datum in data)
                journal.add(f"{trainer.name}.forward_backward([{code}], 'cross_entropy'){end}")
                journal.add(f"{trainer.name}.optim_step(types.AdamParams({adam})){end}")
                if waiting:
                    _finish(lab, calls)
            _finish(lab, calls)
            return lab.change(trainer)

        awaited, sent = train(waiting=True), train(waiting=False)
        wrong = session.restore(lab.warmed())
        wrong.forward_backward(slow)
        wrong.forward_backward(quick)
        wrong.step(**lab.adam)
        gap, seen = lab.distance(sent, awaited), lab.distance(lab.change(wrong), awaited)
    because = f"two gradients and two steps sent without waiting end {gap:.3g} (relative) from the awaited ones"
    return Measured(gap, because, seen, 2 * lab.step_noise(awaited))


def _finish(lab: Lab, calls: list[Callable[[], object]]) -> None:
    for call in calls:
        lab.connection.call("a pipelined call", call)
    calls.clear()


def two_tenants(lab: Lab) -> Measured:
    """The step of one client, alone and with another client's gradients and steps in between."""
    mine, theirs = _data(lab), _data(lab, salt=71)
    adam = _clipped_adam(lab)
    others = {**lab.adam, "learning_rate": lab.adam["learning_rate"] / 3, "beta1": 0.9, "grad_clip_norm": 0.0}
    with lab.session() as session, lab.session() as elsewhere:
        alone = lab.arm(session, lambda t: t.forward_backward(mine), **adam)
        trainer, other = session.restore(lab.warmed()), elsewhere.create(lab.settings.rank, seed=31)
        other.forward_backward(theirs)
        trainer.forward_backward(mine)
        other.forward_backward(theirs)
        other.step(**others)
        other.forward_backward(theirs)
        trainer.step(**adam)
        among = lab.change(trainer)
        added = lab.arm(session, lambda t: (t.forward_backward(mine), t.forward_backward(theirs)), **adam)
        gap, seen = lab.distance(among, alone), lab.distance(added, alone)
    because = f"with another client's gradients and steps in between the step is {gap:.3g} (relative) off"
    return Measured(gap, because, seen, lab.step_noise(alone))


def _clipped_adam(lab: Lab) -> dict[str, float]:
    """A step that clips at 3/4 of the gradient's norm, where that is known; else the calibrated one.

    Half of the gradient would not be clipped, and more of it is clipped to less.
    """
    try:
        norm = 0.0 if lab.mixed else gradient_norm(lab)
    except (Undecided, Refusal):
        norm = 0.0
    return {**lab.adam, "grad_clip_norm": 0.75 * norm, "eps": 0.75 * lab.adam["eps"]} if norm else dict(lab.adam)


def recreated(lab: Lab) -> Measured:
    """After an adapter is deleted, a gradient waiting, a new one is the base model, has no gradient, and learns."""
    with lab.session() as session:
        base = lab.change(session.create(lab.settings.rank, seed=12))
    first = Session(lab.connection)
    trainer = first.create(lab.settings.rank, seed=32)
    trainer.forward_backward(_data(lab))
    trainer.step(**lab.adam)
    trainer.forward_backward(_data(lab))
    first.close()
    with lab.session() as session:
        trainer = session.create(lab.settings.rank, seed=33)
        trainer.forward_backward(lab.weighted(lab.data(1, 4, salt=14), 0.0))
        trainer.step(**lab.adam)
        fresh = lab.change(trainer)
        trainer.forward_backward(_data(lab))
        trainer.step(**lab.adam)
        learned = lab.change(trainer)
    stale = float(np.abs(fresh.change - base.change).max())
    moved = float(np.abs(learned.change - fresh.change).max())
    bound = max(0.05, 10 * lab.noise.logprob)
    wrong = (stale > bound) + (moved < bound)
    because = (
        f"after a step on zero weights a new adapter is {stale:.3g} nats from the base model, "
        f"and one step moves it by {moved:.3g}"
    )
    return Measured(float(wrong), because)


def packed_samples(lab: Lab) -> Measured:
    """Scores of two adapters, one after another and at once, are what each adapter's training client gives."""
    prompts = [lab.tokens(20 if lab.small else 40, 72 + index) for index in range(1 if lab.small else 4)]
    with lab.session() as session:
        samplers: list[Sampler] = []
        right: list[list[Array]] = []
        for salt in (73, 74):
            trainer = session.restore(lab.warmed())
            trainer.forward_backward(_data(lab, salt=salt))
            trainer.step(**lab.adam)
            right.append([forward_logprobs(trainer, prompt) for prompt in prompts])
            samplers.append(lab.sampler_of(session, trainer))
        alone = [[sampler.logprobs(prompt)[1 - len(prompt) :] for prompt in prompts] for sampler in samplers]
        options, params = {"include_prompt_logprobs": True}, {"max_tokens": 1, "temperature": 1.0, "seed": 1}
        calls = [[s.start(prompt, 1, options, params) for prompt in prompts] for s in samplers]
        answers = [[read_sampled(lab.connection.call("sample", call)) for call in row] for row in calls]
    together: list[list[Array]] = []
    for row in answers:
        scores = [answer.prompt_logprobs for answer in row]
        if any(score is None for score in scores):
            return Measured(np.inf, "a sample has no prompt logprobs")
        together.append([score[1 - len(prompts[0]) :] for score in scores if score is not None])
    worst, contrast = {"one after another": 0.0, "at once": 0.0}, np.inf
    for want, other, first, second in zip(right, right[::-1], alone, together, strict=True):
        for name, scores in zip(worst, (first, second), strict=True):
            gaps = [float(np.abs(score - w).max()) for score, w in zip(scores, want, strict=True)]
            worst[name] = max(worst[name], *gaps)
        contrast = min(contrast, *(float(np.abs(o - w).max()) for o, w in zip(other, want, strict=True)))
    name = max(worst, key=worst.__getitem__)
    because = f"scores of two adapters {name} are {worst[name]:.3g} nats from their training clients'"
    return Measured(worst[name], because, contrast, nats(lab))


CHECKS = {
    "isolation/pipelined": pipelined,
    "isolation/two_tenants": two_tenants,
    "isolation/recreated": recreated,
    "isolation/packed_samples": packed_samples,
}
