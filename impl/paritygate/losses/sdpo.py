"""SDPO, self-distillation from feedback: advantages at token and sequence level, divergences at logit level."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import as_float, as_mask, refuse_where, result_dtype, same_shape
from ._logit_level import AGGREGATIONS, DIVERGENCES, logit_loss, logit_loss_grad
from ._service_weights import ServiceWeights, cross_entropy_weights

__all__ = [
    "AGGREGATIONS",
    "DIVERGENCES",
    "ServiceWeights",
    "cross_entropy_weights",
    "current",
    "ema",
    "frozen_initial",
    "hybrid_advantage",
    "logit_loss",
    "logit_loss_grad",
    "select_sibling",
    "sequence_advantage",
    "token_advantage",
    "trust_region",
]

Logprobs = Tensor | Sequence[float | None]


# Token and sequence level


def token_advantage(
    teacher_logprobs: Logprobs, student_logprobs: Logprobs, mask: Tensor | Sequence[int], clip: float = 5.0
) -> Tensor:
    """`clip(log q_t - log pi_t, -clip, +clip) * mask_t`, constants (..., T) in nats: minus the token KL's gradient.

    Values at mask 0 are never read and may be NaN. ValueError: shapes differ, a mask that is not 0 or 1, clip not
    positive, and at mask 1 NaN, +inf or a student of -inf (the position is named); a teacher of -inf gives -clip.
    Source: SDPO, arXiv 2601.20802, section 3.
    """
    if not clip > 0.0:
        raise ValueError(f"token_advantage: clip is {clip}; it is positive")
    teacher, student, read = _read_logprobs("token_advantage", teacher_logprobs, student_logprobs, mask)
    advantage = (teacher.double() - student.double()).clamp(-clip, clip)
    return torch.where(read, advantage, 0.0).to(result_dtype(teacher, student))


def sequence_advantage(teacher_logprobs: Logprobs, student_logprobs: Logprobs, mask: Tensor | Sequence[int]) -> Tensor:
    """The mean of the unclipped `log q_t - log pi_t` over mask 1 where the mask is 1, else 0; (..., T) in nats.

    A sequence without a position to read gives zeros. ValueError as `token_advantage`, and at a teacher of -inf, for
    which no finite mean exists. Source: SDPO, arXiv 2601.20802, sequence-level ablation.
    """
    teacher, student, read = _read_logprobs("sequence_advantage", teacher_logprobs, student_logprobs, mask)
    refuse_where(
        read & (teacher == -math.inf), teacher, "sequence_advantage: the teacher logprob", "; it is not clipped"
    )
    difference = torch.where(read, teacher.double() - student.double(), 0.0)
    mean = difference.sum(-1, keepdim=True) / read.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(read, mean, 0.0).to(result_dtype(teacher, student))


def hybrid_advantage(grpo: Tensor, sdpo: Tensor, weight: float) -> Tensor:
    """`weight * A_grpo + (1 - weight) * A_sdpo`, of equal shapes; ValueError: weight outside [0, 1], shapes differ.

    Source: SDPO, arXiv 2601.20802, figure 11 (weight 0.9).
    """
    a, b = as_float(grpo, "grpo").detach(), as_float(sdpo, "sdpo").detach()
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"hybrid_advantage: weight is {weight}; it lies in [0, 1]")
    same_shape("hybrid_advantage", grpo=a, sdpo=b)
    return (weight * a.double() + (1.0 - weight) * b.double()).to(result_dtype(a, b))


def _read_logprobs(
    name: str, teacher_logprobs: Logprobs, student_logprobs: Logprobs, mask: Tensor | Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    teacher = as_float(teacher_logprobs, f"{name}: teacher").detach()
    student = as_float(student_logprobs, f"{name}: student").detach()
    read = as_mask(mask, student, name)
    same_shape(name, teacher=teacher, student=student, mask=read)
    for who, values in (("teacher", teacher), ("student", student)):
        bad = values.isnan() | (values == math.inf)
        if who == "student":
            bad |= values == -math.inf  # it was sampled
        refuse_where(read & bad, values, f"{name}: the {who} logprob")
    return teacher, student, read


# Teachers and siblings


def ema(teacher: Tensor, student: Tensor, rate: float) -> Tensor:
    """`(1 - rate) teacher + rate student`, on parameters of equal shapes, in the teacher's dtype, a constant.

    ValueError: rate outside [0, 1], shapes differ. Source: SDPO, arXiv 2601.20802, teacher regularisation.
    """
    return _between("ema", teacher, student, rate)


def trust_region(initial_logits: Tensor, student_logits: Tensor, rate: float) -> Tensor:
    """`(1 - rate) initial + rate student`, on logits (..., V), a constant: the teacher stays near the initial one.

    ValueError as `ema`. Source: SDPO, arXiv 2601.20802, teacher regularisation.
    """
    return _between("trust_region", initial_logits, student_logits, rate)


def frozen_initial(initial_logits: Tensor, student_logits: Tensor) -> Tensor:
    """The initial policy's logits (..., V) as the teacher, a constant, whatever the student has become."""
    return _between("frozen_initial", initial_logits, student_logits, 0.0)


def current(initial_logits: Tensor, student_logits: Tensor) -> Tensor:
    """The current policy's logits (..., V) as the teacher, a constant: the experiment's choice."""
    return _between("current", initial_logits, student_logits, 1.0)


def _between(name: str, start: Tensor, end: Tensor, rate: float) -> Tensor:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"{name}: rate is {rate}; it lies in [0, 1]")
    start, end = as_float(start, name).detach(), as_float(end, name).detach()
    same_shape(name, start=start, end=end)
    if rate in (0.0, 1.0):  # 0 times -inf is NaN
        return (end if rate == 1.0 else start).to(start.dtype, copy=True)
    return ((1.0 - rate) * start.double() + rate * end.double()).to(start.dtype)


def select_sibling(
    composites: Sequence[float | None] | Tensor, index: int, threshold: float = 0.8, rule: str = "best"
) -> int | None:
    """The sibling of rollout `index` in its group that serves as demonstration, or None where none reaches `threshold`.

    `best`: the highest composite, ties to the lowest index (the experiment's). `first`: the first at or above the
    threshold (the official code at 0e6d5106). Never `index` itself; a composite of None was not judged and is passed
    over. ValueError: index outside the group, an unknown rule, a composite or threshold that is NaN.
    """
    group: list[float | None] = composites.tolist() if isinstance(composites, Tensor) else list(composites)
    if not 0 <= index < len(group):
        raise ValueError(f"select_sibling: index {index} lies outside the group of {len(group)}")
    if rule not in ("best", "first"):
        raise ValueError(f"select_sibling: rule is {rule!r}; it is best or first")
    if math.isnan(threshold):
        raise ValueError("select_sibling: threshold is NaN")
    for i, composite in enumerate(group):
        if composite is not None and math.isnan(composite):
            raise ValueError(f"select_sibling: the composite of rollout {i} is NaN")
    reached = [(c, i) for i, c in enumerate(group) if i != index and c is not None and c >= threshold]
    if not reached:
        return None
    return reached[0][1] if rule == "first" else max(reached, key=lambda pair: (pair[0], -pair[1]))[1]
