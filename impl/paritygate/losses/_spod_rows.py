"""Row-wise quantities of SPOD in float64, a few rows at a time: what any faster kernel has to agree with."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._distributions import chunk_rows, kl_divergence, log_softmax


class Weights(NamedTuple):
    """For each row (N,) float64, the factors of `p - q` and of `p - onehot(action)` in its gradient."""

    kl: Tensor
    floor: Tensor


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


def sum_by(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive `lengths` (A,) of `values` (N,), (A,) in the same order every time, on every device."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


class Span(NamedTuple):
    """Rows and actions that are computed together."""

    rows: slice
    actions: slice


def plan(tokens: list[int], may_open: list[bool], most: int) -> list[Span]:
    """Whole actions, at most `most` rows together; a longer one alone, cut to `most` where its gate cannot open."""
    spans: list[Span] = []
    first_row = first_action = row = 0

    def close(row: int, action: int) -> None:
        if row > first_row:
            spans.append(Span(slice(first_row, row), slice(first_action, action)))

    for action, count in enumerate(tokens):
        if row + count - first_row > most:
            close(row, action)
            first_row, first_action = row, action
        row += count
        if count > most:
            step = count if may_open[action] else most
            own = slice(action, action + 1)
            spans.extend(Span(slice(i, min(i + step, row)), own) for i in range(first_row, row, step))
            first_row, first_action = row, action + 1
    close(row, len(tokens))
    return spans
