"""SDPO, self-distillation from feedback: advantages at token and sequence level, divergences at logit level.

Obligations: sdpo/oracle.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks, _distributions
from ._checks import Mask, Row
from ._distributions import Array, Distribution, kl, mixture

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "token_sum")


# Token and sequence level


def advantage(teacher_logprobs: Array, student_logprobs: Array) -> Array:
    """`A_t = log q_t - log pi_t` of the sampled tokens, (T,) in nats; unclipped."""
    return teacher_logprobs - student_logprobs


def token_advantage(teacher_logprobs: Row, student_logprobs: Row, mask: Mask, clip: float = 5.0) -> Array:
    """`clip(log q_t - log pi_t, -clip, +clip) * mask_t`, (T,) in nats: minus the gradient of the token KL(pi || sg q).

    Values at mask 0 are never read. ValueError: shapes differ, a mask that is not 0 or 1, clip not positive, and at
    mask 1 NaN, +inf or a student of -inf (the position is named); a teacher of -inf gives -clip.
    Source: SDPO, arXiv 2601.20802, section 3.
    Obligations: sdpo/token_advantage, sdpo/default_clip, sdpo/refusal, sdpo/constants, sdpo/enumeration.
    """
    if not clip > 0.0:
        raise ValueError(f"token_advantage: clip is {clip}; it is positive")
    q, pi, mask_T = _checks.masked_logprobs("token_advantage", teacher_logprobs, student_logprobs, mask)
    return np.where(mask_T, advantage(q, pi).clip(-clip, clip), 0.0)


def sequence_advantage(teacher_logprobs: Row, student_logprobs: Row, mask: Mask) -> Array:
    """The mean of the unclipped `log q_t - log pi_t` over mask 1, at every mask 1 position, 0 elsewhere; (T,) in nats.

    A sequence without a position to read gives zeros. ValueError as `token_advantage`, and at a teacher of -inf, for
    which no finite mean exists. Source: SDPO, arXiv 2601.20802, sequence-level ablation.
    Obligations: sdpo/sequence_advantage, sdpo/refusal.
    """
    q, pi, mask_T = _checks.masked_logprobs("sequence_advantage", teacher_logprobs, student_logprobs, mask)
    for t in np.flatnonzero(q == -math.inf):
        raise ValueError(f"sequence_advantage: the teacher logprob at position {t} is -inf and is not clipped here")
    mean = _distributions.exact_sum(advantage(q, pi), max(int(mask_T.sum()), 1))
    return np.where(mask_T, mean, 0.0)


def hybrid_advantage(grpo: ArrayLike, sdpo: ArrayLike, weight: float) -> Array:
    """`weight * A_grpo + (1 - weight) * A_sdpo`, of equal shapes; ValueError: weight outside [0, 1], shapes differ.

    Source: SDPO, arXiv 2601.20802, figure 11 (weight 0.9).
    Obligations: sdpo/hybrid_advantage.
    """
    a, b = np.asarray(grpo, dtype=np.float64), np.asarray(sdpo, dtype=np.float64)
    _checks.inside("hybrid_advantage", "weight", weight)
    _checks.equal_shapes("hybrid_advantage", grpo=a, sdpo=b)
    return weight * a + (1.0 - weight) * b


# Logit level


def divergence(p: Distribution, q: Distribution, kind: str, a: float = 0.5) -> float:
    """Of teacher q and student p, in nats: `forward_kl` KL(q || p), `reverse_kl` KL(p || q),
    `jsd` (1-a) KL(p || m) + a KL(q || m) with m = (1-a) p + a q."""
    if kind == "forward_kl":
        return kl(q, p)
    if kind == "reverse_kl":
        return kl(p, q)
    m = mixture(p, q, a)
    return (1.0 - a) * kl(p, m) + a * kl(q, m)


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
    top_k_of: str = "student",
) -> float:
    """The divergence of teacher q and student p at mask 1, aggregated; (B, T, V), (B, T, V), (B, T) -> nats.

    `divergence`: forward_kl KL(q||p), reverse_kl KL(p||q), jsd (1-a) KL(p||m) + a KL(q||m) with m = (1-a) p + a q and
    a = `mixture` in (0, 1). `top_k` keeps the student's k largest (ties to the lowest index) with the rest as one
    `tail` bucket, or renormalised; `top_k_of` "teacher" keeps the teacher's k largest instead. `importance_ratio`
    (B, T) multiplies each token. `aggregation`: token_mean, sequence_mean, sequence_sum, token_sum. Masked positions
    are never read. ValueError names the place: bad options or shapes, top_k > V, a fully masked batch (except
    token_sum, 0), a row with NaN or +inf or all -inf.
    Source: SDPO, arXiv 2601.20802, section 3; official code at 0e6d5106.
    Obligations: sdpo/logit_loss, sdpo/excluded_teacher, sdpo/empty.
    """
    options = _Options(divergence, mixture, top_k, tail, top_k_of, aggregation)
    rows = _weighted_rows(student_logits, teacher_logits, mask, options, importance_ratio)
    return float(sum(weight * _row_value(row, options) for _, weight, row in rows))


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
    top_k_of: str = "student",
) -> Array:
    """d `logit_loss` / d student_logits (B, T, V), exactly 0 at masked positions; NaN in a row whose divergence is +inf
    because the teacher excludes what the student does. Teacher and ratio are constants. ValueError as `logit_loss`.
    Obligations: sdpo/logit_gradient, sdpo/teacher_top_k, sdpo/factor, sdpo/padded_vocabulary, sdpo/enumeration,
    sdpo/service_weights, sdpo/service_gradient.
    """
    options = _Options(divergence, mixture, top_k, tail, top_k_of, aggregation)
    rows = _weighted_rows(student_logits, teacher_logits, mask, options, importance_ratio)
    grad = np.zeros(np.shape(student_logits))
    for at, weight, row in rows:
        grad[at] = weight * _row_gradient(row, options)
    return grad


class _Options(NamedTuple):
    divergence: str
    mixture: float
    top_k: int | None
    tail: bool
    top_k_of: str
    aggregation: str


class _Row(NamedTuple):
    student: Array  # logits (V,)
    teacher: Array
    log_p: Array  # log-probabilities (V,) of the student, of the kept entries alone where they are renormalised
    kept: NDArray[np.intp]
    p: Distribution
    q: Distribution


def _weighted_rows(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    mask: ArrayLike,
    options: _Options,
    importance_ratio: ArrayLike | None,
) -> list[tuple[tuple[int, ...], float, _Row]]:
    """Each position (b, t) at mask 1 with what its divergence is multiplied with, where that is not 0."""
    student, teacher = np.asarray(student_logits, dtype=np.float64), np.asarray(teacher_logits, dtype=np.float64)
    mask_BT = _checks.zero_or_one("logit_loss", np.asarray(mask))
    _check_options(student, teacher, mask_BT, options)
    weights = aggregation_weights(mask_BT, options.aggregation)
    if importance_ratio is not None:
        weights = weights * _checks.ratios("logit_loss", importance_ratio, mask_BT)
    rows = [(at, _row(student[at], teacher[at], options, f"{at}")) for at in map(tuple, np.argwhere(mask_BT).tolist())]
    return [(at, weights[at], row) for at, row in rows if weights[at] != 0.0]


def _row(student: Array, teacher: Array, options: _Options, place: str) -> _Row:
    """One row's distributions over the kept entries, and the tail where there is one."""
    log_p = _distributions.log_softmax(student, f"logit_loss: student row {place}")
    log_q = _distributions.log_softmax(teacher, f"logit_loss: teacher row {place}")
    kept = np.arange(len(student))
    if options.top_k is not None:
        ranked = teacher if options.top_k_of == "teacher" else student
        kept = np.argsort(-ranked, kind="stable")[: options.top_k]
        if not options.tail:
            log_p = _distributions.renormalised(student, kept, f"logit_loss: student row {place}", options.top_k_of)
            log_q = _distributions.renormalised(teacher, kept, f"logit_loss: teacher row {place}", options.top_k_of)
    use_tail = options.top_k is not None and options.tail
    p, q = (_distributions.bucketed(row, kept, use_tail) for row in (log_p, log_q))
    return _Row(student, teacher, log_p, kept, p, q)


def _row_value(row: _Row, options: _Options) -> float:
    return divergence(row.p, row.q, options.divergence, options.mixture)


def _row_gradient(row: _Row, options: _Options) -> Array:
    """d `divergence` of a row / d the student's logits, (V,)."""
    student, teacher, log_p, kept, p, q = row
    if options.divergence == "forward_kl":
        slopes = _distributions.forward_kl_slopes(p, q)
    elif options.divergence == "reverse_kl":
        top = int(kept[np.argmax(student[kept])])
        with np.errstate(over="ignore", invalid="ignore"):  # -inf - -inf, where the student has no probability
            log_ratio = (student - student[top]) - (teacher - teacher[top])
        slopes = _distributions.reverse_kl_slopes(p, q, log_ratio[kept])
    else:
        slopes = _distributions.jsd_slopes(p, q, options.mixture)
    return _distributions.logit_gradient(p, np.exp(log_p), kept, slopes)


def _check_options(student: Array, teacher: Array, mask: NDArray[np.bool_], options: _Options) -> None:
    if student.ndim != 3 or student.shape != teacher.shape or student.shape[:2] != mask.shape:
        raise ValueError(
            f"logit_loss: shapes differ: student_logits {student.shape}, teacher_logits {teacher.shape}, "
            f"mask {mask.shape}; (B, T, V), (B, T, V), (B, T) are expected"
        )
    _checks.one_of("logit_loss", "divergence", options.divergence, DIVERGENCES)
    _checks.one_of("logit_loss", "top_k_of", options.top_k_of, ("student", "teacher"))
    if options.divergence == "jsd" and not 0.0 < options.mixture < 1.0:
        raise ValueError(f"logit_loss: mixture is {options.mixture}; it lies strictly inside (0, 1)")
    top_k = options.top_k
    if top_k is not None and (top_k != int(top_k) or not 1 <= top_k <= student.shape[2]):
        raise ValueError(
            f"logit_loss: top_k is {top_k}; it is a whole number in [1, {student.shape[2]}], the vocabulary"
        )


def aggregation_weights(mask: NDArray[np.bool_], aggregation: str) -> Array:
    """What each token's divergence is multiplied with, (B, T), 0 at mask 0: `token_mean` 1 / all tokens,
    `sequence_mean` 1 / (its sequence's tokens x sequences with a token), `sequence_sum` 1 / such sequences,
    `token_sum` 1. ValueError: another name; a fully masked batch, except for `token_sum`."""
    _checks.one_of("logit_loss", "aggregation", aggregation, AGGREGATIONS)
    one, tokens = mask.astype(np.float64), mask.sum(axis=1, keepdims=True)
    sequences = int((tokens > 0).sum())
    if sequences == 0 and aggregation != "token_sum":
        raise ValueError(f"logit_loss: every position of the batch is masked; {aggregation} of nothing does not exist")
    if aggregation == "token_mean":
        return one / int(tokens.sum())
    if aggregation == "sequence_mean":
        return one / (np.maximum(tokens, 1) * sequences)
    return one / sequences if aggregation == "sequence_sum" else one


# Teachers and siblings


def ema(teacher: ArrayLike, student: ArrayLike, rate: float) -> Array:
    """`(1 - rate) teacher + rate student`, on parameters of equal shapes.

    ValueError: rate outside [0, 1], shapes differ. Source: SDPO, arXiv 2601.20802, teacher regularisation.
    Obligations: sdpo/teacher.
    """
    return _between("ema", np.asarray(teacher, dtype=np.float64), np.asarray(student, dtype=np.float64), rate)


def trust_region(initial_logits: ArrayLike, student_logits: ArrayLike, rate: float) -> Array:
    """`(1 - rate) initial + rate student`, on logits (..., V): the teacher stays near the initial one.

    ValueError as `ema`. Source: SDPO, arXiv 2601.20802, teacher regularisation.
    Obligations: sdpo/teacher.
    """
    initial, student = np.asarray(initial_logits, dtype=np.float64), np.asarray(student_logits, dtype=np.float64)
    return _between("trust_region", initial, student, rate)


def frozen_initial(initial_logits: ArrayLike, student_logits: ArrayLike) -> Array:
    """The initial policy's logits (..., V) as the teacher, whatever the student has become.

    Obligations: sdpo/unmixed_teacher.
    """
    return _between(
        "frozen_initial", np.asarray(initial_logits, np.float64), np.asarray(student_logits, np.float64), 0.0
    )


def current(initial_logits: ArrayLike, student_logits: ArrayLike) -> Array:
    """The current policy's logits (..., V) as the teacher: the experiment's choice.

    Obligations: sdpo/unmixed_teacher.
    """
    return _between("current", np.asarray(initial_logits, np.float64), np.asarray(student_logits, np.float64), 1.0)


def _between(name: str, start: Array, end: Array, rate: float) -> Array:
    _checks.inside(name, "rate", rate)
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
    Composites and threshold are compared to 12 decimals.
    ValueError: index outside the group, an unknown rule, a composite or threshold that is NaN.
    Obligations: sdpo/sibling.
    """
    if not 0 <= index < len(composites):
        raise ValueError(f"select_sibling: index {index} lies outside the group of {len(composites)}")
    if rule not in ("best", "first"):
        raise ValueError(f"select_sibling: rule is {rule!r}; it is best or first")
    if math.isnan(threshold):
        raise ValueError("select_sibling: threshold is NaN")
    # means of decimal scores: (0.6 + 0.8 + 1.0) / 3, in float64 0.7999999999999999, is 0.8
    composites, threshold = [c if c is None else round(c, 12) for c in composites], round(threshold, 12)
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
