"""SDPO, self-distillation from feedback: advantages at token and sequence level, divergences at logit level."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._distributions import Array, Buckets, bucketed, kl_divergence, log_mixture, log_softmax, renormalised

Logprobs = Sequence[float | None] | Array
Mask = Sequence[int] | NDArray[np.generic]

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "token_sum")


# Token and sequence level


def token_advantage(
    teacher_logprobs: Logprobs,
    student_logprobs: Logprobs,
    mask: Mask,
    clip: float = 5.0,
) -> Array:
    """`clip(log q_t - log pi_t, -clip, +clip) * mask_t`, (T,) in nats: minus the gradient of the token KL(pi || sg q).

    Values at mask 0 are never read. ValueError: shapes differ, a mask that is not 0 or 1, clip not positive, and at
    mask 1 NaN, +inf or a student of -inf (the position is named); a teacher of -inf gives -clip.
    Source: SDPO, arXiv 2601.20802, section 3.
    """
    if not clip > 0.0:
        raise ValueError(f"token_advantage: clip is {clip}; it is positive")
    teacher, student, read = _read_logprobs("token_advantage", teacher_logprobs, student_logprobs, mask)
    advantage = np.zeros(len(read))
    for t in np.flatnonzero(read):
        advantage[t] = min(max(teacher[t] - student[t], -clip), clip)
    return advantage


def sequence_advantage(
    teacher_logprobs: Logprobs,
    student_logprobs: Logprobs,
    mask: Mask,
) -> Array:
    """The mean of the unclipped `log q_t - log pi_t` over mask 1, at every mask 1 position, 0 elsewhere; (T,) in nats.

    A sequence without a position to read gives zeros. ValueError as `token_advantage`, and at a teacher of -inf, for
    which no finite mean exists. Source: SDPO, arXiv 2601.20802, sequence-level ablation.
    """
    teacher, student, read = _read_logprobs("sequence_advantage", teacher_logprobs, student_logprobs, mask)
    for t in np.flatnonzero(read):
        if teacher[t] == -math.inf:
            raise ValueError(f"sequence_advantage: the teacher logprob at position {t} is -inf and is not clipped here")
    advantage = np.zeros(len(read))
    if read.any():
        advantage[read] = math.fsum(teacher[read] - student[read]) / int(read.sum())
    return advantage


def hybrid_advantage(grpo: ArrayLike, sdpo: ArrayLike, weight: float) -> Array:
    """`weight * A_grpo + (1 - weight) * A_sdpo`, of equal shapes; ValueError: weight outside [0, 1], shapes differ.

    Source: SDPO, arXiv 2601.20802, figure 11 (weight 0.9).
    """
    a, b = np.asarray(grpo, dtype=np.float64), np.asarray(sdpo, dtype=np.float64)
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"hybrid_advantage: weight is {weight}; it lies in [0, 1]")
    if a.shape != b.shape:
        raise ValueError(f"hybrid_advantage: shapes differ: grpo {a.shape}, sdpo {b.shape}")
    return weight * a + (1.0 - weight) * b


def _read_logprobs(
    name: str,
    teacher_logprobs: Logprobs,
    student_logprobs: Logprobs,
    mask: Mask,
) -> tuple[Array, Array, NDArray[np.bool_]]:
    if not len(teacher_logprobs) == len(student_logprobs) == len(mask):
        raise ValueError(
            f"{name}: shapes differ: teacher {len(teacher_logprobs)}, student {len(student_logprobs)}, mask {len(mask)}"
        )
    read = _mask(name, np.asarray(mask))
    teacher, student = np.full(len(read), math.nan), np.full(len(read), math.nan)
    for t in np.flatnonzero(read).tolist():
        for who, values, row in (("teacher", teacher_logprobs, teacher), ("student", student_logprobs, student)):
            value = values[t]
            if value is None or math.isnan(value) or value == math.inf or (who == "student" and value == -math.inf):
                raise ValueError(f"{name}: the {who} logprob at position {t} is {value}")
            row[t] = value
    return teacher, student, read


def _mask(name: str, mask: NDArray[np.generic]) -> NDArray[np.bool_]:
    for position in np.argwhere((mask != 0) & (mask != 1)):
        raise ValueError(f"{name}: the mask at position {_place(position)} is {mask[tuple(position)]}; it is 0 or 1")
    return mask == 1


def _place(position: Sequence[int] | NDArray[np.intp]) -> str:
    return str(int(position[0])) if len(position) == 1 else str(tuple(int(i) for i in position))


# Logit level


class _Options(NamedTuple):
    divergence: str
    mixture: float
    top_k: int | None
    tail: bool
    aggregation: str


def logit_loss(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    mask: ArrayLike,
    *,
    divergence: str = "reverse_kl",
    mixture: float = 0.5,
    top_k: int | None = None,
    tail: bool = True,
    importance_ratio: ArrayLike | None = None,
    aggregation: str = "token_mean",
) -> float:
    """The divergence of teacher q and student p at mask 1, aggregated; (B, T, V), (B, T, V), (B, T) -> nats.

    `divergence`: forward_kl KL(q||p), reverse_kl KL(p||q), jsd (1-a) KL(p||m) + a KL(q||m) with m = (1-a) p + a q and
    a = `mixture` in (0, 1). `top_k` keeps the student's k largest (ties to the lowest index) with the rest as one
    `tail` bucket, or renormalised. `importance_ratio` (B, T) multiplies each token. `aggregation`: token_mean,
    sequence_mean, sequence_sum, token_sum. Masked positions are never read. ValueError names the place: bad options or
    shapes, top_k > V, a fully masked batch (except token_sum, 0), a row with NaN or +inf or all -inf.
    Source: SDPO, arXiv 2601.20802, section 3; official code at 0e6d5106.
    """
    options = _Options(divergence, mixture, top_k, tail, aggregation)
    return _logit_loss(student_logits, teacher_logits, mask, options, importance_ratio)[0]


def logit_loss_grad(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    mask: ArrayLike,
    *,
    divergence: str = "reverse_kl",
    mixture: float = 0.5,
    top_k: int | None = None,
    tail: bool = True,
    importance_ratio: ArrayLike | None = None,
    aggregation: str = "token_mean",
) -> Array:
    """d `logit_loss` / d student_logits (B, T, V), exactly 0 at masked positions; NaN in a row whose divergence is +inf
    because the teacher excludes what the student does. Teacher and ratio are constants. ValueError as `logit_loss`."""
    options = _Options(divergence, mixture, top_k, tail, aggregation)
    return _logit_loss(student_logits, teacher_logits, mask, options, importance_ratio)[1]


def _logit_loss(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    mask: ArrayLike,
    options: _Options,
    importance_ratio: ArrayLike | None,
) -> tuple[float, Array]:
    student, teacher = np.asarray(student_logits, dtype=np.float64), np.asarray(teacher_logits, dtype=np.float64)
    read = _mask("logit_loss", np.asarray(mask))
    _check_options(student, teacher, read, options)
    weights = _aggregation_weights(read, options.aggregation)
    if importance_ratio is not None:
        weights = weights * _checked_ratio(importance_ratio, read)
    loss, grad = 0.0, np.zeros_like(student)
    for b, t in np.argwhere(read):
        value, row = _row(student[b, t], teacher[b, t], options, f"({b}, {t})")
        if weights[b, t] != 0.0:
            loss += weights[b, t] * value
            grad[b, t] = weights[b, t] * row
    return float(loss), grad


def _row(student: Array, teacher: Array, options: _Options, place: str) -> tuple[float, Array]:
    """The divergence of one row and its gradient with respect to the student's logits, (V,)."""
    log_p = log_softmax(student, f"logit_loss: student row {place}")
    log_q = log_softmax(teacher, f"logit_loss: teacher row {place}")
    kept = np.arange(len(student))
    if options.top_k is not None:
        kept = np.argsort(-student, kind="stable")[: options.top_k]
        if not options.tail:
            log_p = renormalised(student, kept, f"logit_loss: student row {place}")
            log_q = renormalised(teacher, kept, f"logit_loss: teacher row {place}")
    use_tail = options.top_k is not None and options.tail
    p, q = bucketed(log_p, kept, use_tail), bucketed(log_q, kept, use_tail)
    top = int(np.argmax(student))
    with np.errstate(invalid="ignore"):  # -inf - -inf, where the student has no probability
        ratios = (student - student[top]) - (teacher - teacher[top])
    return _divergence(p, q, options), _row_gradient(p, q, np.exp(log_p), kept, ratios, options)


def _divergence(p: Buckets, q: Buckets, options: _Options) -> float:
    if options.divergence == "forward_kl":
        return kl_divergence(q.log, p.log) + q.excess - p.excess
    if options.divergence == "reverse_kl":
        return kl_divergence(p.log, q.log) + p.excess - q.excess
    a = options.mixture
    mixed = log_mixture(p.log, q.log, a)
    mixed_excess = (1.0 - a) * p.excess + a * q.excess
    return (1.0 - a) * (kl_divergence(p.log, mixed) + p.excess - mixed_excess) + a * (
        kl_divergence(q.log, mixed) + q.excess - mixed_excess
    )


def _row_gradient(
    p: Buckets, q: Buckets, student: Array, kept: NDArray[np.intp], ratios: Array, options: _Options
) -> Array:
    """With g = dD/d(bucket) and s = sum_b p_b g_b, entry j has p_j (g_b(j) - s); a capped tail is a constant, g = 0.

    As long as no bucket is a constant, a number added to every g changes nothing; see `_bucket_gradients`.
    """
    weighted, added = _bucket_gradients(p, q, kept, ratios, options)
    if p.capped:
        weighted[-1] = 0.0
    total = weighted.sum()
    if not math.isfinite(total + added):
        return np.full_like(student, math.nan)
    grad = -student * total
    grad[kept] += weighted[: len(kept)]
    if p.has_tail:
        dropped = np.ones(len(student), dtype=bool)
        dropped[kept] = False
        grad[dropped] += student[dropped] * (weighted[-1] / np.exp(p.log[-1]))
        if p.capped:  # what was left out of every g but the tail's
            rest = student[dropped].sum()
            grad[kept] += student[kept] * added * rest
            grad[dropped] -= student[dropped] * added * (1.0 - rest)
    return grad


def _bucket_gradients(
    p: Buckets, q: Buckets, kept: NDArray[np.intp], ratios: Array, options: _Options
) -> tuple[Array, float]:
    """`p_b (g_b - c)` of each bucket, 0 where p_b is 0 and the divergence does not read it, and the number c.

    For the reverse KL g_b = log(p_b/q_b) + 1, and c is that of the student's largest entry: between logits of +-65504
    these are large and nearly equal, and `ratios`, log(p_j/q_j) less that of the largest, come from the logits exactly.
    """
    if options.divergence == "forward_kl":
        return -np.exp(q.log), 0.0
    student, weighted = np.exp(p.log), np.zeros_like(p.log)
    read = student > 0.0
    if options.divergence == "reverse_kl":
        top = int(np.argmax(p.log[: len(kept)]))
        added = p.log[top] - q.log[top]
        g = np.append(ratios[kept], p.log[-1] - q.log[-1] - added) if p.has_tail else ratios[kept]
        weighted[read] = student[read] * g[read]
        return weighted, added + 1.0
    mixed = log_mixture(p.log, q.log, options.mixture)
    weighted[read] = (1.0 - options.mixture) * student[read] * (p.log[read] - mixed[read])
    return weighted, 0.0


def _check_options(student: Array, teacher: Array, read: NDArray[np.bool_], options: _Options) -> None:
    divergence, mixture, top_k, _, _ = options
    if student.ndim != 3 or student.shape != teacher.shape or student.shape[:2] != read.shape:
        raise ValueError(
            f"logit_loss: shapes differ: student_logits {student.shape}, teacher_logits {teacher.shape}, "
            f"mask {read.shape}; (B, T, V), (B, T, V), (B, T) are expected"
        )
    if divergence not in DIVERGENCES:
        raise ValueError(f"logit_loss: divergence is {divergence!r}; it is one of {', '.join(DIVERGENCES)}")
    if divergence == "jsd" and not 0.0 < mixture < 1.0:
        raise ValueError(f"logit_loss: mixture is {mixture}; it lies strictly inside (0, 1)")
    if top_k is not None and (top_k != int(top_k) or not 1 <= top_k <= student.shape[2]):
        raise ValueError(
            f"logit_loss: top_k is {top_k}; it is a whole number in [1, {student.shape[2]}], the vocabulary"
        )


def _aggregation_weights(read: NDArray[np.bool_], aggregation: str) -> Array:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"logit_loss: aggregation is {aggregation!r}; it is one of {', '.join(AGGREGATIONS)}")
    tokens = read.sum(axis=1)
    sequences = int((tokens > 0).sum())
    if sequences == 0 and aggregation != "token_sum":
        raise ValueError(f"logit_loss: every position of the batch is masked; {aggregation} of nothing does not exist")
    weights = np.zeros(read.shape)
    for b, t in np.argwhere(read):
        weights[b, t] = {
            "token_mean": 1.0 / int(tokens.sum()),
            "sequence_mean": 1.0 / (int(tokens[b]) * sequences),
            "sequence_sum": 1.0 / sequences,
            "token_sum": 1.0,
        }[aggregation]
    return weights


def _checked_ratio(importance_ratio: ArrayLike, read: NDArray[np.bool_]) -> Array:
    ratio = np.asarray(importance_ratio, dtype=np.float64)
    if ratio.shape != read.shape:
        raise ValueError(f"logit_loss: importance_ratio has shape {ratio.shape}; {read.shape} is expected")
    for position in np.argwhere(read & ~(np.isfinite(ratio) & (ratio >= 0.0))):
        raise ValueError(f"logit_loss: importance_ratio at {_place(position)} is {ratio[tuple(position)]}")
    return np.where(read, ratio, 0.0)


# Teachers and siblings


def ema(teacher: ArrayLike, student: ArrayLike, rate: float) -> Array:
    """`(1 - rate) teacher + rate student`, on parameters of equal shapes.

    ValueError: rate outside [0, 1], shapes differ. Source: SDPO, arXiv 2601.20802, teacher regularisation.
    """
    return _between("ema", np.asarray(teacher, dtype=np.float64), np.asarray(student, dtype=np.float64), rate)


def trust_region(initial_logits: ArrayLike, student_logits: ArrayLike, rate: float) -> Array:
    """`(1 - rate) initial + rate student`, on logits (..., V): the teacher stays near the initial one.

    ValueError as `ema`. Source: SDPO, arXiv 2601.20802, teacher regularisation.
    """
    initial, student = np.asarray(initial_logits, dtype=np.float64), np.asarray(student_logits, dtype=np.float64)
    return _between("trust_region", initial, student, rate)


def frozen_initial(initial_logits: ArrayLike, student_logits: ArrayLike) -> Array:
    """The initial policy's logits (..., V) as the teacher, whatever the student has become."""
    return _between(
        "frozen_initial", np.asarray(initial_logits, np.float64), np.asarray(student_logits, np.float64), 0.0
    )


def current(initial_logits: ArrayLike, student_logits: ArrayLike) -> Array:
    """The current policy's logits (..., V) as the teacher: the experiment's choice."""
    return _between("current", np.asarray(initial_logits, np.float64), np.asarray(student_logits, np.float64), 1.0)


def _between(name: str, start: Array, end: Array, rate: float) -> Array:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"{name}: rate is {rate}; it lies in [0, 1]")
    if start.shape != end.shape:
        raise ValueError(f"{name}: shapes differ: {start.shape} and {end.shape}")
    if rate in (0.0, 1.0):  # 0 times -inf is NaN
        return (end if rate == 1.0 else start).copy()
    return (1.0 - rate) * start + rate * end


def select_sibling(
    composites: Sequence[float | None], index: int, threshold: float = 0.8, rule: str = "best"
) -> int | None:
    """The sibling of rollout `index` in its group that serves as demonstration, or None where none reaches `threshold`.

    `best`: the highest composite, ties to the lowest index (the experiment's). `first`: the first at or above the
    threshold (the official code at 0e6d5106). Never `index` itself; a composite of None was not judged: passed over.
    ValueError: index outside the group, an unknown rule, a composite or threshold that is NaN.
    """
    if not 0 <= index < len(composites):
        raise ValueError(f"select_sibling: index {index} lies outside the group of {len(composites)}")
    if rule not in ("best", "first"):
        raise ValueError(f"select_sibling: rule is {rule!r}; it is best or first")
    if math.isnan(threshold):
        raise ValueError("select_sibling: threshold is NaN")
    chosen: int | None = None
    for i, composite in enumerate(composites):
        if composite is not None and math.isnan(composite):
            raise ValueError(f"select_sibling: the composite of rollout {i} is NaN")
        if i == index or composite is None or composite < threshold:
            continue
        best = composites[chosen] if chosen is not None else None
        if best is None or (rule == "best" and composite > best):
            chosen = i
    return chosen
