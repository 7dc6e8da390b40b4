"""value: what a pass returns. `loss:sum` against float64 sums over the logprobs that came with it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from paritygate.service.client import Array, Datum, Pass
from paritygate.service.connection import Broken, NoAnswer, Refusal
from paritygate.service.lab import Lab, f32
from paritygate.service.oracles import CISPO_DEFAULTS, LOSSES, PPO_DEFAULTS
from paritygate.service.outcome import Measured, Undecided

MANY = 1030  # the SDK sends at most 1024 datums a request
POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


def weighted_data(lab: Lab) -> list[Datum]:
    """cross_entropy with fractional, negative and zero weights, and some above 1."""
    pattern = np.array([0.25, -1.5, 0.0, 1.0, 2.5, 0.7])
    return [d.with_inputs(weights=f32(np.resize(pattern, len(d.tokens)))) for d in lab.data(2, 16, salt=10)]


def cross_entropy(lab: Lab) -> Measured:
    """loss:sum = -sum(weights * logprobs), of a few datums and of more than one request or piece of work takes."""
    # Ids that are often those of padding and of ends are targets as others are; and one weight is large.
    low = Datum(lab.tokens(6, 10), np.arange(6) % 5, {"weights": f32([0.7, 1.0, 12.5, -1.5, 0.25, 0.7])})
    few = _of_both_verbs(lab, "cross_entropy", [*weighted_data(lab), low], {})
    if few.figure > max(1e-4, few.noise) or lab.small:
        return few
    data = lab.weighted([lab.datum(2, 40_000 + index) for index in range(5)], 1.0) * (MANY // 5)
    many = value_of(lab, "cross_entropy", data, {}, lab.held().forward(data))
    many = replace(many, because=f"of {MANY} datums {many.because}")
    return max(few, many, key=lambda measured: measured.figure / max(measured.noise, 1e-4))


def several_targets(lab: Lab) -> Measured:
    """(N, K): a logprob for each of K targets of a position, those of the first column as with (N,), and their sum."""
    data: list[Datum] = []
    for datum in weighted_data(lab):
        others = np.stack([np.roll(datum.targets, shift) for shift in (0, 1, 2)], axis=1)
        weights = datum.inputs["weights"][:, None] * np.array([1.0, -0.5, 0.25])
        data.append(Datum(datum.tokens, others, {"weights": f32(weights)}))
    out = lab.held().forward(data)
    alone = lab.logprobs(weighted_data(lab))
    columns = max(float(np.abs(k[:, 0] - one).max()) for k, one in zip(out.logprobs, alone, strict=True))
    if columns > max(1e-4, 12 * lab.noise.logprob):
        return Measured(columns, f"the first of K targets has a logprob {columns:.3g} nats from that of one target")
    return value_of(lab, "cross_entropy", data, {}, out)


def policy(lab: Lab, loss: str) -> Measured:
    """The loss with its options given, and with advantages of 15 to 25 in place of .6 to 1."""
    data, config = lab.policy_data(loss, 1.0)
    measured = _of_both_verbs(lab, loss, data, config)
    if measured.figure > max(1e-4, measured.noise):
        return measured
    config = {name: 25 * value if name == "beta" else value for name, value in config.items()}
    large = [d.with_inputs(**{**d.inputs, "advantages": f32(25 * d.inputs["advantages"])}) for d in data]
    other = value_of(lab, loss, large, config, lab.held().forward(large, loss, config))
    other = replace(other, because=f"with advantages 25 times as large {other.because}")
    return max(measured, other, key=lambda one: one.figure / max(one.noise, 1e-4))


def _of_both_verbs(lab: Lab, loss: str, data: Sequence[Datum], config: Mapping[str, float]) -> Measured:
    """The value that forward returns; where it is off, what forward_backward returns is told, too."""
    measured = value_of(lab, loss, data, config, lab.held().forward(data, loss, config))
    if measured.figure <= 1e-4:
        return measured
    try:
        other = lab.held().forward_backward(data, loss, config).loss
    except (Refusal, Broken, NoAnswer):
        lab.renew()
        return measured
    return replace(measured, because=f"{measured.because} (forward; forward_backward returns {other})")


def policy_defaults(lab: Lab, loss: str, defaults: Sequence[Mapping[str, float]]) -> Measured:
    """The loss without options: one of the documented defaults."""
    data, _ = lab.policy_data(loss, 1.0)
    out = lab.held().forward(data, loss)
    each = [value_of(lab, loss, data, config, out) for config in defaults]
    best = min(range(len(each)), key=lambda i: each[i].figure)
    low, high = defaults[best].values()
    because = f"without options, held to the documented thresholds {low:g} and {high:g}: {each[best].because}"
    measured = replace(each[best], because=because)
    one = {"clip_high_threshold": high + 0.2}
    try:
        out = lab.held().forward(data, loss, one)
    except Refusal:  # both or none, it says
        return measured
    other = value_of(lab, loss, data, {"clip_low_threshold": low, **one}, out)
    worse = other.figure > max(measured.figure, 0.0001, other.noise)
    return replace(other, because=f"with {one} alone {other.because}") if worse else measured


def forward_is_forward_backward(lab: Lab) -> Measured:
    """Both verbs return the same logprobs and the same loss, for every loss that is served."""
    worst, where, loudest = 0.0, "", 0.0
    for loss in ("cross_entropy", *POLICY_LOSSES):
        data, config = (weighted_data(lab), {}) if loss == "cross_entropy" else lab.policy_data(loss, 1.0)
        try:
            one, other = lab.held().forward(data, loss, config), lab.held().forward_backward(data, loss, config)
        except (Refusal, NoAnswer):  # that a loss has no answer is told by its own obligations
            lab.renew()
            continue
        gaps = [float(np.abs(one.flat - other.flat).max())]
        if one.loss is not None and other.loss is not None:
            weights = np.concatenate([o.weights.ravel() for o in lab.oracles(loss, data, one.logprobs, config)])
            gaps.append(abs(one.loss - other.loss) / float(np.abs(weights).sum()))
        elif (one.loss is None) != (other.loss is None):
            gaps.append(np.inf)
        if max(gaps) >= worst:
            worst, where = max(gaps), loss
        loudest = max(loudest, float(np.abs(one.flat).max()))
    if not where:
        raise Undecided("no loss is served")
    return Measured(worst, f"forward and forward_backward differ by {worst:.3g} nats ({where})", loudest, _nats(lab))


def policy_logprobs(lab: Lab) -> Measured:
    """The logprobs returned with a policy loss are those returned with cross_entropy, position by position."""
    worst, where, contrast = -1.0, "", np.inf
    for loss in POLICY_LOSSES:
        data, config = lab.policy_data(loss, 1.0)
        try:
            out = lab.held().forward(data, loss, config)
        except Refusal:
            continue
        for got, want in zip(out.logprobs, lab.logprobs(data), strict=True):
            gap = float(np.abs(got - want).max())
            worst, where = (gap, loss) if gap > worst else (worst, where)
            contrast = min(contrast, float(np.abs(np.roll(want, 1) - want).max()))
    if not where:
        raise Undecided("no policy loss is served")
    return Measured(worst, f"{where} returns logprobs {worst:.3g} nats from cross_entropy's", contrast, _nats(lab))


def _nats(lab: Lab) -> float:
    return 10 * lab.noise.logprob


def value_of(lab: Lab, loss: str, data: Sequence[Datum], config: Mapping[str, float], out: Pass) -> Measured:
    """`loss:sum` of `out` against the definition at the logprobs that came with it."""
    if out.loss is None:
        raise Undecided(f"there is no loss:sum among the metrics {sorted(out.metrics)}")
    oracles = lab.oracles(loss, data, out.logprobs, config)
    want = sum(o.value for o in oracles)
    weights = np.concatenate([o.weights.ravel() for o in oracles])
    size = abs(want) + float(np.abs(weights).sum())
    wrong = _wrong(loss, data, out.logprobs, want, len(weights))
    return Measured(
        abs(out.loss - want) / size,
        f"loss:sum is {out.loss:.7g}, the definition gives {want:.7g}",
        min(abs(value - want) / size for value in wrong),
        10 * lab.noise.logprob * _sensitivity(loss, data, out.logprobs, config) / size,
    )


def _sensitivity(loss: str, data: Sequence[Datum], logprobs: Sequence[Array], config: Mapping[str, float]) -> float:
    """|d value / d logprobs|, the stopped ratios moving too: what the value's error is in units of the logprobs'."""
    oracle, step, total = LOSSES[loss], 1e-5, 0.0
    for datum, p in zip(data, logprobs, strict=True):
        for place in np.ndindex(p.shape):
            moved = p.copy()
            moved[place] += step
            total += ((oracle(moved, datum.inputs, config).value - oracle(p, datum.inputs, config).value) / step) ** 2
    return float(np.sqrt(total))


def _wrong(loss: str, data: Sequence[Datum], logprobs: Sequence[Array], want: float, tokens: int) -> list[float]:
    """Values that mistakes would give: half, the other sign, a mean, no ratio, no clipping."""
    values = [want / 2, -want, want / tokens]
    if loss != "cross_entropy":
        plain = LOSSES["importance_sampling"]
        pairs = list(zip(data, logprobs, strict=True))
        values.append(-sum(float((p * d.inputs["advantages"]).sum()) for d, p in pairs))
        if loss != "importance_sampling":
            values.append(sum(plain(p, d.inputs, {}).value for d, p in pairs))
    return values


CHECKS = {
    "value/cross_entropy": cross_entropy,
    "value/several_targets": several_targets,
    **{f"value/{loss}": partial(policy, loss=loss) for loss in POLICY_LOSSES},
    "value/ppo_defaults": partial(policy_defaults, loss="ppo", defaults=(PPO_DEFAULTS,)),
    "value/cispo_defaults": partial(policy_defaults, loss="cispo", defaults=CISPO_DEFAULTS),
    "value/forward_is_forward_backward": forward_is_forward_backward,
    "value/policy_logprobs": policy_logprobs,
}
