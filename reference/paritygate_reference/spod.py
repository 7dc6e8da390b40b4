"""SPOD, success-preserving distillation: the KL of an action, or a floor where the student's success is protected."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._distributions import kl_divergence, log_softmax
from .averaging import three_level_mean

Episodes = Sequence[Mapping[str, Any]]


class SpodLoss(NamedTuple):
    """The loss and, for each episode and action (ragged lists), what it was made of."""

    loss: float
    gate: list[list[bool]]
    student_logprob: list[list[float]]
    teacher_logprob: list[list[float]]
    kl: list[list[float]]
    floor: list[list[float]]


class _Action(NamedTuple):
    student: NDArray[np.float64]  # (n, V) log-probabilities
    teacher: NDArray[np.float64]  # (n, V) log-probabilities
    tokens: NDArray[np.int64]  # (n,)
    student_logprob: float
    teacher_logprob: float
    gate: bool


def success_preserving_loss(episodes: Episodes, tau0: float = 0.5, floor_weight: float = 1.0) -> SpodLoss:
    """SPOD's loss in nats of episodes `{"success": bool, "actions": [...]}`, ragged.

    An action is `{"student_logits": (n, V), "teacher_logits": (n, V), "tokens": (n,)}`, its end token included.
    The gate of an action is: the episode succeeded and the teacher gives the action strictly less log-probability.
    `kl` and `floor` are contributions: 0 where the other term acts, `floor_weight` excluded.
    ValueError names the place: empty batch, episode or action, shapes that differ, a token outside [0, V), tau0 outside
    (0, 1], a negative floor_weight, a row with NaN or +inf or all -inf. Source: arXiv 2610.25034, sections 3 and 4.
    """
    checked = _check(episodes, tau0, floor_weight)
    kl, floor, values = [], [], []
    for actions in checked:
        kl.append([0.0 if a.gate else _mean_kl(a) for a in actions])
        floor.append([max(math.log(tau0) - a.student_logprob, 0.0) / len(a.tokens) if a.gate else 0.0 for a in actions])
        values.append([[k + floor_weight * f if f else k] for k, f in zip(kl[-1], floor[-1], strict=True)])
    return SpodLoss(
        loss=three_level_mean(values),
        gate=[[a.gate for a in actions] for actions in checked],
        student_logprob=[[a.student_logprob for a in actions] for actions in checked],
        teacher_logprob=[[a.teacher_logprob for a in actions] for actions in checked],
        kl=kl,
        floor=floor,
    )


def success_preserving_grad(
    episodes: Episodes, tau0: float = 0.5, floor_weight: float = 1.0
) -> list[list[NDArray[np.float64]]]:
    """d `success_preserving_loss` / d student_logits, ragged: `[episode][action]` is (n, V).

    With w = 1 / (n S E): `w (p - q)` where unprotected, `floor_weight w (p - onehot)` where protected and under the
    floor, exactly 0 where protected and at or above it. ValueError as the loss.
    """
    checked = _check(episodes, tau0, floor_weight)
    gradients = []
    for actions in checked:
        rows = []
        for a in actions:
            n = len(a.tokens)
            weight = 1.0 / (n * len(actions) * len(checked))
            if not a.gate:
                rows.append(weight * (np.exp(a.student) - np.exp(a.teacher)))
            elif a.student_logprob < math.log(tau0):
                onehot = np.zeros_like(a.student)
                onehot[np.arange(n), a.tokens] = 1.0
                rows.append(floor_weight * weight * (np.exp(a.student) - onehot))
            else:
                rows.append(np.zeros_like(a.student))
        gradients.append(rows)
    return gradients


def _mean_kl(action: _Action) -> float:
    rows = [kl_divergence(q, p) for q, p in zip(action.teacher, action.student, strict=True)]
    return sum(rows) / len(rows)


def _check(episodes: Episodes, tau0: float, floor_weight: float) -> list[list[_Action]]:
    if not 0.0 < tau0 <= 1.0:
        raise ValueError(f"spod: tau0 is {tau0}; it lies in (0, 1]")
    if not (math.isfinite(floor_weight) and floor_weight >= 0.0):
        raise ValueError(f"spod: floor_weight is {floor_weight}; it is finite and not negative")
    if len(episodes) == 0:
        raise ValueError("spod: the batch has no episode")
    checked = []
    for e, episode in enumerate(episodes):
        if len(episode["actions"]) == 0:
            raise ValueError(f"spod: episode {e} has no action")
        success = bool(episode["success"])
        checked.append(
            [_check_action(action, success, f"episode {e}, action {i}") for i, action in enumerate(episode["actions"])]
        )
    return checked


def _check_action(action: Mapping[str, Any], success: bool, place: str) -> _Action:
    student = np.asarray(action["student_logits"], dtype=np.float64)
    teacher = np.asarray(action["teacher_logits"], dtype=np.float64)
    tokens = np.asarray(action["tokens"])
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"spod: {place} has no token")
    if student.shape != teacher.shape or student.ndim != 2 or student.shape[0] != tokens.size:
        raise ValueError(
            f"spod: {place}: shapes differ: student_logits {student.shape}, teacher_logits {teacher.shape}, "
            f"tokens {tokens.shape}"
        )
    for j, token in enumerate(tokens):
        if not 0 <= token < student.shape[1] or token != int(token):
            raise ValueError(f"spod: {place}: token {j} is {token}, outside [0, {student.shape[1]})")
    tokens = tokens.astype(np.int64)
    log_p = np.stack([log_softmax(row, f"{place}, student row {j}") for j, row in enumerate(student)])
    log_q = np.stack([log_softmax(row, f"{place}, teacher row {j}") for j, row in enumerate(teacher)])
    l_p = float(sum(log_p[j, token] for j, token in enumerate(tokens)))
    l_q = float(sum(log_q[j, token] for j, token in enumerate(tokens)))
    return _Action(log_p, log_q, tokens, l_p, l_q, success and l_q < l_p)
