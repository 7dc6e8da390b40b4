"""sampling: what is drawn, from which distribution, and the logprobs that come with it."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paritygate.service.checks.state import MULTIPLE
from paritygate.service.client import Array, Datum, Sampled, Sampler, Trainer
from paritygate.service.connection import Refusal
from paritygate.service.lab import Lab, sampler_noise
from paritygate.service.outcome import Measured, Undecided

BATCH = 64  # samples a request; services bound it
NEVER = "paritygate never stops here"  # a stop string that no sample has


@dataclass(frozen=True)
class Trained:
    """A trained adapter, the sampler of its saved weights, a prompt, and the standard deviation of its scores."""

    trainer: Trainer
    sampler: Sampler
    prompt: tuple[int, ...]


def trained(lab: Lab) -> Trained:
    """The warmed state and one calibrated step: a base model's answers differ from its by nats."""

    def make() -> Trained:
        trainer = lab.long.restore(lab.warmed())
        trainer.forward_backward(lab.weighted(lab.data(2, 16, salt=7)))
        trainer.step(**lab.adam)
        return Trained(trainer, lab.sampler_of(lab.long, trainer), lab.tokens(6, 60))

    return lab.cached("trained", make)


def nats(lab: Lab) -> float:
    """The bound that noise asks for where a sampler's logprobs are compared; measured once."""

    def measure() -> float:
        t = trained(lab)
        return sampler_noise(lab, lambda: t.sampler.logprobs(t.prompt)[1:])

    sampler = lab.connection.journal.cached("sampler noise", measure, record=False)
    return 10 * max(lab.noise.logprob, sampler)


def forward_logprobs(trainer: Trainer, tokens: Sequence[int]) -> Array:
    """The logprobs of tokens 1 and on by the training model."""
    datum = Datum(tuple(tokens[:-1]), np.array(tokens[1:], np.int64)).with_inputs(weights=np.ones(len(tokens) - 1))
    return trainer.forward([datum]).logprobs[0]


# ---------------------------------------------------------------------- logprobs


def three_ways(lab: Lab) -> Measured:
    """Sampled, scored and forward logprobs of one sequence."""
    t = trained(lab)
    answer = t.sampler.sample(t.prompt, 2, max_tokens=12, temperature=1.0, seed=1, stop=[])
    worst, contrast, which = -1.0, np.inf, ""
    base = lab.long.create(lab.settings.rank, seed=12)  # B is 0
    for sequence in answer.sequences:
        tokens = (*t.prompt, *sequence.tokens)
        count = len(sequence.tokens)
        if sequence.logprobs is None:
            raise Undecided("sample returns no logprobs")
        scored = t.sampler.logprobs(tokens)[-count:]
        forward = forward_logprobs(t.trainer, tokens)[-count:]
        contrast = min(contrast, float(np.abs(forward_logprobs(base, tokens)[-count:] - forward).max()))
        for name, values in (("sampled", sequence.logprobs), ("scored", scored)):
            gap = float(np.abs(values - forward).max())
            worst, which = (gap, name) if gap > worst else (worst, which)
    because = f"{which} logprobs are {worst:.3g} nats from forward's"
    return Measured(worst, because, contrast, nats(lab))


def base_model(lab: Lab) -> Measured:
    """A sampler of the base model has no adapter, whatever others were loaded: it scores as an adapter that is new."""
    t, prompt = trained(lab), lab.tokens(10, 63)
    got = lab.long.sampler().logprobs(prompt)[1 - len(prompt) :]  # a service may leave the leading None out
    want, other = (
        forward_logprobs(trainer, prompt) for trainer in (lab.long.create(lab.settings.rank, seed=12), t.trainer)
    )
    gap, contrast = (float(np.abs(values - want).max()) for values in (got, other))
    return Measured(gap, f"the base model's scores are {gap:.3g} nats from a new adapter's", contrast, nats(lab))


def prompt_logprobs(lab: Lab) -> Measured:
    """Prompt logprobs: length, None first, the trained adapter's values."""
    t = trained(lab)
    prompt = lab.tokens(10, 61)
    values = t.sampler.logprobs(prompt)
    if len(values) != len(prompt):
        return Measured(np.inf, f"{len(values)} prompt logprobs for {len(prompt)} tokens")
    if not np.isnan(values[0]) or np.isnan(values[1:]).any():
        return Measured(np.inf, f"None must come first and nowhere else, found {values.tolist()}")
    answer = t.sampler.sample(prompt, 1, prompt_logprobs=True, max_tokens=1, temperature=1.0, seed=1)
    if answer.prompt_logprobs is None or len(answer.prompt_logprobs) != len(prompt):
        return Measured(np.inf, "include_prompt_logprobs gives no prompt logprobs, or another number")
    want = forward_logprobs(t.trainer, prompt)
    gap = max(float(np.abs(v[1:] - want).max()) for v in (values, answer.prompt_logprobs))
    contrast = float(np.abs(np.roll(want, 1) - want).max())
    return Measured(gap, f"prompt logprobs are {gap:.3g} nats from forward's", contrast, nats(lab))


def topk_logprobs(lab: Lab) -> Measured:
    """The k likeliest tokens of each prompt position."""
    t = trained(lab)
    prompt = lab.tokens(8, 62)
    answer = t.sampler.sample(prompt, 1, prompt_logprobs=True, topk=4, max_tokens=1, temperature=1.0, seed=1)
    rows = answer.topk
    if rows is None:
        return Measured(np.inf, "topk_prompt_logprobs were asked for, and do not come")
    if len(rows) != len(prompt) or rows[0] is not None or any(row is None or len(row) != 4 for row in rows[1:]):
        return Measured(
            np.inf, f"4 likeliest tokens a position, None first: found {[row and len(row) for row in rows]}"
        )
    worst, contrast = 0.0, np.inf
    for position in (1, len(prompt) - 1):
        row = rows[position] or []
        data = [Datum(prompt[:position], _last(prompt[:position], token)) for token, _ in row]
        want = np.array([p[-1] for p in _forward(t.trainer, data)])
        got = np.array([p for _, p in row])
        ordered = float(np.maximum(np.diff(got), 0).max(initial=0.0))
        worst = max(worst, float(np.abs(got - want).max()), ordered)
        contrast = min(contrast, float(np.abs(got[::-1] - want).max()))
    return Measured(worst, f"top logprobs are {worst:.3g} nats from forward's", contrast, nats(lab))


def _last(prefix: Sequence[int], token: int) -> Any:
    return np.array([*prefix[1:], token], np.int64)


def _forward(trainer: Trainer, data: Sequence[Datum]) -> list[Array]:
    rows: list[Array] = []
    for start in range(0, len(data), 256):
        part = [d.with_inputs(weights=np.ones(len(d.tokens))) for d in data[start : start + 256]]
        rows.extend(trainer.forward(part).logprobs)
    return rows


def temperature_logprobs(lab: Lab) -> Measured:
    """Which logprobs come with samples at temperature 0.5: the model's or the tempered distribution's."""
    t = trained(lab)
    draws = draw(lab, t, 512, temperature=0.5, seed=3)
    tokens = sorted({sequence.tokens[0] for sequence in draws if sequence.logprobs is not None})
    if len(tokens) < 3:
        raise Undecided(f"{len(tokens)} different tokens with logprobs in {len(draws)} draws at temperature 0.5")
    got = np.array([next(s.logprobs[0] for s in draws if s.tokens[0] == k and s.logprobs is not None) for k in tokens])
    model = next_logprobs(lab, t, tokens)
    raw = float(np.abs(got - model).max())
    tempered = float(np.abs((got - got.mean()) - (model - model.mean()) / 0.5).max())  # up to the common normaliser
    if not tempered < raw:
        return Measured(raw, f"logprobs at temperature 0.5 are the model's, to {raw:.3g} nats", tempered, nats(lab))
    times = list(Counter(sequence.tokens[0] for sequence in draws).values())
    total, once = float(np.exp(got).sum()), times.count(1) / len(draws)  # what was not drawn has about that share
    because = f"logprobs at temperature 0.5 are the tempered distribution's, to {tempered:.3g} nats and a constant"
    if not 1 - 2 * once - 0.1 <= total <= 1 + 2 * nats(lab) + 0.001:
        return Measured(abs(np.log(total)), f"{because}: the tokens drawn have {total:.3g} of the probability", None)
    return Measured(tempered, because, raw, 2 * nats(lab))


# ---------------------------------------------------------------------- draws


def draw(lab: Lab, t: Trained, count: int, *, max_tokens: int = 1, **params: Any) -> list[Any]:
    """`count` samples, of one token by default; a seed is counted up from request to request."""
    sequences: list[Any] = []
    while len(sequences) < count:
        part = min(BATCH, count - len(sequences))
        asked = dict(params)
        if "seed" in asked:
            asked["seed"] = params["seed"] * 1_000_003 + len(sequences)
        answer = t.sampler.sample(t.prompt, part, max_tokens=max_tokens, stop=[], **asked)
        got = [sequence for sequence in answer.sequences if sequence.tokens]
        if not got:
            raise Undecided("sample returned no tokens")
        sequences.extend(got)
    return sequences


def next_logprobs(lab: Lab, t: Trained, tokens: Sequence[int]) -> Array:
    """The training model's logprobs of each token after the prompt."""
    rows = _forward(t.trainer, [Datum(t.prompt, _last(t.prompt, token)) for token in tokens])
    return np.array([row[-1] for row in rows])


def greedy(lab: Lab) -> Measured:
    """Temperature 0: the likeliest token at each position, of a second sample, too; the same with another seed."""
    t = trained(lab)
    one, other = (t.sampler.sample(t.prompt, 2, max_tokens=8, temperature=0.0, seed=s, stop=[]) for s in (1, 2))
    tokens = one.sequences[-1].tokens
    different = sum(a != b for a, b in zip(tokens, other.sequences[-1].tokens, strict=False))
    draws = draw(lab, t, 64, temperature=1.0, seed=4)
    rivals = sorted({sequence.tokens[0] for sequence in draws} - {tokens[0]})[:32]
    if not rivals:
        raise Undecided("64 draws at temperature 1 were all one token")
    values = next_logprobs(lab, t, [tokens[0], *rivals])
    behind = float(values[1:].max() - values[0])
    tied = max(0.05, nats(lab))
    try:
        topk = t.sampler.sample((*t.prompt, *tokens), 1, topk=2, max_tokens=1, temperature=1.0, seed=1).topk
    except Refusal:  # then the first token alone is compared
        topk = None
    beaten, seconds = 0, int(-behind > tied)  # at so many places the second likeliest would be told
    if topk is not None:
        for position, token in enumerate(tokens, len(t.prompt)):
            row = topk[position] or []
            if row and token != row[0][0] and not any(k == token and row[0][1] - p <= tied for k, p in row):
                beaten += 1
            seconds += len(row) > 1 and row[0][1] - row[1][1] > tied
    figure = float(beaten + (behind > tied) + (different if nats(lab) == 0 else 0))  # noise turns near ties
    because = (
        f"of {len(tokens)} tokens at temperature 0, {beaten} are not the likeliest of topk_prompt_logprobs; a rival of "
        f"the first is {behind:+.3g} nats ahead; another seed changes {different}"
    )
    return Measured(figure, because, float(seconds))


# ---------------------------------------------------------------------- seeds, counts, stops


def _sequences(answer: Sampled) -> list[tuple[int, ...]]:
    return [sequence.tokens for sequence in answer.sequences]


def seed_repeats(lab: Lab) -> Measured:
    """One seed twice gives the same samples, other seeds others; noise may turn a few draws."""
    t = trained(lab)
    far = 21 + MULTIPLE
    first, again, near, distant, zero, zeros = (
        _sequences(t.sampler.sample(t.prompt, 48, max_tokens=1, temperature=1.0, seed=s, stop=[]))
        for s in (21, 21, 22, far, 0, 0)  # some take a seed of 0 for none
    )
    pairs = ((first, again), (zero, zeros), (first, near), (first, distant))
    one, nought, near, other = (float(np.mean([a != b for a, b in zip(*pair, strict=True)])) for pair in pairs)
    singles = [
        [
            _sequences(t.sampler.sample(t.prompt, 1, max_tokens=1, temperature=1.0, seed=s, stop=[]))
            for s in range(31, 39)
        ]
        for _ in range(2)
    ]
    single = float(np.mean([a != b for a, b in zip(*singles, strict=True)]))
    changed, contrast = max(one, nought, single), min(near, other)
    because = (
        f"seed 21 twice: {one:.0%} of 48 draws differ; seed 0 twice: {nought:.0%}; eight seeds, for one sample each, "
        f"twice: {single:.0%}; seeds 21 and 22: {near:.0%}; 21 and {far}: {other:.0%}"
    )
    if contrast < 0.2:
        return Measured(1.0, f"{because}: the seed has no effect")
    return Measured(changed, because, contrast)


def seed_distinct(lab: Lab) -> Measured:
    """The samples of one seeded request are draws of their own."""
    t = trained(lab)
    samples = _sequences(t.sampler.sample(t.prompt, 6, max_tokens=12, temperature=1.0, seed=23, stop=[]))
    repeated = len(samples) - len(set(samples))
    return Measured(float(repeated), f"{repeated} of {len(samples)} samples of one seeded request repeat another")


def seed_neighbours(lab: Lab) -> Measured:
    """Whether requests with neighbouring seeds share samples, as where sample i of seed s is drawn with seed s + i.

    The SDK's page says "random seed for reproducible generation" and nothing of two seeds, and vLLM numbers samples so
    (v1/engine/parallel_sampling.py): samples that are shared are reported, and are no departure.
    """
    t = trained(lab)
    first, second = (
        _sequences(t.sampler.sample(t.prompt, 6, max_tokens=12, temperature=1.0, seed=s, stop=[])) for s in (23, 24)
    )
    shared = sum(sample in first for sample in second)
    because = f"{shared} of 6 samples of seed 24 are samples of seed 23"
    if shared:
        raise Undecided(
            f"{because}, too: no page says that they may not be, but draws of one seed and of the next are not "
            "independent here; seeds need to be further apart than num_samples"
        )
    return Measured(0.0, because)


def unseeded(lab: Lab) -> Measured:
    """Requests without a seed are draws of their own, of one sample (which some services take greedily) or of four."""
    t = trained(lab)
    requests = [
        _sequences(t.sampler.sample(t.prompt, count, max_tokens=12, temperature=1.0, stop=[]))
        for count in (4, 4, 1, 1, 1)
    ]
    samples = [sample for request in requests for sample in set(request)]
    repeated = len(samples) - len(set(samples))
    because = (
        f"{repeated} samples of 12 tokens come again in another request without a seed, of 4, 4, 1, 1 and 1 samples"
    )
    return Measured(float(repeated), because)


def _frequent(lab: Lab, t: Trained) -> list[int]:
    """Ids that are drawn often after the prompt: about a third of all draws."""
    counts = Counter(
        token
        for one in t.sampler.sample(t.prompt, 8, max_tokens=24, seed=25, stop=[]).sequences
        for token in one.tokens
    )
    total, chosen = sum(counts.values()), list[int]()
    for token, count in counts.most_common():
        if sum(counts[k] for k in chosen) + count > total / 3 and chosen:
            break
        chosen.append(token)
    return chosen


def stop_token(lab: Lab) -> Measured:
    """Any of several stop ids ends a sample where it is first drawn, and is its last token, with its logprob."""
    t = trained(lab)
    stops = _frequent(lab, t)
    answer = t.sampler.sample(t.prompt, 16, max_tokens=40, temperature=1.0, seed=27, stop=stops)
    wrong = ended = due = 0
    for sequence in answer.sequences:
        inside = [token in stops for token in sequence.tokens]
        ended += sequence.stopped
        due += any(inside)
        right = inside.index(True) == len(inside) - 1 if any(inside) else len(inside) == 40
        wrong += not right or sequence.stopped != any(inside)
    because = (
        f"{len(stops)} stop ids: {wrong} of 16 samples do not end with the first of them; {ended} give the reason stop"
    )
    drawn = [s for s in answer.sequences if s.tokens and s.tokens[-1] in stops]
    logprobs = drawn[0].logprobs if drawn and not wrong else None
    if logprobs is not None:
        gap = float(logprobs[-1] - t.sampler.logprobs((*t.prompt, *drawn[0].tokens))[-1])
        wrong += not abs(gap) <= max(0.05, nats(lab))
        because += f"; the logprob of a stop id that was drawn is {gap:+.3g} nats from its score"
    if not wrong and not ended:
        raise Undecided("no stop id was drawn in 16 samples of 40 tokens")
    return Measured(float(wrong), because, float(due))


def stop_none(lab: Lab) -> Measured:
    """stop=[] goes on to max_tokens, the end token included; that one is drawn is shown by samples without `stop`."""
    t = trained(lab)
    stops: tuple[dict[str, Any], ...] = ({"stop": []}, {})
    free, plain = (
        t.sampler.sample(t.prompt, BATCH, max_tokens=40, temperature=1.0, seed=26, **stop).sequences for stop in stops
    )
    short = sum(len(sequence.tokens) != 40 or sequence.stopped for sequence in free)
    ended = sum(sequence.stopped for sequence in plain)
    because = f"with stop=[] {short} of {len(free)} samples ended before 40 tokens; without stop {ended} did"
    if not short and not ended:
        raise Undecided(f"{because}: no end token was drawn")
    return Measured(float(short), because, float(ended))


def stop_string(lab: Lab) -> Measured:
    """Any of two stop strings ends samples early, with the reason stop, at the token that completes it."""
    t = trained(lab)
    tokenizer = _tokenizer(t)
    for text in ("e", "a", " ", "t", "\n", "1"):
        ended, wrong = _stopped_by(t, text, tokenizer)
        if wrong or ended:
            break
    else:
        raise Undecided(
            "no short string ended a sample, and the model's tokenizer is not at hand to say whether one was due"
        )
    across = "" if wrong or tokenizer is None else _between_tokens(t, tokenizer)
    if across:
        text, (ended, wrong) = across, _stopped_by(t, across, tokenizer)
    if wrong:
        return Measured(
            float(len(wrong)), f"stop={[NEVER, text]}: {len(wrong)} of 8 samples end elsewhere, as {wrong[0]!r}"
        )
    return Measured(0.0, f"stop={[NEVER, text]} ended {ended} of 8 samples early", float(ended))


def _stopped_by(t: Trained, text: str, tokenizer: Any) -> tuple[int, list[str]]:
    """How many of 8 samples end with the reason stop, and those that end elsewhere than where `text` is complete.

    Strings come on top of the model's end tokens, which are special tokens.
    """
    samples = t.sampler.sample(t.prompt, 8, max_tokens=32, temperature=1.0, seed=28, stop=[NEVER, text]).sequences
    wrong: list[str] = []
    for sample in samples:
        if tokenizer is None:
            continue
        decoded, before = (tokenizer.decode(list(tokens)) for tokens in (sample.tokens, sample.tokens[:-1]))
        other = sample.stopped and text not in decoded and sample.tokens[-1] not in tokenizer.all_special_ids
        if text in before or other or (text in decoded and not sample.stopped):
            wrong.append(decoded)
    return sum(sample.stopped for sample in samples), wrong


def _between_tokens(t: Trained, tokenizer: Any) -> str:
    """Two characters of these samples, where nothing stops them, in two tokens; empty where there are none."""

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    for sequence in t.sampler.sample(t.prompt, 8, max_tokens=32, temperature=1.0, seed=28, stop=[NEVER]).sequences:
        for place in range(4, len(sequence.tokens) - 1):
            one, other = (decode([token]) for token in sequence.tokens[place : place + 2])
            text = one[-1:] + other[:1]
            inside = text in one or text in other or text in decode(sequence.tokens[:place])
            plain = len(text) == 2 and text.isascii() and text.isprintable()
            if plain and not inside and text in decode(sequence.tokens[: place + 2]):
                return text
    return ""


def _tokenizer(t: Trained) -> Any:
    """The model's tokenizer where the service names one in a local folder, else None: nothing is downloaded."""
    folder = str(getattr(t.trainer.info().model_data, "tokenizer_id", "") or "")
    return t.trainer.client.get_tokenizer() if os.path.isdir(folder) else None


CHECKS = {
    "sampling/three_ways": three_ways,
    "sampling/temperature_logprobs": temperature_logprobs,
    "sampling/greedy": greedy,
    "sampling/seed_repeats": seed_repeats,
    "sampling/seed_distinct": seed_distinct,
    "sampling/seed_neighbours": seed_neighbours,
    "sampling/unseeded": unseeded,
    "sampling/stop_token": stop_token,
    "sampling/stop_none": stop_none,
    "sampling/stop_string": stop_string,
    "sampling/base_model": base_model,
    "sampling/prompt_logprobs": prompt_logprobs,
    "sampling/topk_logprobs": topk_logprobs,
}
