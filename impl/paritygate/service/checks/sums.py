"""sums: a batch is the sum of its datums, however it is cut, ordered, padded or repeated."""

from collections.abc import Callable, Sequence

import numpy as np

from paritygate.service.checks.sampling import forward_logprobs, nats, trained
from paritygate.service.checks.value import MANY
from paritygate.service.client import Datum, Trainer
from paritygate.service.lab import Lab, f32
from paritygate.service.outcome import Measured, Undecided, worst

Gradients = Callable[[Trainer], object]


def _same(
    lab: Lab,
    what: tuple[str, str, str],
    one: Gradients,
    other: Gradients,
    wrong: Gradients,
    weights_noise: float = 0.0,
    **adam: float,
) -> Measured:
    """Compare two arms that are equal by right, and a third that is not, called `what`; see `Lab.held_to`."""
    with lab.session() as session:
        arms = [lab.arm(session, gradients, **adam) for gradients in (one, other, wrong)]
        return lab.held_to(arms[0], arms[1], arms[2], *what, weights_noise)


def _scaled(data: Sequence[Datum], factor: float) -> list[Datum]:
    return [d.with_inputs(weights=factor * d.inputs["weights"]) for d in data]


def duplicate(lab: Lab) -> Measured:
    """The same datum twice is the datum with doubled weights, those above 1 as well."""
    data = lab.weighted(lab.data(2, 12, salt=30))
    twice = _same(
        lab,
        ("the step on each datum twice", "that on each once with doubled weights", "that on each once"),
        lambda t: t.forward_backward([*data, *data]),
        lambda t: t.forward_backward(_scaled(data, 2.0)),
        lambda t: t.forward_backward(data),
    )
    large = lab.weighted(data, 1.0)  # up to 1; twice that the step is the same size, and no longer the same direction
    bounded = [d.with_inputs(weights=np.minimum(2 * d.inputs["weights"], 1.0)) for d in large]
    above = _same(
        lab,
        (
            "the step on weights of up to 2",
            "that on each datum twice with half of them",
            "that on weights of at most 1",
        ),
        lambda t: t.forward_backward(_scaled(large, 2.0)),
        lambda t: t.forward_backward([*large, *large]),
        lambda t: t.forward_backward(bounded),
        learning_rate=lab.adam["learning_rate"] / 4,  # beside these gradients eps is nothing
    )
    return worst((twice, above))


def losses(lab: Lab) -> Measured:
    """Calls with two losses before one step add up, as calls with one do."""
    first = lab.weighted(lab.data(1, 12, salt=36))
    data, _ = lab.policy_data("importance_sampling", lab.weight)
    oracles = lab.oracles("importance_sampling", data, lab.logprobs(data), {})
    oracle = [d.with_inputs(weights=f32(o.weights)) for d, o in zip(data, oracles, strict=True)]

    def two(trainer: Trainer) -> None:
        trainer.forward_backward(first)
        trainer.forward_backward(data, "importance_sampling")

    return _same(
        lab,
        (
            "the step after cross_entropy and then importance_sampling",
            "that after both by cross_entropy",
            "that after importance_sampling alone",
        ),
        two,
        lambda t: t.forward_backward([*first, *oracle]),
        lambda t: t.forward_backward(oracle),
        1.5 * lab.noise.logprob,
    )


def split(lab: Lab) -> Measured:
    """One call with five datums is two calls with two and three."""
    data = lab.weighted(lab.data(5, 12, salt=31, least=2))
    cut = max(1, len(data) - 3)

    def two(trainer: Trainer) -> None:
        trainer.forward_backward(data[:cut])
        trainer.forward_backward(data[cut:])

    return _same(
        lab,
        ("the step after two calls", "that after one with the datums of both", "that after the second call alone"),
        two,
        lambda t: t.forward_backward(data),
        lambda t: t.forward_backward(data[cut:]),
    )


def _ragged(lab: Lab) -> list[Datum]:
    lengths = (4, 2) if lab.small else (3, 17, 1, 9)
    return [lab.datum(length, 32_000 + index) for index, length in enumerate(lengths)]


def permuted(lab: Lab) -> Measured:
    """The order of the datums in a call does not matter, nor that their lengths differ."""
    data = lab.weighted(_ragged(lab))
    return _same(
        lab,
        ("the step on datums in another order", "that in theirs", "that without the first datum"),
        lambda t: t.forward_backward(data[::-1]),
        lambda t: t.forward_backward(data),
        lambda t: t.forward_backward(data[1:]),
    )


def alone(lab: Lab) -> Measured:
    """A batch of datums with different lengths is each of them in a call of its own."""
    data = lab.weighted(_ragged(lab))

    def each(trainer: Trainer) -> None:
        for datum in data:
            trainer.forward_backward([datum])

    return _same(
        lab,
        ("the step after a call for each datum", "that after one for all", "that with half of the weights"),
        each,
        lambda t: t.forward_backward(data),
        lambda t: t.forward_backward(_scaled(data, 0.5)),
    )


def ragged_logprobs(lab: Lab) -> Measured:
    """Logprobs in a batch with different lengths are those of each datum alone."""
    data = _ragged(lab)
    together = lab.logprobs(data)
    single = [lab.logprobs([datum])[0] for datum in data]
    gap = max(float(np.abs(a - b).max()) for a, b in zip(together, single, strict=True))
    contrast = max(float(np.abs(np.roll(b, 1) - b).max()) for b in single)
    because = f"a datum's logprobs in a batch and alone differ by {gap:.3g} nats"
    return Measured(gap, because, contrast, 10 * lab.noise.logprob)


def copies(lab: Lab) -> Measured:
    """Equal datums of one batch have equal logprobs."""
    datum = lab.datum(4 if lab.small else 16, 33_000)
    rows = np.stack(lab.logprobs([datum, datum, datum]))
    gap = float(np.abs(rows - rows[0]).max())
    contrast = float(np.abs(np.roll(rows[0], 1) - rows[0]).max())
    because = f"equal datums of one batch have logprobs {gap:.3g} nats apart"
    return Measured(gap, because, contrast, 10 * lab.noise.logprob)


def many(lab: Lab) -> Measured:
    """More datums than one request takes: the SDK sends several, and one step uses them all, not the last alone."""
    if lab.small:
        raise Undecided("this needs more datums than one request takes")
    copies = MANY // 5
    few = lab.weighted([lab.datum(2, 40_000 + index) for index in range(5)], lab.weight * 4 / copies)
    return _same(
        lab,
        (
            f"the step on {MANY} datums",
            "that on the five that they are copies of with the weight of all",
            "that on the last request alone",
        ),
        lambda t: t.forward_backward(few * copies),
        lambda t: t.forward_backward(_scaled(few, copies)),
        lambda t: t.forward_backward((few * copies)[1024:]),
    )


def mixed_targets(lab: Lab) -> Measured:
    """A call may hold targets (N,) and (N, K): it is each datum in a call of its own."""
    narrow, other = lab.weighted(lab.data(2, 8, salt=34, least=2))
    targets = np.stack([np.roll(other.targets, shift) for shift in (0, 1, 2)], axis=1)
    weights = lab.weight * np.resize([1.0, 0.5, -0.5, 2.0], targets.shape)
    wide = Datum(other.tokens, targets, {"weights": f32(weights)})

    def each(trainer: Trainer) -> None:
        trainer.forward_backward([narrow])
        trainer.forward_backward([wide])

    return _same(
        lab,
        (
            "the step after a call with targets of one axis and of two",
            "that after a call for each",
            "that on the datum with one axis alone",
        ),
        lambda t: t.forward_backward([narrow, wide]),
        each,
        lambda t: t.forward_backward([narrow]),
    )


def long(lab: Lab) -> Measured:
    """A long sequence: its beginning has the logprobs that it has alone, its end those of the sampler.

    Its end has a gradient, too.
    """
    t = trained(lab)
    tokens = lab.tokens(100 if lab.small else 400, 35)
    whole = forward_logprobs(t.trainer, tokens)
    begun, scored = forward_logprobs(t.trainer, tokens[:24]), t.sampler.logprobs(tokens)[1 - len(tokens) :]
    gaps = {
        "of its beginning alone": float(np.abs(whole[: len(begun)] - begun).max()),
        "of the sampler": float(np.abs(whole - scored).max()),
    }
    ones = np.zeros(len(tokens) - 1)
    ones[-16:] = lab.weight
    end = Datum(tokens[:-1], np.array(tokens[1:], np.int64)).with_inputs(weights=ones)
    with lab.session() as session:
        moved = lab.arm(session, lambda t: t.forward_backward([end])).rms
    if moved <= max(1e-4, 10 * lab.noise.logprob):
        return Measured(
            np.inf, f"weights at the end of {len(tokens)} tokens have no gradient: a step moves {moved:.3g}"
        )
    name = max(gaps, key=gaps.__getitem__)
    because = f"a sequence of {len(tokens)} tokens has logprobs {gaps[name]:.3g} nats from those {name}"
    return Measured(gaps[name], because, float(np.abs(np.roll(whole, 1) - whole).max()), nats(lab))


CHECKS = {
    "sums/duplicate": duplicate,
    "sums/split": split,
    "sums/losses": losses,
    "sums/permuted": permuted,
    "sums/alone": alone,
    "sums/ragged_logprobs": ragged_logprobs,
    "sums/copies": copies,
    "sums/many": many,
    "sums/long": long,
    "sums/mixed_targets": mixed_targets,
}
