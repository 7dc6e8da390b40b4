"""isolation: requests in order, and nobody in anybody's way."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from paritygate.service.checks.optimiser import gradient_norm
from paritygate.service.checks.sampling import forward_logprobs, nats
from paritygate.service.checks.state import farthest
from paritygate.service.client import Array, Datum, Sample, Sampler, Session, read_sampled
from paritygate.service.connection import Refusal, recorded
from paritygate.service.lab import Lab, Moved, difference
from paritygate.service.outcome import Measured, Undecided

SLOW = (24, 72, 216)  # sequences of 48 tokens in a gradient that takes long
LONG = (128, 256, 512)  # tokens of a sample that takes long


def _data(lab: Lab, salt: int = 7) -> list[Datum]:
    return lab.weighted(lab.data(2, 16, salt=salt))


def pipelined(lab: Lab) -> Measured:
    """gradient, step, gradient, step sent without waiting is the same sent one after another.

    What a service does as it comes shows nothing: the later ones have to be there before the first is done. Where they
    were not, the first takes longer the next time.
    """
    quick = _data(lab)
    for count in SLOW:
        slow = lab.weighted([lab.datum(48, 70_000 + index) for index in range(count)], 2 * lab.weight / count)
        with lab.session() as session:
            awaited, _ = _two_steps(lab, session, slow, quick, waiting=True)
            sent, met = _two_steps(lab, session, slow, quick, waiting=False)
            noise = 2 * lab.step_noise(awaited)
            if not met and difference(sent, awaited) <= max(0.005, noise):
                continue
            wrong = session.restore(lab.warmed())
            wrong.forward_backward(slow)
            wrong.forward_backward(quick)
            wrong.step(**lab.adam)
            contrast = lab.change(wrong)
            break
    else:
        raise Undecided(
            f"what is sent without waiting does not come together: the gradient of {SLOW[-1]} sequences was there "
            "before the service had the three requests behind it"
        )
    what, right = "the end of two gradients and two steps sent without waiting", "that of awaited ones"
    measured = lab.held_to(sent, awaited, contrast, what, right, "that of one step with both gradients")
    return replace(measured, noise=noise)


def _two_steps(
    lab: Lab, session: Session, slow: list[Datum], quick: list[Datum], *, waiting: bool
) -> tuple[Moved, bool]:
    """Where gradient, step, gradient, step end, and whether the service had all four while it computed the first.

    It had them where the last receipt came in the first three quarters of the time between the first receipt and the
    first result.
    """
    journal, trainer = lab.connection.journal, session.restore(lab.warmed())
    adam, end = ", ".join(f"{k}={v:.9g}" for k, v in lab.adam.items()), ".result()" if waiting else ""
    calls: list[Callable[[], object]] = []
    with recorded("forward_backward", "optim_step") as receipts:
        for data in (slow, quick):
            calls.append(trainer.start_pass("forward_backward", data, "cross_entropy", None))
            calls.append(trainer.start_step(**lab.adam))
            code = ", ".join(datum.code() for datum in data)
            journal.add(f"{trainer.name}.forward_backward([{code}], 'cross_entropy'){end}")
            journal.add(f"{trainer.name}.optim_step(types.AdamParams({adam})){end}")
            if waiting:
                _finish(lab, calls)
        first = calls[:1]
        _finish(lab, first)
        result = time.monotonic()
        _finish(lab, calls[1:])
    times = [one.answered for one in receipts]
    steps = [one.answered for one in receipts if one.url.endswith("optim_step")]
    met = len(steps) > 1 and max(times) < times[0] + 0.75 * (result - times[0])
    return lab.change(trainer), met


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
        what, contrast = "the step with another client's gradients and steps in between", "that with its gradient added"
        return lab.held_to(among, alone, added, what, "that without", contrast)


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
    """Scores and samples of two adapters, one after another and at once, are what their training clients give.

    What is computed in one pass shows only where both sample while prompts are scored by both. Where they did not, the
    samples are longer the next time.
    """
    prompts = [lab.tokens(20 if lab.small else 40, 72 + index) for index in range(1 if lab.small else 4)]
    bound = max(0.05, nats(lab))
    with lab.session() as session:
        trainers = [session.restore(lab.warmed()) for _ in range(2)]
        for salt, trainer in zip((73, 74), trainers, strict=True):
            trainer.forward_backward(_data(lab, salt=salt))
            trainer.step(**lab.adam)
        samplers = [lab.sampler_of(session, trainer) for trainer in trainers]
        right = [forward_logprobs(trainer, prompt) for trainer in trainers for prompt in prompts]
        alone = [sampler.logprobs(prompt)[1 - len(prompt) :] for sampler in samplers for prompt in prompts]
        each = {"scores one after another": farthest(alone, right)}
        for length in LONG:
            scores, samples, met = _at_once(lab, samplers, prompts, length)
            if any(values is None for values in (*scores, *(sample.logprobs for sample in samples))):
                return Measured(np.inf, "an answer has no logprobs")
            after_first = 1 - len(prompts[0])  # from the end: a service may leave the leading None out
            each["scores at once"] = farthest([p[after_first:] for p in scores if p is not None], right)
            trained = [
                forward_logprobs(trainer, (*prompts[0], *sample.tokens))[-len(sample.tokens) :]
                for trainer, sample in zip(trainers, samples, strict=True)
            ]
            each["samples at once"] = farthest([s.logprobs for s in samples if s.logprobs is not None], trained)
            if met or max(each.values()) > bound:
                break
        else:
            raise Undecided(f"two adapters do not sample {LONG[-1]} tokens and score at once here: something waits")
    name = max(each, key=each.__getitem__)
    because = f"{name} of two adapters are {each[name]:.3g} nats from their training clients'"
    half = len(prompts)
    contrast = min(farthest([a], [b]) for a, b in zip(right[:half], right[half:], strict=True))
    return Measured(each[name], because, contrast, nats(lab))


def _at_once(
    lab: Lab, samplers: list[Sampler], prompts: list[tuple[int, ...]], length: int
) -> tuple[list[Array | None], list[Sample], bool]:
    """Prompt logprobs of each sampler and prompt and a long sample of each sampler, all at once; and whether it was so.

    It was where the service had every request, and every score was there before either sample.
    """
    call, journal = lab.connection.call, lab.connection.journal
    short = {"max_tokens": 1, "temperature": 1.0, "seed": 1}
    long = [{"max_tokens": length, "temperature": 1.0, "seed": 5 + index} for index in range(len(samplers))]
    with recorded("asample") as receipts:
        sampling = [_timed(s.start(prompts[0], 1, {}, params)) for s, params in zip(samplers, long, strict=True)]
        scoring = [s.start(prompt, 1, {"include_prompt_logprobs": True}, short) for s in samplers for prompt in prompts]
        scores = [read_sampled(call("sample", one)).prompt_logprobs for one in scoring]
        scored = time.monotonic()
        samples = [call("sample", lambda one=one: one) for one in sampling]
    for sampler, params in zip(samplers, long, strict=True):
        listed = "[" + ", ".join(str(list(prompt)) for prompt in prompts) + "]"
        settings = ", ".join(f"{name}={value}" for name, value in params.items())
        journal.add(
            f"{sampler.name}.sample(types.ModelInput.from_ints({list(prompts[0])}), 1, "
            f"types.SamplingParams({settings}))  # not awaited: both sample while both score"
        )
        journal.add(f"[{sampler.name}.compute_logprobs(types.ModelInput.from_ints(p)) for p in {listed}]")
    met = len(receipts) >= len(scoring) + len(sampling) and scored < min(when for _, when in samples)
    return scores, [read_sampled(answer).sequences[0] for answer, _ in samples], met


def _timed(call: Callable[[], Any]) -> "Future[tuple[Any, float]]":
    """The result of `call`, waited for from now on, and when it came."""
    future: Future[tuple[Any, float]] = Future()

    def wait() -> None:
        try:
            future.set_result((call(), time.monotonic()))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return future


CHECKS = {
    "isolation/pipelined": pipelined,
    "isolation/two_tenants": two_tenants,
    "isolation/recreated": recreated,
    "isolation/packed_samples": packed_samples,
}
