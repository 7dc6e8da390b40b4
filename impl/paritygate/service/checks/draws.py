"""sampling, from which distribution: many draws against the logprobs, and what top_k and top_p leave."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from paritygate.service.checks.chi_square import chi_square
from paritygate.service.checks.sampling import Trained, draw, nats, next_logprobs, trained
from paritygate.service.client import Array
from paritygate.service.connection import Refusal
from paritygate.service.lab import Lab, f32
from paritygate.service.outcome import CONTRAST, Measured, Undecided

MANY = 300  # tokens of a sample: more than engines bound by default
LARGE = 200  # of top_k: more than engines take by default, and fewer than a vocabulary has


def _held_to(lab: Lab, right: float, wrong: float, what: str, **params: Any) -> Measured:
    t = trained(lab)
    counts = Counter(sequence.tokens[0] for sequence in draw(lab, t, lab.settings.draws, **params))
    tokens = sorted(counts)
    logprobs = dict(zip(tokens, next_logprobs(lab, t, tokens), strict=True))
    _show(lab, len(t.prompt))
    ordered = {token: counts[token] for token in tokens}
    figure = chi_square(ordered, logprobs, right, rest="all" if right == 1.0 else "none")
    p = np.exp(np.array(list(logprobs.values())) / right)
    due = dict(zip(tokens, (lab.settings.draws * p / p.sum()).tolist(), strict=True))  # what a right sampler draws
    contrast = chi_square(due, logprobs, wrong, rest="all" if wrong == 1.0 else "seen")
    mass = float(np.exp(list(logprobs.values())).sum())
    because = (
        f"{what}: {lab.settings.draws} draws hit {len(tokens)} different tokens, which hold {mass:.4f} of the "
        f"probability by the service's own logprobs; the chi-square is {figure:.2f} times what chance exceeds once in "
        "10,000,000"
    )
    return Measured(figure, because, contrast)


def _show(lab: Lab, length: int) -> None:
    """The program counts the draws and what their tokens hold, scored after a prompt of `length`."""
    journal = lab.connection.journal
    samples, scores = ", ".join(journal.results("r")), journal.results("o")[-1]
    journal.add(f"drawn = [one.tokens[0] for r in [{samples}] for one in r.sequences]")
    journal.add(f"mass = np.exp(logprobs({scores})[{length - 1} :: {length}]).sum()")
    journal.add("print(len(drawn), 'draws hit', len(set(drawn)), 'tokens, which hold', mass, 'of the probability')")


def counts(lab: Lab) -> Measured:
    """num_samples samples of max_tokens tokens, few and many, a logprob each, and the reason is length."""
    t = trained(lab)
    try:
        answer = t.sampler.sample(t.prompt, 5, max_tokens=7, temperature=1.0, seed=24, stop=[])
    except Refusal as error:
        if not error.by_sdk:
            raise
        return Measured(np.inf, f"the SDK cannot read the answer: {error}")
    wrong = abs(len(answer.sequences) - 5)
    for sequence in answer.sequences:
        logprobs = -1 if sequence.logprobs is None else len(sequence.logprobs)
        wrong += (len(sequence.tokens) != 7) + (logprobs != len(sequence.tokens)) + sequence.stopped
    lengths = [len(sequence.tokens) for sequence in answer.sequences]
    because = f"5 samples of 7 tokens asked for: lengths {lengths}"
    with contextlib.suppress(Refusal):  # a context that is shorter
        answer = t.sampler.sample(t.prompt, 1, max_tokens=MANY, temperature=1.0, seed=24, stop=[])
        long = len(answer.sequences[0].tokens)
        wrong += long != MANY
        because += f"; one of {MANY}: {long}"
    return Measured(float(wrong), f"{because}; {wrong} things are wrong")


def distribution(lab: Lab) -> Measured:
    """Draws at temperature 1, tail included: a hidden top-k has none."""
    return _held_to(lab, 1.0, 0.5, "temperature 1", temperature=1.0, top_k=-1, top_p=1.0, seed=5)


def omitted(lab: Lab) -> Measured:
    """The same with temperature, top_k, top_p and seed left out."""
    return _held_to(lab, 1.0, 0.5, "no parameters")


def temperature(lab: Lab) -> Measured:
    """Draws at temperature 0.5, and at 2."""
    half = _held_to(lab, 0.5, 1.0, "temperature 0.5", temperature=0.5, seed=6)
    with contextlib.suppress(Undecided, Refusal):
        above_one = _above_one(lab)
        if above_one.figure > 1 or (above_one.figure > half.figure and (above_one.contrast or 0.0) >= CONTRAST):
            return above_one
    return half


def _above_one(lab: Lab) -> Measured:
    """Draws at temperature 2 of the 8 likeliest tokens, where a step has made one of them by far the likeliest."""
    datum, count = lab.datum(6, 64_000), 512
    data = [datum.with_inputs(weights=f32(lab.weight * (np.arange(6) == 5)))]
    with lab.session() as session:
        trainer = session.restore(lab.warmed())
        trainer.forward_backward(data)
        trainer.step(**lab.adam)
        t = Trained(trainer, lab.sampler_of(session, trainer), datum.tokens)
        counts = Counter(s.tokens[0] for s in draw(lab, t, count, temperature=2.0, top_k=8, seed=9))
        tokens = sorted(counts)
        logprobs = dict(zip(tokens, next_logprobs(lab, t, tokens), strict=True))
    figure = chi_square({token: counts[token] for token in tokens}, logprobs, 2.0, rest="none")
    p = np.exp(np.array(list(logprobs.values())) / 2)
    due = dict(zip(tokens, (count * p / p.sum()).tolist(), strict=True))
    because = (
        f"temperature 2, top_k 8: {count} draws of {len(tokens)} tokens have a chi-square of {figure:.2f} times its "
        "critical value (p = 1e-7)"
    )
    return Measured(figure, because, chi_square(due, logprobs, 1.0, rest="none"))


def sequences(lab: Lab) -> Measured:
    """A second token has its own distribution after each first one: it is drawn anew, not with the first one's luck.

    top_k leaves few first tokens, so that the second of each are many. The contrast is one random number for both, in
    the order of ids or of probabilities.
    """
    t = trained(lab)
    pairs = [s.tokens for s in draw(lab, t, 512, max_tokens=2, top_k=4, seed=11) if len(s.tokens) == 2]
    counted = Counter(pair[0] for pair in pairs).most_common(4)
    firsts = dict(zip([k for k, _ in counted], next_logprobs(lab, t, [k for k, _ in counted]), strict=True))
    each: list[tuple[float, float, int]] = []
    for first, count in counted:
        counts = Counter(pair[1] for pair in pairs if pair[0] == first)
        tokens, after = sorted(counts), replace(t, prompt=(*t.prompt, first))
        logprobs = dict(zip(tokens, next_logprobs(lab, after, tokens), strict=True))
        with contextlib.suppress(Undecided):
            figure = chi_square({token: counts[token] for token in tokens}, logprobs, 1.0, rest="seen")
            wrong = [{k: count * share for k, share in _with(firsts, first, logprobs, key).items()} for key in ORDERS]
            each.append((figure, min(chi_square(due, logprobs, 1.0, rest="seen") for due in wrong), first))
    if not each:
        raise Undecided("after no first token are there seconds enough")
    figure, contrast, first = max([one for one in each if one[1] >= CONTRAST] or each)
    because = (
        f"of 512 samples of two tokens the second ones, after {first} and {len(each) - 1} others, have a chi-square of "
        f"{figure:.2f} times its critical value (p = 1e-7)"
    )
    return Measured(figure, because, contrast)


ORDERS: tuple[Callable[[tuple[int, float]], float], ...] = (lambda pair: pair[0], lambda pair: -pair[1])


def _with(
    firsts: Mapping[int, float], first: int, seconds: Mapping[int, float], order: Callable[[tuple[int, float]], float]
) -> dict[int, float]:
    """The share of each second token where the number that drew `first` draws it, too; arguments are logprobs."""

    def ends(logprobs: Mapping[int, float]) -> dict[int, tuple[float, float]]:
        ranked = sorted(logprobs.items(), key=order)
        total = np.cumsum(np.exp([value for _, value in ranked]))
        below = np.concatenate([[0.0], total[:-1]])
        return {k: (low / total[-1], high / total[-1]) for (k, _), low, high in zip(ranked, below, total, strict=True)}

    low, high = ends(firsts)[first]
    return {k: max(min(high, b) - max(low, a), 0.0) / (high - low) for k, (a, b) in ends(seconds).items()}


def top_k(lab: Lab) -> Measured:
    """top_k: no token outside the k likeliest, and all of them; k = 1 and a large k among them."""

    def choose(gaps: Array, p: Array) -> tuple[int, dict[str, Any]]:
        del p
        last = 2 + int(np.argmax(gaps[2:9]))
        return last, {"top_k": last + 1}

    cut = _support(lab, choose, least=lambda gaps, last: gaps[last])
    with contextlib.suppress(Refusal):  # a bound on top_k
        if not cut.figure:
            return _one_and_many(lab, cut)
    return cut


def _one_and_many(lab: Lab, cut: Measured) -> Measured:
    """`cut`, and what top_k = 1 draws beside the likeliest token, and a large top_k beyond the 50 likeliest.

    Some engines take 1 for none, and 50 where nothing is asked for or for the most that may be.
    """
    t = trained(lab)
    drawn, one, many = (
        Counter(s.tokens[0] for s in draw(lab, t, count, temperature=1.0, seed=seed, **params))
        for count, seed, params in ((512, 7, {}), (16, 10, {"top_k": 1}), (256, 12, {"top_k": LARGE}))
    )
    tokens = sorted({*drawn, *one, *many})
    values = dict(zip(tokens, next_logprobs(lab, t, tokens), strict=True))
    order = sorted(tokens, key=lambda token: -values[token])
    tied = max(0.02, 2 * nats(lab))
    behind = sum(count for token, count in one.items() if values[token] < values[order[0]] - tied)
    due = 256 * (1 - float(np.exp([values[token] for token in order[:50]]).sum()))
    beyond = sum(count for token, count in many.items() if token not in order[:50])
    lost = due > 40 and beyond < due - 6 * np.sqrt(due)
    because = (
        f"{cut.because}; with top_k=1 {behind} of 16 are not the likeliest; with top_k={LARGE} {beyond} of 256 draws "
        f"lie beyond the 50 likeliest, {due:.0f} are expected"
    )
    return replace(cut, figure=float(behind + lost), because=because)


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
    unlimited = sum(free[k] for k in free if k not in expected) / 2  # of 256
    if not unlimited:
        raise Undecided(f"without {params} no other token is drawn either")
    because = (
        f"with {params} {outside} of 256 draws lie outside of the {last + 1} likeliest tokens, without {unlimited:.0f} "
        f"do; {len(missing)} of these tokens are never drawn; the next one is {gap:.2g} nats off"
    )
    return Measured(float(outside + len(missing)), because, unlimited)


CHECKS = {
    "sampling/counts": counts,
    "sampling/distribution": distribution,
    "sampling/temperature": temperature,
    "sampling/sequences": sequences,
    "sampling/top_k": top_k,
    "sampling/top_p": top_p,
    "sampling/omitted": omitted,
}
