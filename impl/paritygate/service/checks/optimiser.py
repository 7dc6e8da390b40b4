"""optimiser: AdamW with bias corrections, decoupled decay, clipping of the global norm, and nothing unasked."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paritygate.service.checks.gradient import EPS_LIMIT, homogeneity
from paritygate.service.client import Datum, Session, Trainer
from paritygate.service.connection import Broken, Refusal
from paritygate.service.lab import Lab, Moved, difference, scale_of
from paritygate.service.outcome import CONTRAST, Measured, Undecided, worst

BETAS = (0.5, 0.9)
SDK_BETAS = (0.9, 0.95)
OTHER_BETAS = (0.5, 0.6)
# Gradients, in units of the first: a larger one against it, so that beta1 decides much; a smaller one, after which the
# second moment falls; where betas are near 1 six of them, for it falls slowly: .95 and .999 are 1% apart after one.
OPPOSED, FALLING, SLOWLY = (1.0, -2.0), (1.0, 0.3), (3.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
NO_STEP = 1e-12  # a learning rate that moves no weight and fills the moments


def moments(beta1: float, beta2: float, factors: Sequence[float]) -> tuple[float, float]:
    """Bias-corrected moments after gradients that are `factors` times g, in units of g and g^2."""
    m = v = 0.0
    for k in factors:
        m, v = beta1 * m + (1 - beta1) * k, beta2 * v + (1 - beta2) * k * k
    return m / (1 - beta1 ** len(factors)), v / (1 - beta2 ** len(factors))


def _data(lab: Lab) -> list[Datum]:
    return lab.weighted(lab.data(2, 16, salt=7))


def several_gradients(
    lab: Lab, session: Session, betas: tuple[float, float], factors: Sequence[float], **adam: float
) -> Moved:
    """The arm whose last step follows gradients that are `factors` times one, the others at NO_STEP."""
    batches = [[d.with_inputs(weights=k * d.inputs["weights"]) for d in _data(lab)] for k in factors]
    settings = {**lab.adam, "beta1": betas[0], "beta2": betas[1], **adam}

    def send(trainer: Trainer) -> None:
        for batch in batches[:-1]:
            trainer.forward_backward(batch)
            trainer.step(**{**settings, "learning_rate": NO_STEP})
        trainer.forward_backward(batches[-1])

    return lab.arm(session, send, **settings)


def memoryless(
    lab: Lab, session: Session, betas: tuple[float, float], factors: Sequence[float], *, rate: float, eps: float
) -> Moved:
    """The arm of one memoryless step that has to be the same: with rate m / sqrt(v) and eps / sqrt(v)."""
    m, v = moments(*betas, factors)
    data = [d.with_inputs(weights=np.sign(m) * d.inputs["weights"]) for d in _data(lab)]
    return lab.arm(
        session, lambda t: t.forward_backward(data), learning_rate=rate * abs(m) / np.sqrt(v), eps=eps / np.sqrt(v)
    )


def both_betas(lab: Lab) -> Measured:
    """Several gradients k g give one memoryless step with lr m / sqrt(v), for larger later ones and smaller ones."""
    rate, eps = min(2 * lab.adam["learning_rate"], 9.0), lab.adam["eps"]
    betas = (lab.settings.beta1, lab.settings.beta2)
    others = OTHER_BETAS if betas == SDK_BETAS else SDK_BETAS
    each: list[Measured] = []
    for factors in (OPPOSED, SLOWLY if betas[1] >= 0.9 else FALLING):
        with lab.session() as session:
            got = several_gradients(lab, session, betas, factors, learning_rate=rate)
            want = memoryless(lab, session, betas, factors, rate=rate, eps=eps)
            wrong = memoryless(lab, session, others, factors, rate=rate, eps=eps)
            what = f"betas {betas}, gradients {factors}: the step"
            each.append(lab.held_to(got, want, wrong, what, "Adam's", f"that of betas {others}"))
    if not lab.mixed:
        with contextlib.suppress(Refusal):  # a bound on weight_decay
            each.append(_own_parameters(lab))
    telling = [m for m in each if m.contrast is not None and m.contrast >= CONTRAST * max(m.noise, 0.005)]
    return worst(telling or each[:1])


def _own_parameters(lab: Lab) -> Measured:
    """Each step has its own parameters: a memoryless one after one with betas, another eps, a decay and a clip.

    What was first is not kept, as where an optimizer is made at the first step. With betas of 0 nothing depends on how
    bias corrections are counted.
    """
    rate, data, others = lab.adam["learning_rate"], _data(lab), lab.weighted(lab.data(2, 16, salt=8))
    first = {"beta1": SDK_BETAS[0], "beta2": SDK_BETAS[1], "eps": min(16 * lab.adam["eps"], EPS_LIMIT)}

    def arm(session: Session, **adam: float) -> Moved:
        trainer = session.restore(lab.warmed())
        trainer.forward_backward(others)
        trainer.step(**first, learning_rate=NO_STEP, weight_decay=0.5 / rate, grad_clip_norm=1e-6)
        trainer.forward_backward(data)
        trainer.step(**{**lab.adam, **adam})
        return lab.change(trainer)

    with lab.session() as session:
        got, want, wrong = arm(session), lab.arm(session, lambda t: t.forward_backward(data)), arm(session, **first)
        what = "after a step with other parameters a memoryless step"
        return lab.held_to(
            got, want, wrong, what, "that without one before it", "that with the betas and eps of the first"
        )


def learning_rate(lab: Lab) -> Measured:
    """Twice a small learning rate is twice the step, up to curvature."""
    data, rate = _data(lab), lab.adam["learning_rate"] / 8
    with lab.session() as session:
        one = lab.arm(session, lambda t: t.forward_backward(data), learning_rate=rate)
        two = lab.arm(session, lambda t: t.forward_backward(data), learning_rate=2 * rate)
        lab.distance(two, one)
    _, factor = scale_of(two.change, one.change)
    because = f"twice the learning rate is {factor:.4g} times the step; 2 is right, 1 no difference"
    return Measured(abs(factor / 2 - 1), because, 0.5, lab.step_noise(one) / 4)


def _decayed(lab: Lab, session: Session, *products: float) -> Moved:
    """Steps without a gradient whose lr * weight_decay are `products`."""
    trainer = session.restore(lab.warmed())
    weightless = lab.weighted(lab.data(1, 4, salt=14), 0.0)
    rate = min(lab.adam["learning_rate"], 0.1)
    for product in products:
        trainer.forward_backward(weightless)
        trainer.step(**{**lab.adam, "learning_rate": rate, "weight_decay": product / rate})
    return lab.change(trainer)


def decay(lab: Lab) -> Measured:
    """lr * weight_decay = 1 without a gradient returns to the base model; a step does not decay with the weights."""
    with lab.session() as session:
        got = _decayed(lab, session, 1.0)
        base = lab.change(session.create(lab.settings.rank, seed=12))
        gap = lab.distance(got, base)
    because = (
        f"lr * weight_decay = 1 without a gradient leaves the adapter with {gap:.3g} of its effect on the logprobs; "
        "0 is right, 1 is no decay"
    )
    each = [Measured(gap, because, 1.0, lab.step_noise(base))]
    with contextlib.suppress(Refusal):  # a bound on weight_decay
        each.append(_decay_before_the_step(lab))
    return worst(each)


def _decay_before_the_step(lab: Lab) -> Measured:
    """Half of the weights, then a step: the decay in the step's call, or in one before it. Both use one gradient."""
    data, weightless = _data(lab), lab.weighted(lab.data(1, 4, salt=14), 0.0)
    rate, adam = lab.adam["learning_rate"], {**lab.adam, "beta1": BETAS[0], "beta2": BETAS[1]}
    tiny = 1e-5 * rate

    def half(session: Session, first: float, second: float, rate: float) -> Moved:
        trainer = session.restore(lab.warmed())
        trainer.forward_backward(data)
        trainer.step(**{**adam, "learning_rate": tiny, "weight_decay": first / tiny})
        trainer.forward_backward(weightless)
        trainer.step(**{**adam, "learning_rate": rate, "weight_decay": second / rate})
        return lab.change(trainer)

    with lab.session() as session:
        got, want, wrong = (half(session, *how) for how in ((0.0, 0.5, rate), (0.5, 0.0, rate), (0.5, 0.0, rate / 2)))
        what = "a step with lr * weight_decay = 0.5"
        return lab.held_to(got, want, wrong, what, "half of the weights and then the step", "half of the step, too")


def decay_twice(lab: Lab) -> Measured:
    """lr * weight_decay = 0.5 twice is 0.75 once: the decay multiplies, and is not part of the gradient."""
    with lab.session() as session:
        got, want, wrong = (_decayed(lab, session, *products) for products in ((0.5, 0.5), (0.75,), (0.5,)))
        gap, seen = lab.distance(got, want), lab.distance(wrong, want)
        base = lab.change(session.create(lab.settings.rank, seed=12))
    twice, once, half = (difference(moved, base) for moved in (got, want, wrong))
    because = (
        f"lr * weight_decay = 0.5 twice leaves the adapter with {twice:.3g} of its effect on the logprobs, 0.75 once "
        f"with {once:.3g}, which is to be the same, and 0.5 once with {half:.3g}: the first two are {gap:.3g} "
        "(relative) apart"
    )
    return Measured(gap, because, seen, lab.step_noise(want))


def decay_all(lab: Lab) -> Measured:
    """A and B both decay: each halved once more, what the adapter adds to the model is a quarter."""
    with lab.session() as session:
        base = lab.change(session.create(lab.settings.rank, seed=12)).change
        once, twice = (_decayed(lab, session, product).change - base for product in (0.8, 0.9))
    _, factor = scale_of(twice, once)
    because = (
        f"lr * weight_decay = 0.9 leaves {factor:.4g} times the effect on the logprobs that 0.8 leaves: 0.25 is right, "
        "for A and B are half as large each; 0.5 is one of the two alone, 1 neither"
    )
    noise = 6 * lab.noise.logprob / max(float(np.sqrt(np.mean(once**2))), 1e-30)
    return Measured(abs(4 * factor - 1), because, 1.0, noise)


def both_matrices(lab: Lab) -> Measured:
    """A and B both learn: lr * weight_decay = 1 leaves of each its step alone, and their product is what is seen."""
    data, rate = _data(lab), lab.adam["learning_rate"]
    bound, moved = max(0.01, 10 * lab.noise.logprob), 0.0
    with lab.session() as session:
        base = lab.change(session.create(lab.settings.rank, seed=12)).change
        while True:
            trainer = session.restore(lab.warmed())
            trainer.forward_backward(data)
            try:
                trainer.step(**{**lab.adam, "learning_rate": rate, "weight_decay": 1 / rate})
            except Refusal as error:
                raise Undecided(f"a weight_decay of {1 / rate:.3g} is not taken: {error}") from None
            moved = float(np.abs(lab.change(trainer).change - base).max())
            if moved > bound or rate >= 9.0:
                break
            rate = min(8 * rate, 9.0)
    because = (
        f"a step with learning rate {rate:.3g} from weights that have decayed to nothing moves the base model by "
        f"{moved:.3g} nats: without a gradient of A or of B it would by 0"
    )
    return Measured(float(not moved > bound), because)


def clip_off(lab: Lab) -> Measured:
    """Without grad_clip_norm nothing is clipped: 200 times the gradient with 200 times eps is the same step.

    The weights nearly cancel, so that neither a datum's nor a call's reach 1: a division by their sum, which would look
    like clipping, has no part in it.
    """
    if lab.mixed:
        raise Undecided("the service takes only a tiny eps, at which Adam does not see the size of a gradient")
    data, eps = lab.data(2, 16, salt=7), lab.adam["eps"]
    unit = min(1.0, EPS_LIMIT / (200 * eps))  # eps ends at 1: where the calibrated one is large, begin lower
    weights = [unit * np.resize([1.0, -0.98], len(d.tokens)) for d in data]
    measured = homogeneity(lab, data, weights, (200.0,), unit)
    return replace(measured, because=f"without grad_clip_norm {measured.because}")


def clip(lab: Lab) -> Measured:
    """Clipping at c is scaling by c / |g|: one norm over all parameters, binding at 0.1 |g| and not at 1.01 |g|."""
    if lab.mixed:
        raise Undecided("the service takes only a tiny eps, at which Adam does not see clipping")
    data, eps = _data(lab), lab.adam["eps"]

    halves = [d.with_inputs(weights=d.inputs["weights"] / 2) for d in data]

    def arm(calls: Sequence[Sequence[Datum]] = (data,), **adam: float) -> Moved:
        with lab.session() as session:  # one each: a service holds a few adapters only
            return lab.arm(session, lambda t: [t.forward_backward(call) for call in calls], **adam)

    plain = arm(grad_clip_norm=0.0)
    try:
        norm = gradient_norm(lab)
    except Undecided as error:
        want = arm(eps=10 * eps)
        return Measured(lab.distance(plain, want), f"{error}", None, lab.step_noise(want))
    loose = lab.distance(arm(grad_clip_norm=1.01 * norm), plain)
    tight, want = arm(grad_clip_norm=0.1 * norm), arm(eps=10 * eps)
    bound, seen = lab.distance(tight, want), lab.distance(plain, want)
    summed = lab.distance(arm((halves, halves), grad_clip_norm=0.1 * norm), want)
    because = (
        f"the gradient's norm is {norm:.4g}: clipping at 1.01 of it moves the step by {loose:.3g}, at 0.1 of it the "
        f"step is {bound:.3g} (relative) from that with a tenth of the gradient, and {summed:.3g} where two calls had "
        "half of it each"
    )
    return Measured(max(loose, bound, summed), because, seen, lab.step_noise(want))


def gradient_norm(lab: Lab) -> float:
    """|g| in the service: c / f where clipping at c has the step of (f g, eps), which is that of (g, eps / f)."""
    return lab.connection.journal.cached("norm", lambda: _solve_norm(lab), record=False)


def _solve_norm(lab: Lab) -> float:
    data, eps = _data(lab), lab.adam["eps"]

    def arm(**adam: float) -> Moved:
        with lab.session() as session:
            return lab.arm(session, lambda t: t.forward_backward(data), **adam)

    plain = arm(grad_clip_norm=0.0)
    c, share = 0.1, 1.0
    for _ in range(9):
        clipped = arm(grad_clip_norm=c)
        share = clipped.rms / plain.rms
        if share < 0.8:
            break
        c /= 8
    else:
        raise Undecided(f"clipping at {8 * c:.3g} does not change the step: grad_clip_norm has no effect")
    while share < 0.15 and c < 1e4:
        c *= 4
        clipped = arm(grad_clip_norm=c)
        share = clipped.rms / plain.rms
    low, high = np.log(1e-4), 0.0  # of f
    f = share
    for _ in range(14):
        size = arm(eps=eps / f).rms / plain.rms
        if abs(size / share - 1) < max(2e-4, lab.noise.step / 4):
            break
        low, high = (np.log(f), high) if size < share else (low, np.log(f))
        guess = np.log(f) + np.log(share / size) * 1.3  # the response is nearly proportional where eps dominates
        f = float(np.exp(guess if low < guess < high else (low + high) / 2))
    return c / f


def fall(lab: Lab, data: Sequence[Datum], rate: float, eps: float) -> float:
    """How far a memoryless step lowers the loss of `data`.

    It is half of what a step along the gradient and one against it differ by: even powers of the step cancel.
    """

    def loss(sign: float) -> float:
        signed = [d.with_inputs(weights=sign * d.inputs["weights"]) for d in data]
        with lab.session() as session:
            trainer = session.restore(lab.warmed())
            trainer.forward_backward(signed)
            trainer.step(**{**lab.adam, "learning_rate": rate, "eps": eps})
            logprobs = trainer.forward(data).logprobs
        return -sum(float((d.inputs["weights"] * p).sum()) for d, p in zip(data, logprobs, strict=True))

    return (loss(-1.0) - loss(1.0)) / 2


def absolute(lab: Lab) -> Measured:
    """A small step along the gradient lowers the loss by lr / eps |g|^2: no factor is hidden in the gradient.

    The third power of the step cancels between two sizes.
    """
    if lab.mixed:
        raise Undecided("the service takes only a tiny eps")
    data, norm, eps = _data(lab), gradient_norm(lab), EPS_LIMIT
    rate = min(3.0, 110 * lab.adam["learning_rate"])

    whole, half = (fall(lab, data, size, eps) for size in (rate, rate / 2))
    fallen = (8 * half - whole) / 3
    factor = norm**2 * rate / eps / fallen if fallen > 0 else np.inf
    weights = np.concatenate([d.inputs["weights"] for d in data])
    noise = 12 * lab.noise.logprob * float(np.linalg.norm(weights)) / max(abs(fallen), 1e-30) + 6 * lab.noise.step
    because = (
        f"along a gradient of norm {norm:.4g} a step of {rate / eps:.3g} lowers the loss by {fallen:.4g}: the gradient "
        f"is {factor:.4g} times that of the loss"
    )
    return Measured(abs(factor - 1), because, 0.5, noise)


def consumed_once(lab: Lab) -> Measured:
    """A step uses the gradient up: a second step on zero weights moves nothing."""
    data = _data(lab)
    weightless = lab.weighted(lab.data(1, 4, salt=14), 0.0)
    with lab.session() as session:
        trainer = session.restore(lab.warmed())
        trainer.forward_backward(data)
        trainer.step(**lab.adam)
        once = lab.change(trainer)
        trainer.forward_backward(weightless)
        trainer.step(**lab.adam)
        still = lab.change(trainer)
        trainer.forward_backward(data)
        trainer.step(**lab.adam)
        gap = lab.distance(still, once)
        seen = lab.distance(lab.change(trainer), once)
    because = (
        f"a second step, on zero weights, moves the probes by {gap:.3g} of the first, which is to be 0; with the "
        f"gradient again it would by {seen:.3g}"
    )
    return Measured(gap, because, seen, lab.step_noise(once))


def zero_step(lab: Lab) -> Measured:
    """A step before any gradient is refused, or moves nothing."""
    with lab.session() as session:
        trainer = session.restore(lab.warmed())
        try:
            trainer.step(**lab.adam)
            how = "is taken"
        except (Refusal, Broken) as error:
            if isinstance(error, Broken) and not error.final:
                raise
            how = "is refused"
        still = lab.change(trainer)
    because = f"a step before any gradient {how} and moves the probes by {still.rms:.3g} nats"
    return Measured(still.rms, because, None, 6 * lab.noise.logprob)


CHECKS = {
    "optimiser/betas": both_betas,
    "optimiser/learning_rate": learning_rate,
    "optimiser/decay": decay,
    "optimiser/decay_twice": decay_twice,
    "optimiser/decay_all": decay_all,
    "optimiser/both_matrices": both_matrices,
    "optimiser/clip_off": clip_off,
    "optimiser/clip": clip,
    "gradient/absolute": absolute,
    "optimiser/consumed_once": consumed_once,
    "optimiser/zero_step": zero_step,
}
