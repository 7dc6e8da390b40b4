"""SPOD's gate and floor: which actions are protected, what each adds to the loss, and the weights of its rows."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .row_stats import RowStat


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


def gate(success: Tensor, student_logprobs: Tensor, teacher_logprobs: Tensor, tokens: Tensor) -> Tensor:
    """(A,) bool: is the action protected? `success and sum (log q - log p) < 0` over the tokens of each action.

    `success` (A,) bool of its episode; log-probabilities (N,) of the sampled tokens; `tokens` (A,) int64, how many each
    action has. Summed row by row, so that equal rows tie exactly whatever their order; inf - inf is NaN: not protected.
    Teacher log-probabilities not known yet may be 0, their upper bound: what is protected then stays so.
    Obligations: spod/gate, spod/tie.
    """
    return success & (sum_by(teacher_logprobs - student_logprobs, tokens) < 0)


class ActionTerms(NamedTuple):
    """Of each action (A,): what the result tells of it, and the factors of `p - q` and `p - onehot` in its rows."""

    gate: Tensor
    student_logprob: Tensor
    teacher_logprob: Tensor
    kl: Tensor
    floor: Tensor
    kl_weight: Tensor
    floor_weight: Tensor


def action_terms(row_stats: Tensor, levels: Levels, tau0: float, floor_weight: float) -> ActionTerms:
    """What each action (A,) adds, from the statistics (N, 9) of its rows: the KL, or at a protected one the floor.

    Obligations: spod/parts, spod/at_floor.
    """
    tokens, success, weights = levels
    row_student, row_teacher = row_stats[:, RowStat.STUDENT_LOGPROB], row_stats[:, RowStat.TEACHER_LOGPROB]
    protected = gate(success, row_student, row_teacher, tokens)
    l_p, l_q = sum_by(row_student, tokens), sum_by(row_teacher, tokens)
    kl = torch.where(protected, 0.0, sum_by(row_stats[:, RowStat.KL], tokens) / tokens)
    floor = torch.where(protected, (math.log(tau0) - l_p).clamp(min=0.0) / tokens, 0.0)
    kl_weight = torch.where(protected, 0.0, weights)
    below = protected & (l_p < math.log(tau0))
    return ActionTerms(protected, l_p, l_q, kl, floor, kl_weight, torch.where(below, floor_weight * weights, 0.0))


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
            alone = slice(action, action + 1)
            spans.extend(Span(slice(i, min(i + step, row)), alone) for i in range(first_row, row, step))
            first_row, first_action = row, action + 1
    close(row, len(tokens))
    return spans
