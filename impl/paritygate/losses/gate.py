"""SPOD's gate and floor, and what they make of an action: its terms of the loss, and the weights of its rows."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .row_stats import column


class Levels(NamedTuple):
    """Of each action (A,): its number of tokens, whether its episode succeeded, the weight of each token."""

    tokens: Tensor
    success: Tensor
    weights: Tensor


class Weights(NamedTuple):
    """For each row (N,) float64, the factors of `p - q` and of `p - onehot(action)` in its gradient."""

    kl: Tensor
    floor: Tensor


def sum_by(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive `lengths` (A,) of `values` (N,), (A,) in the same order every time, on every device."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


class Parts(NamedTuple):
    """Of each action (A,): what the result tells of it, and the factors of `p - q` and `p - onehot` in its rows."""

    gate: Tensor
    student_logprob: Tensor
    teacher_logprob: Tensor
    kl: Tensor
    floor: Tensor
    of_kl: Tensor
    of_floor: Tensor


def parts_of(known: Tensor, levels: Levels, tau0: float, floor_weight: float) -> Parts:
    """What the statistics (N, 9) of the rows of some actions make of these actions."""
    tokens, success, weights = levels
    row_kl, row_student, row_teacher = (column(known, x) for x in ("kl", "student_logprob", "teacher_logprob"))
    l_p, l_q = sum_by(row_student, tokens), sum_by(row_teacher, tokens)
    # Row by row, so that equal rows tie exactly whatever the order of summation; inf - inf is NaN, and no protection.
    gate = success & (sum_by(row_teacher - row_student, tokens) < 0)
    kl = torch.where(gate, 0.0, sum_by(row_kl, tokens) / tokens)
    floor = torch.where(gate, (math.log(tau0) - l_p).clamp(min=0.0) / tokens, 0.0)
    of_kl = torch.where(gate, 0.0, weights)
    of_floor = torch.where(gate & (l_p < math.log(tau0)), floor_weight * weights, 0.0)
    return Parts(gate, l_p, l_q, kl, floor, of_kl, of_floor)


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
