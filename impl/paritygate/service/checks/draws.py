"""sampling, from which distribution: many draws against the logprobs, and what top_k and top_p leave."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from paritygate.service.checks.chi_square import chi_square
from paritygate.service.checks.sampling import draw, nats, next_logprobs, trained
from paritygate.service.client import Array
from paritygate.service.lab import Lab
from paritygate.service.outcome import Measured, Undecided


def _held_to(lab: Lab, right: float, wrong: float, what: str, **params: Any) -> Measured:
    t = trained(lab)
    counts = Counter(sequence.tokens[0] for sequence in draw(lab, t, lab.settings.draws, **params))
    tokens = sorted(counts)
    logprobs = dict(zip(tokens, next_logprobs(lab, t, tokens), strict=True))
    ordered = {token: counts[token] for token in tokens}
    figure = chi_square(ordered, logprobs, right, rest="all" if right == 1.0 else "none")
    p = np.exp(np.array(list(logprobs.values())) / right)
    due = dict(zip(tokens, (lab.settings.draws * p / p.sum()).tolist(), strict=True))  # what a right sampler draws
    contrast = chi_square(due, logprobs, wrong, rest="all" if wrong == 1.0 else "seen")
    mass = float(np.exp(list(logprobs.values())).sum())
    because = (
        f"{what}: {lab.settings.draws} draws of {len(tokens)} tokens that hold {mass:.4f} of the probability have a "
        f"chi-square of {figure:.2f} times its critical value (p = 1e-7)"
    )
    return Measured(figure, because, contrast)


def distribution(lab: Lab) -> Measured:
    """Draws at temperature 1, tail included: a hidden top-k has none."""
    return _held_to(lab, 1.0, 0.5, "temperature 1", temperature=1.0, top_k=-1, top_p=1.0, seed=5)


def omitted(lab: Lab) -> Measured:
    """The same with temperature, top_k, top_p and seed left out."""
    return _held_to(lab, 1.0, 0.5, "no parameters")


def temperature(lab: Lab) -> Measured:
    """Draws at temperature 0.5."""
    return _held_to(lab, 0.5, 1.0, "temperature 0.5", temperature=0.5, seed=6)


def top_k(lab: Lab) -> Measured:
    """top_k: no token outside the k likeliest, and all of them."""

    def choose(gaps: Array, p: Array) -> tuple[int, dict[str, Any]]:
        del p
        last = 2 + int(np.argmax(gaps[2:9]))
        return last, {"top_k": last + 1}

    return _support(lab, choose, least=lambda gaps, last: gaps[last])


def top_p(lab: Lab) -> Measured:
    """top_p: the smallest set of likeliest tokens that reaches it, the one that does included."""

    def choose(gaps: Array, p: Array) -> tuple[int, dict[str, Any]]:
        last = 2 + int(np.argmax(np.minimum(gaps[1:8], gaps[2:9])))
        return last, {"top_p": round(float(p[: last + 1].sum() - p[last] / 2), 6)}  # half-way through its own share

    return _support(lab, choose, least=lambda gaps, last: min(gaps[last - 1], gaps[last]))


def _support(lab: Lab, choose: Callable[[Array, Array], tuple[int, dict[str, Any]]], least: Any) -> Measured:
    """Draws cut after the `last` likeliest token, where `least` of the gaps between logprobs tells it from others."""
    t = trained(lab)
    free = Counter(sequence.tokens[0] for sequence in draw(lab, t, 512, temperature=1.0, seed=7))
    values = next_logprobs(lab, t, sorted(free))
    order = np.argsort(-values, kind="stable")
    if len(order) < 10:
        raise Undecided(f"512 draws at temperature 1 are of {len(order)} tokens only")
    last, params = choose(-np.diff(values[order[:10]]), np.exp(values[order]))
    gap = least(-np.diff(values[order[:10]]), last)
    if not gap > max(0.02, 2 * nats(lab)):
        raise Undecided(f"the likeliest tokens are {gap:.2g} nats apart, too little to tell which is the last")
    drawn = Counter(sequence.tokens[0] for sequence in draw(lab, t, 256, temperature=1.0, seed=8, **params))
    inside = [sorted(free)[i] for i in order[: last + 1]]
    share = np.exp(values[order[: last + 1]])
    expected = dict(zip(inside, 256 * share / share.sum(), strict=True))
    others = {k: v for k, v in drawn.items() if k not in expected}
    further = dict(zip(others, next_logprobs(lab, t, list(others)), strict=True)) if others else {}
    if any(value > values[order[last]] for value in further.values()):
        raise Undecided("a token that 512 draws did not show is among the likeliest")
    missing = [k for k, count in expected.items() if count > 16 and not drawn[k]]
    outside = sum(others.values())
    if sum(free[k] for k in free if k not in expected) == 0:
        raise Undecided(f"without {params} no other token is drawn either")
    because = (
        f"with {params} {outside} of 256 draws lie outside of the {last + 1} likeliest tokens, {len(missing)} of these "
        f"are never drawn; the next one is {gap:.2g} nats off"
    )
    return Measured(float(outside + len(missing)), because)


CHECKS = {
    "sampling/distribution": distribution,
    "sampling/temperature": temperature,
    "sampling/top_k": top_k,
    "sampling/top_p": top_p,
    "sampling/omitted": omitted,
}
