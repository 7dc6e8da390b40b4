"""SDPO at logit level: the divergence of whole next-token distributions, aggregated as named."""

import torch
from torch import Tensor

from .. import engines
from ..buckets import DIVERGENCES, Options
from ..checks import as_float, as_mask, place, refuse_where, result_dtype, rows_are_distributions, same_shape
from .divergence import RowDivergence, engine_for

OTHER = {"student": "teacher", "teacher": "student"}
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "token_sum")


def logit_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    divergence: str = "reverse_kl",
    mixture: float = 0.5,
    top_k: int | None = None,
    tail: bool = True,
    importance_ratio: Tensor | None = None,
    aggregation: str = "token_mean",
    top_k_of: str = "student",
    validate: bool = True,
) -> Tensor:
    """The divergence of teacher q and student p at mask 1, aggregated: logits (..., T, V), mask (..., T) -> nats ().

    `divergence`: forward_kl KL(q||p), reverse_kl KL(p||q), jsd (1-a) KL(p||m) + a KL(q||m) with m = (1-a) p + a q and
    a = `mixture` in (0, 1). `top_k` keeps the student's k largest (ties to the lowest index), or with `top_k_of`
    "teacher" the teacher's, the rest as one `tail` bucket, or renormalised. `importance_ratio` (..., T) multiplies
    each token. `aggregation`: token_mean, sequence_mean, sequence_sum, token_sum. Differentiable in the
    student alone; masked positions are never read.
    ValueError names the place: bad options or shapes, top_k > V; with `validate` (which waits for the device) a fully
    masked batch (except token_sum, 0) and a row with NaN or +inf or all -inf.
    Source: SDPO, arXiv 2601.20802, section 3.
    Obligations: sdpo/logit_loss, sdpo/logit_gradient, sdpo/teacher_top_k, sdpo/excluded_teacher, sdpo/empty,
    sdpo/constants, sdpo/padded_vocabulary, sdpo/enumeration.
    """
    _check_options(student_logits, teacher_logits, divergence, mixture, top_k, top_k_of)
    token_mask = as_mask(mask, student_logits, "logit_loss", validate=validate)
    if token_mask.shape != student_logits.shape[:-1]:
        raise ValueError(
            f"logit_loss: mask has shape {tuple(token_mask.shape)}; {tuple(student_logits.shape[:-1])} is expected"
        )
    weights = _aggregation_weights(token_mask, aggregation, validate)
    if importance_ratio is not None:
        weights = weights * _checked_ratio(importance_ratio, token_mask, validate)
    vocabulary = student_logits.shape[-1]
    student, teacher = student_logits.reshape(-1, vocabulary), teacher_logits.detach().reshape(-1, vocabulary)
    row_mask, weights = token_mask.flatten(), weights.flatten()
    options = Options(divergence, mixture, top_k, tail, top_k_of)
    places: Tensor | None = None
    if validate:  # having waited for the device, drop the masked rows
        places = torch.ones_like(token_mask).nonzero()
        if not bool(row_mask.all()) and engine_for(student, teacher, options) is engines.float64:
            student, teacher, places = student[row_mask], teacher[row_mask], places[row_mask]
            weights, row_mask = weights[row_mask], row_mask[row_mask]
    checked = top_k is not None and not tail  # whose teacher is read at the student's top k alone
    if places is not None and checked:
        _refuse_no_distributions(student, teacher, row_mask, places)
    values: Tensor = RowDivergence.apply(student, teacher, row_mask, options)
    if places is not None and not checked:  # a row that is no distribution comes out as NaN, infinite or 0
        seen = values.detach()
        if bool((row_mask & ~(seen.isfinite() & (seen != 0))).any()):
            _refuse_no_distributions(student, teacher, row_mask, places)
    if places is not None and top_k is not None and not tail:
        for i in values.detach().isnan().nonzero()[:1].flatten().tolist():
            where = place(places[i].tolist())
            raise ValueError(
                f"logit_loss: {OTHER[top_k_of]} row {where} has no probability among the {top_k_of}'s top_k"
            )
    return torch.where(weights == 0, 0.0, weights * values).sum().to(result_dtype(student_logits))


def _refuse_no_distributions(student: Tensor, teacher: Tensor, row_mask: Tensor, places: Tensor) -> None:
    for name, logits in (("student", student), ("teacher", teacher)):
        top = torch.where(row_mask, logits.detach().amax(-1), 0.0)
        rows_are_distributions(top[:, None], f"logit_loss: {name}", places)


def logit_loss_grad(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    divergence: str = "reverse_kl",
    mixture: float = 0.5,
    top_k: int | None = None,
    tail: bool = True,
    importance_ratio: Tensor | None = None,
    aggregation: str = "token_mean",
    top_k_of: str = "student",
    validate: bool = True,
) -> Tensor:
    """d `logit_loss` / d student_logits, of their shape and dtype, exactly 0 at masked positions.

    ValueError as `logit_loss`. NaN in a row whose divergence is +inf because the teacher excludes an entry. However
    large the logits, a slope that the dtype holds is there; one beyond it is infinite. In float64 log-probabilities
    beyond 1.8e308 are -inf: to a teacher so far from 0 an entry is one that it excludes.
    Obligations: sdpo/logit_gradient.
    """
    leaf = student_logits.detach().requires_grad_()
    with torch.enable_grad():
        loss = logit_loss(
            leaf,
            teacher_logits,
            mask,
            divergence=divergence,
            mixture=mixture,
            top_k=top_k,
            tail=tail,
            top_k_of=top_k_of,
            importance_ratio=importance_ratio,
            aggregation=aggregation,
            validate=validate,
        )
    return torch.autograd.grad(loss, leaf)[0]


def _check_options(
    student: Tensor, teacher: Tensor, divergence: str, mixture: float, top_k: int | None, top_k_of: str
) -> None:
    if student.ndim < 2 or student.shape != teacher.shape or student.shape[-1] == 0:
        raise ValueError(
            f"logit_loss: shapes differ: student_logits {tuple(student.shape)}, teacher_logits {tuple(teacher.shape)}; "
            "(..., T, V) are expected"
        )
    if not (student.is_floating_point() and teacher.is_floating_point()):
        raise ValueError(f"logit_loss: logits are {student.dtype} and {teacher.dtype}; floating point is expected")
    if divergence not in DIVERGENCES:
        raise ValueError(f"logit_loss: divergence is {divergence!r}; it is one of {', '.join(DIVERGENCES)}")
    if top_k_of not in ("student", "teacher"):
        raise ValueError(f"logit_loss: top_k_of is {top_k_of!r}; it is student or teacher")
    if divergence == "jsd" and not 0.0 < mixture < 1.0:
        raise ValueError(f"logit_loss: mixture is {mixture}; it lies strictly inside (0, 1)")
    if top_k is not None and not (isinstance(top_k, int) and 1 <= top_k <= student.shape[-1]):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"logit_loss: top_k is {top_k}; it is a whole number in [1, {student.shape[-1]}], the vocabulary"
        )


def _aggregation_weights(token_mask: Tensor, aggregation: str, validate: bool) -> Tensor:
    """The weight of each position (..., T), float64."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"logit_loss: aggregation is {aggregation!r}; it is one of {', '.join(AGGREGATIONS)}")
    tokens = token_mask.sum(-1, keepdim=True).double()
    sequences = (tokens > 0).sum()
    if validate and aggregation != "token_sum" and int(sequences) == 0:
        raise ValueError(f"logit_loss: every position of the batch is masked; {aggregation} of nothing does not exist")
    weight = {
        "token_mean": 1.0 / tokens.sum(),
        "sequence_mean": 1.0 / (tokens * sequences),
        "sequence_sum": 1.0 / sequences.double(),
        "token_sum": torch.ones_like(tokens),
    }[aggregation]
    return torch.where(token_mask, weight, 0.0)


def _checked_ratio(importance_ratio: Tensor, token_mask: Tensor, validate: bool) -> Tensor:
    ratio = as_float(importance_ratio, "logit_loss: importance_ratio").detach().to(token_mask.device, torch.float64)
    same_shape("logit_loss", importance_ratio=ratio, mask=token_mask)
    if validate:
        bad = ~(torch.isfinite(ratio) & (ratio >= 0))
        refuse_where(token_mask & bad, ratio, "logit_loss: importance_ratio", "; it is finite and not negative")
    return torch.where(token_mask, ratio, 0.0)
