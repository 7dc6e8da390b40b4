"""SDPO, self-distillation from feedback: advantages at token and sequence level, divergences at logit level."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

TAIL_CAP = -1e-7  # the log of the kept mass is capped here, as in the official SDPO code at 0e6d5106
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "token_sum")


# Token and sequence level


def token_advantage(
    teacher_logprobs: Sequence[float | None] | Array,
    student_logprobs: Sequence[float | None] | Array,
    mask: Sequence[int] | NDArray[np.generic],
    clip: float = 5.0,
) -> Array:
    """`clip(log q_t - log pi_t, -clip, +clip) * mask_t`, (T,) in nats; the negative gradient of the token KL(pi || sg q).

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
    teacher_logprobs: Sequence[float | None] | Array,
    student_logprobs: Sequence[float | None] | Array,
    mask: Sequence[int] | NDArray[np.generic],
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
    """`weight * A_grpo + (1 - weight) * A_sdpo`, any equal shapes; ValueError where weight is outside [0, 1] or shapes differ.

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
    teacher_logprobs: Sequence[float | None] | Array,
    student_logprobs: Sequence[float | None] | Array,
    mask: Sequence[int] | NDArray[np.generic],
) -> tuple[Array, Array, NDArray[np.bool_]]:
    if not len(teacher_logprobs) == len(student_logprobs) == len(mask):
        raise ValueError(
            f"{name}: lengths differ: teacher {len(teacher_logprobs)}, student {len(student_logprobs)}, mask {len(mask)}"
        )
    read = _mask(name, np.asarray(mask))
    teacher, student = np.full(len(read), math.nan), np.full(len(read), math.nan)
    for t in np.flatnonzero(read):
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
    """The divergence between teacher q and student p at every mask 1 position, aggregated; (B, T, V), (B, T, V), (B, T) -> nats.

    `divergence`: forward_kl KL(q||p), reverse_kl KL(p||q), jsd (1-a) KL(p||m) + a KL(q||m) with m = (1-a) p + a q and
    a = `mixture` in (0, 1). `top_k` keeps the student's k largest (ties to the lowest index) with the rest as one
    `tail` bucket, or renormalised. `importance_ratio` (B, T) multiplies each token. `aggregation`: token_mean,
    sequence_mean, sequence_sum, token_sum. Masked positions are never read. ValueError names the place: bad options or
    shapes, top_k > V, a fully masked batch (except token_sum, 0), a row with NaN or +inf or all -inf.
    Source: SDPO, arXiv 2601.20802, section 3; official code at 0e6d5106.
    """
    loss, _ = _logit_loss(
        student_logits, teacher_logits, mask, divergence, mixture, top_k, tail, importance_ratio, aggregation
    )
    return loss


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
    _, grad = _logit_loss(
        student_logits, teacher_logits, mask, divergence, mixture, top_k, tail, importance_ratio, aggregation
    )
    return grad


def _logit_loss(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    mask: ArrayLike,
    divergence: str,
    mixture: float,
    top_k: int | None,
    tail: bool,
    importance_ratio: ArrayLike | None,
    aggregation: str,
) -> tuple[float, Array]:
    student, teacher = np.asarray(student_logits, dtype=np.float64), np.asarray(teacher_logits, dtype=np.float64)
    read = _mask("logit_loss", np.asarray(mask))
    _check_options(student, teacher, read, divergence, mixture, top_k)
    weights = _aggregation_weights(read, aggregation)
    if importance_ratio is not None:
        weights = weights * _checked_ratio(importance_ratio, read)
    loss, grad = 0.0, np.zeros_like(student)
    for b, t in np.argwhere(read):
        log_p = log_softmax(student[b, t], f"student row ({b}, {t})")
        log_q = log_softmax(teacher[b, t], f"teacher row ({b}, {t})")
        kept = np.arange(len(log_p)) if top_k is None else np.argsort(-student[b, t], kind="stable")[:top_k]
        use_tail = top_k is not None and tail
        if top_k is not None and not tail:
            log_p = _renormalised(log_p, kept, f"student row ({b}, {t})")
            log_q = _renormalised(log_q, kept, f"teacher row ({b}, {t})")
        p, q = _bucketed(log_p, kept, use_tail), _bucketed(log_q, kept, use_tail)
        if weights[b, t] != 0.0:
            loss += weights[b, t] * _divergence(p, q, divergence, mixture)
            grad[b, t] = weights[b, t] * _row_gradient(p, q, np.exp(log_p), kept, divergence, mixture)
    return float(loss), grad


def log_softmax(logits: ArrayLike, place: str = "row") -> Array:
    """Log-probabilities of one row of logits (V,), -inf entries allowed; ValueError naming `place` for NaN, +inf or all -inf."""
    row = np.asarray(logits, dtype=np.float64)
    if np.isnan(row).any() or (row == math.inf).any():
        raise ValueError(f"{place} holds {'NaN' if np.isnan(row).any() else '+inf'}")
    if row.size == 0 or (row == -math.inf).all():
        raise ValueError(f"{place} is all -inf: it is no distribution")
    top = int(np.argmax(row))
    shifted = row - row[top]
    others = np.delete(np.exp(shifted), top).sum()
    return shifted - np.log1p(others)


class _Buckets(NamedTuple):
    log: Array  # log-probability of each kept entry, then of the tail where there is one
    excess: float  # how far the probabilities sum above 1: not 0 only where the cap acts
    has_tail: bool
    capped: bool


def _bucketed(log_p: Array, kept: NDArray[np.intp], use_tail: bool) -> _Buckets:
    if not use_tail:
        return _Buckets(log_p[kept], 0.0, False, False)
    kept_mass = _log_sum(log_p[kept])
    capped = kept_mass > TAIL_CAP
    log_tail = math.log(-math.expm1(TAIL_CAP if capped else kept_mass))
    excess = math.expm1(kept_mass) - math.expm1(TAIL_CAP) if capped else 0.0
    return _Buckets(np.append(log_p[kept], log_tail), excess, True, capped)


def _renormalised(log_p: Array, kept: NDArray[np.intp], place: str) -> Array:
    total = _log_sum(log_p[kept])
    if total == -math.inf:
        raise ValueError(f"{place} has no probability among the student's top_k: it cannot be renormalised")
    renormalised = np.full_like(log_p, -math.inf)
    renormalised[kept] = log_p[kept] - total
    return renormalised


def _log_sum(logs: Array) -> float:
    top = float(logs.max())
    return top if top == -math.inf else top + math.log(float(np.exp(logs - top).sum()))


def _divergence(p: _Buckets, q: _Buckets, divergence: str, mixture: float) -> float:
    if divergence == "forward_kl":
        return kl_divergence(q.log, p.log) + q.excess - p.excess
    if divergence == "reverse_kl":
        return kl_divergence(p.log, q.log) + p.excess - q.excess
    a = mixture
    mixed = _log_mixture(p.log, q.log, a)
    mixed_excess = (1.0 - a) * p.excess + a * q.excess
    return (1.0 - a) * (kl_divergence(p.log, mixed) + p.excess - mixed_excess) + a * (
        kl_divergence(q.log, mixed) + q.excess - mixed_excess
    )


def kl_divergence(log_a: Array, log_b: Array) -> float:
    """KL(a || b) in nats of two rows of log-probabilities with equal sums; 0 log 0 is 0, a > 0 against b = 0 is +inf.

    Summed as `a log(a/b) - a + b`, whose terms are not negative, so that nearly equal rows keep their digits.
    """
    total = 0.0
    for x, y in zip(log_a.tolist(), log_b.tolist(), strict=True):
        a, b, d = math.exp(x), math.exp(y), x - y
        if a == 0.0:
            total += b
        elif d == math.inf:
            return math.inf
        elif abs(d) < 0.5:
            total += a * _excess_of_exp(-d)
        else:
            total += a * d - a + b
    return total


def _excess_of_exp(x: float) -> float:
    """`exp(x) - 1 - x` without cancellation, for |x| < 0.5, by its Taylor series."""
    term, total = x * x / 2.0, 0.0
    for n in range(3, 20):
        total += term
        term *= x / n
    return total


def _log_mixture(log_p: Array, log_q: Array, a: float) -> Array:
    """log((1-a) p + a q), written from the larger of the two so that nearly equal rows keep their digits."""
    mixed = np.full_like(log_p, -math.inf)
    for i, (x, y) in enumerate(zip(log_p.tolist(), log_q.tolist(), strict=True)):
        if x >= y and x > -math.inf:
            mixed[i] = x + math.log1p(a * math.expm1(y - x))
        elif y > x:
            mixed[i] = y + math.log1p((1.0 - a) * math.expm1(x - y))
    return mixed


def _row_gradient(
    p: _Buckets, q: _Buckets, student: Array, kept: NDArray[np.intp], divergence: str, mixture: float
) -> Array:
    """With g = dD/d(bucket) and s = sum_b p_b g_b, entry j has p_j (g_b(j) - s); a capped tail is a constant, g = 0."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        prob = np.exp(p.log)
        if divergence == "forward_kl":
            weighted = -np.exp(q.log)  # p_b g_b
        elif divergence == "reverse_kl":
            weighted = np.where(prob > 0.0, prob * (p.log - q.log + 1.0), 0.0)
        else:
            mixed = _log_mixture(p.log, q.log, mixture)
            weighted = np.where(prob > 0.0, (1.0 - mixture) * prob * (p.log - mixed), 0.0)
        if p.capped:
            weighted[-1] = 0.0
        total = weighted.sum()
        grad = -student * total
        if p.has_tail:
            dropped = np.ones(len(student), dtype=bool)
            dropped[kept] = False
            grad[dropped] += student[dropped] * (weighted[-1] / prob[-1])
        grad[kept] += weighted[: len(kept)]
    return grad


def _check_options(
    student: Array, teacher: Array, read: NDArray[np.bool_], divergence: str, mixture: float, top_k: int | None
) -> None:
    if student.ndim != 3 or student.shape != teacher.shape or student.shape[:2] != read.shape:
        raise ValueError(
            f"logit_loss: shapes differ: student_logits {student.shape}, teacher_logits {teacher.shape}, mask {read.shape}; "
            "(B, T, V), (B, T, V), (B, T) are expected"
        )
    if divergence not in DIVERGENCES:
        raise ValueError(f"logit_loss: divergence is {divergence!r}; it is one of {', '.join(DIVERGENCES)}")
    if divergence == "jsd" and not 0.0 < mixture < 1.0:
        raise ValueError(f"logit_loss: mixture is {mixture}; it lies strictly inside (0, 1)")
    if top_k is not None and not 1 <= top_k <= student.shape[2]:
        raise ValueError(f"logit_loss: top_k is {top_k}; it lies in [1, {student.shape[2]}], the vocabulary")


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
    """`(1 - rate) teacher + rate student`, on parameters of any equal shapes; ValueError: rate outside [0, 1], shapes differ."""
    return _between("ema", np.asarray(teacher, dtype=np.float64), np.asarray(student, dtype=np.float64), rate)


def trust_region(initial_logits: ArrayLike, student_logits: ArrayLike, rate: float) -> Array:
    """`(1 - rate) initial + rate student`, on logits (..., V): the teacher stays near the initial one; ValueError as `ema`."""
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
    threshold (the official code at 0e6d5106). Never `index` itself; a composite of None was not judged and is passed over.
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
