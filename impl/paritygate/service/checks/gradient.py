"""gradient: each loss against cross_entropy with -dL/dlogprob as weights, by equal steps from one state."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from paritygate.service.checks.value import POLICY_LOSSES
from paritygate.service.client import Array, Datum, Session, Trainer
from paritygate.service.connection import Refusal
from paritygate.service.lab import Lab, Moved, difference, f32
from paritygate.service.oracles import CISPO_DEFAULTS, PPO_DEFAULTS
from paritygate.service.outcome import Measured, Undecided

EPS_LIMIT = 1.0  # services bound eps


def learns(lab: Lab) -> Measured:
    """Two Adam steps from a fresh adapter lower the loss that they are taken on."""
    data = lab.weighted(lab.data(3, 24, salt=15), 1.0)
    weights = np.concatenate([d.inputs["weights"] for d in data])
    seen = 8 * lab.noise.logprob * float(np.linalg.norm(weights)) + 1e-5 * float(weights.sum())
    fallen, rate = 0.0, 0.0
    for rate in (1e-3, 1e-2, 1e-1):
        with lab.session() as session:
            trainer = session.create(lab.settings.rank, seed=11)
            before = trainer.forward(data).flat
            for _ in range(2):
                trainer.forward_backward(data)
                trainer.step(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)
            fallen = float(weights @ (trainer.forward(data).flat - before))
        if abs(fallen) > seen:
            break
    because = (
        f"two steps with learning rate {rate:g} lower the loss of {weights.sum():.3g} weights by {fallen:.3g} nats"
    )
    return Measured(0.0 if fallen > seen else 1.0, because)


def cross_entropy(lab: Lab) -> Measured:
    """k times the weights with k times eps is the same step, at every size: the gradient is a sum of weights."""
    data = lab.data(2, 16, salt=7)
    return homogeneity(lab, data, [np.ones(len(d.tokens)) for d in data], (0.5, 8.0))


def cross_entropy_above_one(lab: Lab) -> Measured:
    """The same where the weights sum to more than 1: a division by max(sum of weights, 1) shows only there."""
    data = lab.data(4, 24, salt=8, least=2)
    count = sum(len(d.tokens) for d in data)
    start = 2.0 / count / lab.weight
    top = EPS_LIMIT / lab.adam["eps"] / start
    if not top > 1:
        raise Undecided(f"weights that sum to 2 need an eps of {start * lab.adam['eps']:.3g}, above {EPS_LIMIT:g}")
    ones = [np.ones(len(d.tokens)) for d in data]
    return homogeneity(lab, data, [start * one for one in ones], (min(4.0, top), 1 / start), start)


def cross_entropy_negative(lab: Lab) -> Measured:
    """The same where the weights sum to less than 0, with both signs among them."""
    data = lab.data(2, 16, salt=9)
    weights = [np.resize([-1.0, 0.5, -2.0, 0.7], len(d.tokens)) for d in data]
    return homogeneity(lab, data, weights, (0.5, 8.0))


def homogeneity(
    lab: Lab, data: Sequence[Datum], weights: Sequence[Array], factors: Sequence[float], unit: float = 1.0
) -> Measured:
    """Compare (k w, k eps) with (w, eps) for each k; the contrast is (k w, eps).

    Where (k w, k^2 eps) is the same step eps stands under the root, which optimiser/eps tells, and nothing is said of
    the gradient.
    """
    if lab.mixed:
        raise Undecided("the service takes only a tiny eps, at which Adam does not see the size of a gradient")
    eps = lab.adam["eps"] * unit
    with lab.session() as session:

        def arm(k: float, eps: float) -> Moved:
            return lab.cross_entropy_arm(session, data, [k * lab.weight * w for w in weights], eps=eps)

        base = arm(1.0, eps)
        worst, factor, contrast, got, near = -1.0, 1.0, np.inf, base, np.inf
        for k in factors:
            scaled, unscaled = arm(k, k * eps), arm(1.0, k * eps)
            gap = lab.distance(scaled, base)
            if gap > worst:
                worst, factor, got, near = gap, k, scaled, difference(scaled, unscaled)
            contrast = min(contrast, lab.distance(unscaled, base))
        bound = max(0.005, lab.step_noise(base))
        if worst > bound and factor**2 * eps <= EPS_LIMIT and lab.distance(arm(factor, factor**2 * eps), base) < bound:
            raise Undecided(
                f"{factor:.3g} times the weights is the same step with {factor**2:.3g} times eps, not with "
                f"{factor:.3g} times: eps is added before the root is taken (optimiser/eps), and the size of the "
                "gradient cannot be told"
            )
    because = (
        f"the step of {factor:.3g} times the weights with {factor:.3g} times eps is {worst:.3g} (relative) from that "
        f"of the weights with eps, and {near:.3g} from that of the weights with {factor:.3g} times eps"
    )
    if worst > bound and near <= bound:
        because = f"{because}: the size of the weights has no effect"
    elif worst > bound and not lab.small:
        bounds = (min(1.0, factor) / 10, 10 * max(1.0, factor))
        scaled_weights = [lab.weight * w for w in weights]
        multiple, off = _multiple(lab, data, scaled_weights, got, bounds, eps=factor * eps)
        if abs(multiple / factor - 1) > 0.02:  # a smaller one has the very same step
            because = f"{because}: it is that of {multiple:.3g} times the weights, {off:.2g} off"
    return Measured(worst, because, contrast, lab.step_noise(base))


def policy(lab: Lab, loss: str) -> Measured:
    """A step with the loss, its options given, is the step with its oracle's weights."""
    data, config = lab.policy_data(loss, lab.weight)
    return _against_oracle(lab, loss, data, config, config)


def policy_defaults(lab: Lab, loss: str, defaults: Sequence[Any]) -> Measured:
    """The same without options, for each documented default."""
    data, _ = lab.policy_data(loss, lab.weight)
    alone = len(defaults) == 1  # of several all but one are wrong by right, and need no explanation
    each = [_against_oracle(lab, loss, data, None, config, explain=alone) for config in defaults]
    best = min(range(len(each)), key=lambda i: each[i].figure)
    low, high = defaults[best].values()
    because = f"without options, held to the documented thresholds {low:g} and {high:g}: {each[best].because}"
    return Measured(each[best].figure, because, each[best].contrast, each[best].noise)


def _against_oracle(
    lab: Lab, loss: str, data: Sequence[Datum], config: Any, definition: Any, *, explain: bool = True
) -> Measured:
    weights = [o.weights for o in lab.oracles(loss, data, lab.logprobs(data), definition)]
    return equal_steps(lab, loss, lambda t: t.forward_backward(data, loss, config), data, weights, explain=explain)


def equal_steps(
    lab: Lab,
    what: str,
    gradients: Callable[[Trainer], object],
    data: Sequence[Datum],
    weights: Sequence[Array],
    *,
    explain: bool = True,
) -> Measured:
    """Compare the step after `gradients` with that after cross_entropy with `weights`; the contrast is half of them."""
    with lab.session() as session:
        got = lab.arm(session, gradients)
        want = lab.cross_entropy_arm(session, data, weights)
        half = lab.cross_entropy_arm(session, data, [w / 2 for w in weights])
        right, contrast = "that with its oracle's weights", "that with half of them"
        measured = lab.held_to(got, want, half, f"the step with {what}", right, contrast, 1.5 * lab.noise.logprob)
    if explain and measured.figure > max(0.005, measured.noise) and not (lab.small or lab.mixed):
        multiple, off = _multiple(lab, data, weights, got)
        because = f"{measured.because}; the nearest is {multiple:.3g} times the weights, {off:.2g} off"
        measured = replace(measured, because=because)
    return measured


def _multiple(
    lab: Lab,
    data: Sequence[Datum],
    weights: Sequence[Array],
    got: Moved,
    bounds: tuple[float, float] = (1e-6, 1e3),
    **adam: float,
) -> tuple[float, float]:
    """Which multiple of the weights, within `bounds`, has the step `got`, the least of several, and how far it is."""
    low, high = np.log10(bounds)
    nearest, least = 0.0, np.inf
    for _ in range(10):
        middle = (low + high) / 2
        with lab.session() as session:  # one each: a service holds a few adapters only
            step = lab.cross_entropy_arm(session, data, [10**middle * w for w in weights], **adam)
        gap = difference(step, got)
        if gap < least or (gap < 0.005 and 10**middle < nearest):
            nearest, least = 10**middle, gap
        low, high = (middle, high) if step.rms < (1 - 1e-4) * got.rms else (low, middle)
    return nearest, least


def positions(lab: Lab) -> Measured:
    """Weight on one position alone raises its logprob: the first has a gradient, the last, and one with target 0."""
    datum = lab.datum(4 if lab.small else 16, 16_000)
    count = len(datum.tokens)
    datum.targets[count // 2] = 0  # which is padding, to some
    places = sorted({0, 1, count // 2, count - 1})
    before = lab.logprobs([datum])[0]
    seen, rises = max(1e-3, 10 * lab.noise.logprob), dict[int, float]()
    with lab.session() as session:
        for place in places:
            weighted = [datum.with_inputs(weights=f32(lab.weight * (np.arange(count) == place)))]
            trainer = session.restore(lab.warmed())
            trainer.forward_backward(weighted)
            trainer.step(**lab.adam)
            rises[place] = float((trainer.forward(weighted).logprobs[0] - before)[place])
    still = [place for place, rise in rises.items() if not rise > seen]
    each = ", ".join(f"{place}: {rise:+.3g}" for place, rise in rises.items())
    because = (
        f"a step on one position of {count} alone ({count // 2} has target 0) changes its logprob by (nats) {each}"
    )
    return Measured(float(len(still)), because)


def masked(lab: Lab) -> Measured:
    """An episode: advantage 0 and no sampler logprob on what others said, which adds nothing beside the actions."""
    whole, _ = lab.policy_data("importance_sampling", lab.weight)
    logprobs = lab.logprobs(whole)
    actions = [np.arange(len(d.tokens)) % 4 >= 2 for d in whole]
    data = [
        d.with_inputs(**{name: np.where(acted, value, 0.0) for name, value in d.inputs.items()})
        for d, acted in zip(whole, actions, strict=True)
    ]
    weights, everywhere = (
        [o.weights for o in lab.oracles("importance_sampling", some, logprobs, {})] for some in (data, whole)
    )
    with lab.session() as session:
        got = lab.arm(session, lambda t: t.forward_backward(data, "importance_sampling"))
        want = lab.cross_entropy_arm(session, data, weights)
        wrong = lab.cross_entropy_arm(session, data, everywhere)
        what = "the step with advantage 0 on half of the positions"
        right, contrast = "that with weights on the others alone", "that with weights on all"
        return lab.held_to(got, want, wrong, what, right, contrast, 1.5 * lab.noise.logprob)


def several_targets(lab: Lab) -> Measured:
    """(N, K) weights add up: K targets in one datum are K datums with one target each."""
    data = lab.data(1, 8, salt=12)
    datum = data[0]
    targets = np.stack([np.roll(datum.targets, shift) for shift in (0, 1, 2)], axis=1)
    weights = f32(lab.weight * np.resize([1.0, 0.5, -0.5, 2.0], targets.shape))
    wide = Datum(datum.tokens, targets, {"weights": weights})
    narrow = [Datum(datum.tokens, targets[:, k], {}) for k in range(3)]
    return equal_steps(
        lab, "(N, K) targets", lambda t: t.forward_backward([wide]), narrow, [weights[:, k] for k in range(3)]
    )


def custom(lab: Lab) -> Measured:
    """forward_backward_custom with sum(logprobs^2) / 2 has the weights -logprobs."""
    if find_spec("torch") is None:
        raise Undecided(
            "the SDK computes custom losses in the client, with torch, which is not installed beside it here"
        )
    data = lab.data(2, 8, salt=13)
    scale = lab.weight

    def loss(data: Any, logprobs: Any) -> Any:
        return sum((p**2).sum() for p in logprobs) * (scale / 2), {}

    code = f"lambda data, logprobs: (sum((p ** 2).sum() for p in logprobs) * {scale / 2:.9g}, {{}})"
    weights = [-scale * p for p in lab.logprobs(data)]
    ones = [d.with_inputs(weights=np.ones(len(d.tokens))) for d in data]
    return equal_steps(lab, "a custom loss", lambda t: t.custom(ones, loss, code), data, weights)


def nothing(lab: Lab, gradients: Callable[[Trainer], object], what: str) -> Measured:
    """No gradient, no step: the probes stay; the contrast is an ordinary step."""
    data = lab.weighted(lab.data(2, 16, salt=7))
    with lab.session() as session:
        still = _still(lab, session, gradients)
        moved = lab.arm(session, lambda t: t.forward_backward(data))
    return Measured(still.rms, f"{what} moves the probes by {still.rms:.3g} nats", moved.rms, 6 * lab.noise.logprob)


def _still(lab: Lab, session: Session, gradients: Callable[[Trainer], object]) -> Moved:
    trainer = session.restore(lab.warmed())
    gradients(trainer)
    trainer.step(**lab.adam)
    return lab.change(trainer)


def zero(lab: Lab) -> Measured:
    """Zero weights and zero advantages have no gradient."""
    data, _ = lab.policy_data("importance_sampling", 0.0)
    weightless = lab.weighted(lab.data(2, 16, salt=7), 0.0)

    def send(trainer: Trainer) -> None:
        trainer.forward_backward(weightless)
        try:
            trainer.forward_backward(data, "importance_sampling")
        except Refusal:
            return

    return nothing(lab, send, "a step on zero weights and zero advantages")


def forward_leaves_nothing(lab: Lab) -> Measured:
    """forward adds nothing to the gradient."""
    data = lab.weighted(lab.data(2, 16, salt=7))
    weightless = lab.weighted(lab.data(1, 4, salt=14), 0.0)

    def send(trainer: Trainer) -> None:
        trainer.forward(data)
        trainer.forward_backward(weightless)

    return nothing(lab, send, "forward, then a step on zero weights")


def cancels(lab: Lab) -> Measured:
    """+w and then -w leave no gradient."""
    data = lab.weighted(lab.data(2, 16, salt=7))
    negative = [d.with_inputs(weights=-d.inputs["weights"]) for d in data]

    def send(trainer: Trainer) -> None:
        trainer.forward_backward(data)
        trainer.forward_backward(negative)

    return nothing(lab, send, "weights and then their negatives")


CHECKS = {
    "gradient/learns": learns,
    "gradient/cross_entropy": cross_entropy,
    "gradient/cross_entropy_above_one": cross_entropy_above_one,
    "gradient/cross_entropy_negative": cross_entropy_negative,
    "gradient/several_targets": several_targets,
    **{f"gradient/{loss}": partial(policy, loss=loss) for loss in POLICY_LOSSES},
    "gradient/ppo_defaults": partial(policy_defaults, loss="ppo", defaults=(PPO_DEFAULTS,)),
    "gradient/cispo_defaults": partial(policy_defaults, loss="cispo", defaults=CISPO_DEFAULTS),
    "gradient/custom": custom,
    "gradient/positions": positions,
    "gradient/masked": masked,
    "gradient/zero": zero,
    "gradient/forward_leaves_nothing": forward_leaves_nothing,
    "gradient/cancels": cancels,
}
