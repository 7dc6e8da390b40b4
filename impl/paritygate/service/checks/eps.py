"""optimiser, eps: added to the root of the second moment, as large or small as asked; no floor under it."""

import contextlib

import numpy as np
from numpy.typing import NDArray

from paritygate.service.checks.gradient import EPS_LIMIT
from paritygate.service.checks.optimiser import fall, memoryless, several_gradients
from paritygate.service.connection import Refusal
from paritygate.service.lab import TARGET, Lab
from paritygate.service.outcome import Measured, Undecided, worst

Array = NDArray[np.float64]
USED_UP = (1.0, 0.0)  # the second has no gradient: nothing is said about the step of another gradient
BETAS = (0.5, 0.9)  # a small correction of the second moment: eps before it would be more than twice as large
SDK_EPS = 1e-12  # AdamParams' default
SPREAD = np.geomspace(1 / 32, 32, 6)  # of eps, in units of the calibrated one, which is near the gradient's size
SMALL = 1 / 40  # of the calibrated step, so that the loss is nearly a straight line: 1e-3 of its slope is left


def eps(lab: Lab) -> Measured:
    """eps is added after the root of the corrected second moment: the same equality, where eps is what is large.

    After a gradient and none moments are multiples of it, so that no gradient is compared with k times it, which is the
    same step with k eps only if eps is where it belongs. A beta2 near 0 makes the root as small as the SDK's default
    eps, which is then no smaller beside it than any other.
    """
    if lab.mixed:
        return _ignored(lab)
    large = min(8 * lab.adam["eps"], EPS_LIMIT)
    # Added before the bias correction of the second moment, as some libraries do.
    each = [_added(lab, BETAS, large, 1 / np.sqrt(1 - BETAS[1] ** 2), "before the correction")]
    with contextlib.suppress(Refusal):  # a bound on eps, the learning rate or beta2
        each.append(_added(lab, (BETAS[0], (SDK_EPS / lab.adam["eps"]) ** 2), SDK_EPS, 10.0, "ten times as large"))
    return worst(each)


def _added(lab: Lab, betas: tuple[float, float], size: float, factor: float, wrongly: str) -> Measured:
    """A gradient and none at `size` of eps, against the memoryless step; the contrast has `factor` times that eps."""
    shrunk = np.sqrt(betas[1])  # of the root, after a step without a gradient
    rate = min(4 * lab.adam["learning_rate"], 9.0) * shrunk
    with lab.session() as session:
        got = several_gradients(lab, session, betas, USED_UP, eps=size, learning_rate=rate)
        want = memoryless(lab, session, betas, USED_UP, rate=rate, eps=size)
        wrong = memoryless(lab, session, betas, USED_UP, rate=rate, eps=factor * size)
        return lab.held_to(got, want, wrong, f"with eps {size:.3g} the step", "Adam's", f"that with eps {wrongly}")


def _ignored(lab: Lab) -> Measured:
    """Where no eps that is taken makes a step smaller: does eps = 1 do nothing to a gradient that is far below 1?"""
    tiny = lab.weighted(lab.data(2, 16, salt=7), 1e-4 * lab.weight)
    with lab.session() as session:
        trainers = [session.restore(lab.warmed()) for _ in range(2)]
        for trainer, eps in zip(trainers, (EPS_LIMIT, lab.adam["eps"]), strict=True):
            trainer.forward_backward(tiny)
            try:
                trainer.step(**{**lab.adam, "eps": eps})
            except Refusal:
                raise Undecided("the service takes only a tiny eps") from None
        large, small = (lab.change(trainer) for trainer in trainers)
    factor = large.rms / small.rms if small.rms > 0 else 0.0
    because = f"with weights of {1e-4 * lab.weight:.1g} the step with eps 1 is {factor:.3g} times that with a tiny eps"
    if factor < 0.5:
        raise Undecided(f"the service takes only a tiny eps where checks need one; {because}")
    return Measured(factor, f"{because}: eps has no effect")


def added(lab: Lab) -> Measured:
    """eps is added to the root; it is no floor under it: max(eps, root) has every equality of scale that a sum has.

    A small step lowers the loss by the learning rate times the sum over all entries of g^2 / (|g| + eps). Whatever the
    entries are, as eps grows that falls in a way that few curves do: some numbers of entries of each size, none of them
    negative, have to explain all slopes at once. Those numbers say what max(eps, |g|) would have done, which no such
    numbers explain; how well they could is the contrast.
    """
    if lab.mixed:
        raise Undecided("the service takes only a tiny eps")
    data = lab.weighted(lab.data(2, 16, salt=7))
    unit, least, falls = lab.adam["eps"], np.inf, list[float]()
    sizes = np.minimum(SPREAD * unit, EPS_LIMIT)
    for size in sizes:
        rate = min(SMALL * lab.adam["learning_rate"] * (unit + size) / (2 * unit), 9.0)
        fallen = fall(lab, data, rate, float(size))
        if not fallen > 0:
            raise Undecided(f"with eps {size:.3g} a small step along the gradient lowers no loss")
        least = min(least, fallen)
        falls.append(fallen / rate)
    values = np.geomspace(sizes[0] * 1e-4, sizes[-1] * 1e4, 160)  # of |g|
    gap, entries = explained(np.array(falls), sums(values, sizes))
    seen, _ = explained(floors(values, sizes) @ entries, sums(values, sizes))
    weights = np.concatenate([d.inputs["weights"] for d in data])
    noise = 12 * lab.noise.logprob * float(np.linalg.norm(weights)) / least
    if lab.noise.step > 2e-4:  # of steps of TARGET nats: here they are far smaller, and what is left in them is not
        noise += 3 * lab.noise.step * max(1.0, TARGET * float(weights.sum()) / least)
    because = (
        f"slopes of the loss at {len(sizes)} eps from {sizes[0]:.2g} to {sizes[-1]:.2g} are {gap:.2g} (relative) from "
        f"any that g / (|g| + eps) can have; those of g / max(|g|, eps) would be {seen:.2g} off"
    )
    return Measured(gap, because, seen, noise)


def sums(values: Array, sizes: Array) -> Array:
    """(J, V): |g| / (|g| + eps) for each size of eps and value of |g|."""
    return values / (values + sizes[:, None])


def floors(values: Array, sizes: Array) -> Array:
    """(J, V): |g| / max(|g|, eps)."""
    return values / np.maximum(values, sizes[:, None])


def explained(slopes: Array, kernel: Array) -> tuple[float, Array]:
    """The largest relative error of kernel @ x against `slopes` (J,), and x (V,) >= 0, which makes the squares least.

    Non-negative least squares: C. L. Lawson, R. J. Hanson, Solving Least Squares Problems, 1974, algorithm NNLS.
    """
    rows, ones = kernel / slopes[:, None], np.ones(len(slopes))
    x, free = np.zeros(rows.shape[1]), np.zeros(rows.shape[1], bool)
    for _ in range(100):
        gain = np.where(free, -np.inf, rows.T @ (ones - rows @ x))
        if not gain.max() > 1e-12:
            break
        free[int(np.argmax(gain))] = True
        while True:
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(rows[:, free], ones, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                break
            x = x + float((x[below] / (x[below] - best[below])).min()) * (best - x)
            free &= x > 1e-15
        x = best
    return float(np.abs(rows @ x - ones).max()), x


CHECKS = {"optimiser/eps": eps, "optimiser/eps_added": added}
