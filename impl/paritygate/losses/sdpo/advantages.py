"""SDPO's advantages at token and sequence level, and their mixture with GRPO's."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import as_float, as_mask, refuse_where, result_dtype, same_shape
from ..numerics import total

Logprobs = Tensor | Sequence[float | None]


def token_advantage(
    teacher_logprobs: Logprobs, student_logprobs: Logprobs, mask: Tensor | Sequence[int], clip: float = 5.0
) -> Tensor:
    """`clip(log q_t - log pi_t, -clip, +clip) * mask_t`, constants (..., T) in nats: minus the token KL's gradient.

    Values at mask 0 are never read and may be NaN. ValueError: shapes differ, a mask that is not 0 or 1, clip not
    positive, and at mask 1 NaN, +inf or a student of -inf (the position is named); a teacher of -inf gives -clip.
    Source: SDPO, arXiv 2601.20802, section 3.
    Obligations: sdpo/token_advantage, sdpo/default_clip, sdpo/refusal, sdpo/constants, sdpo/enumeration.
    """
    if not clip > 0.0:
        raise ValueError(f"token_advantage: clip is {clip}; it is positive")
    teacher, student, token_mask = _read_logprobs("token_advantage", teacher_logprobs, student_logprobs, mask)
    advantage = (teacher.double() - student.double()).clamp(-clip, clip)
    return torch.where(token_mask, advantage, 0.0).to(result_dtype(teacher, student))


def sequence_advantage(teacher_logprobs: Logprobs, student_logprobs: Logprobs, mask: Tensor | Sequence[int]) -> Tensor:
    """The mean of the unclipped `log q_t - log pi_t` over mask 1 where the mask is 1, else 0; (..., T) in nats.

    A sequence without a position to read gives zeros. ValueError as `token_advantage`, and at a teacher of -inf, for
    which no finite mean exists. Source: SDPO, arXiv 2601.20802, sequence-level ablation.
    Obligations: sdpo/sequence_advantage, sdpo/refusal, sdpo/constants.
    """
    teacher, student, token_mask = _read_logprobs("sequence_advantage", teacher_logprobs, student_logprobs, mask)
    refuse_where(
        token_mask & (teacher == -math.inf), teacher, "sequence_advantage: the teacher logprob", "; it is not clipped"
    )
    difference = torch.where(token_mask, teacher.double() - student.double(), 0.0)
    mean = total(difference, -1, token_mask.sum(-1, keepdim=True).clamp(min=1))
    return torch.where(token_mask, mean, 0.0).to(result_dtype(teacher, student))


def hybrid_advantage(grpo: Tensor, sdpo: Tensor, weight: float) -> Tensor:
    """`weight * A_grpo + (1 - weight) * A_sdpo`, of equal shapes; ValueError: weight outside [0, 1], shapes differ.

    Source: SDPO, arXiv 2601.20802, figure 11 (weight 0.9).
    Obligations: sdpo/hybrid_advantage, sdpo/constants.
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
    token_mask = as_mask(mask, student, name)
    same_shape(name, teacher=teacher, student=student, mask=token_mask)
    for who, values in (("teacher", teacher), ("student", student)):
        bad = values.isnan() | (values == math.inf)
        if who == "student":
            bad |= values == -math.inf  # it was sampled
        refuse_where(token_mask & bad, values, f"{name}: the {who} logprob")
    return teacher, student, token_mask
