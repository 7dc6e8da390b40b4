"""Row-wise quantities of SPOD in float64, a few rows at a time: what any faster kernel has to agree with."""

import torch
from torch import Tensor

from ..gate import Weights
from ..numerics import chunk_rows, kl_divergence, log_softmax


def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(q || p), log p(action) and log q(action) of each row, three (N,) float64; (N, V), (N, V), (N,) int64."""
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for start, stop in chunk_rows(student):
        log_p = log_softmax(student[start:stop].double())
        log_q = log_softmax(teacher[start:stop].double())
        picked = actions[start:stop, None]
        results.append((kl_divergence(log_q, log_p), log_p.gather(1, picked)[:, 0], log_q.gather(1, picked)[:, 0]))
    kl, student_logprob, teacher_logprob = (torch.cat(column) for column in zip(*results, strict=True))
    return kl, student_logprob, teacher_logprob


def gradient(student: Tensor, teacher: Tensor, actions: Tensor, weights: Weights) -> Tensor:
    """`weights.kl (p - q) + weights.floor (p - onehot)`, (N, V) in the student's dtype, differentiable."""
    return torch.cat([_gradient(student, teacher, actions, weights, bounds) for bounds in chunk_rows(student)])


def gradient_into(out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, weights: Weights) -> None:
    """`gradient` written to `out`, which may be `student`."""
    for i, j in chunk_rows(student):
        out[i:j] = _gradient(student, teacher, actions, weights, (i, j))


def _gradient(student: Tensor, teacher: Tensor, actions: Tensor, weights: Weights, bounds: tuple[int, int]) -> Tensor:
    rows = slice(*bounds)
    p, q = (log_softmax(logits[rows].double()).exp() for logits in (student, teacher))
    onehot = torch.zeros_like(q).scatter_(1, actions[rows, None], 1.0)
    both = weights.kl[rows, None] * (p - q) + weights.floor[rows, None] * (p - onehot)
    return both.to(student.dtype)
