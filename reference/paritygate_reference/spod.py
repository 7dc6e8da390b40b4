"""SPOD, success-preserving distillation: the KL of an action, or a floor where the student's success is protected.

Obligations: spod/oracle.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _checks
from ._distributions import Array, kl_divergence, log_softmax
from .averaging import three_level_mean

Episodes = Sequence[Mapping[str, Any]]


def gate(success: bool, student_logprob: float, teacher_logprob: float) -> bool:
    """`g = 1 if the episode succeeded and l_q < l_p else 0`: an action is protected; strict, a tie is not.

    Obligations: spod/gate, spod/tie.
    """
    return success and teacher_logprob < student_logprob


def kl(student: Array, teacher: Array) -> float:
    """`(1/n) sum_j KL(q_j || p_j)` in nats, of the log-probabilities of an action's rows, (n, V).

    Obligations: spod/parts.
    """
    return sum(kl_divergence(q_j, p_j) for p_j, q_j in zip(student, teacher, strict=True)) / len(student)


def floor(student_logprob: float, n: int, tau0: float) -> float:
    """`(1/n) relu(log tau0 - l_p)` in nats, of an action of n tokens.

    Obligations: spod/parts, spod/at_floor.
    """
    return max(math.log(tau0) - student_logprob, 0.0) / n


class SpodLoss(NamedTuple):
    """The loss and, for each episode and action (ragged lists), what it was made of."""

    loss: float
    gate: list[list[bool]]
    student_logprob: list[list[float]]
    teacher_logprob: list[list[float]]
    kl: list[list[float]]
    floor: list[list[float]]


def success_preserving_loss(episodes: Episodes, tau0: float = 0.5, floor_weight: float = 1.0) -> SpodLoss:
    """The `three_level_mean` of `(1 - g) kl + floor_weight g floor`, in nats; ragged.

    An episode is `{"success": bool, "actions": [...]}`, an action `{"student_logits": (n, V), "teacher_logits": (n, V),
    "tokens": (n,)}`, its end token included. `kl` and `floor` are contributions: 0 where the other term acts,
    `floor_weight` excluded. ValueError names the place: empty batch, episode or action, shapes that differ, a token
    outside [0, V), tau0 outside (0, 1], a negative floor_weight, a row with NaN or +inf or all -inf.
    Source: arXiv 2610.25034, sections 3 and 4.
    Obligations: spod/loss, spod/padded, spod/fused, spod/negative_control.
    """
    batch = _checked(episodes, tau0, floor_weight)
    kls = [[0.0 if a.gate else kl(a.student, a.teacher) for a in actions] for actions in batch]
    floors = [[floor(a.student_logprob, a.n, tau0) if a.gate else 0.0 for a in actions] for actions in batch]
    return SpodLoss(
        loss=three_level_mean(
            [[[k + floor_weight * f] for k, f in zip(*rows, strict=True)] for rows in zip(kls, floors, strict=True)]
        ),
        gate=[[a.gate for a in actions] for actions in batch],
        student_logprob=[[a.student_logprob for a in actions] for actions in batch],
        teacher_logprob=[[a.teacher_logprob for a in actions] for actions in batch],
        kl=kls,
        floor=floors,
    )


def success_preserving_grad(
    episodes: Episodes, tau0: float = 0.5, floor_weight: float = 1.0
) -> list[list[NDArray[np.float64]]]:
    """d `success_preserving_loss` / d student_logits, ragged: `[episode][action]` is (n, V).

    With w = 1 / (n S E): `w (p - q)` where unprotected, `floor_weight w (p - onehot)` where protected and under the
    floor, exactly 0 where protected and at or above it. The gate is held fixed. ValueError as the loss.
    Obligations: spod/gradient, spod/in_place, spod/factor, spod/padded_vocabulary, spod/service_weights.
    """
    batch = _checked(episodes, tau0, floor_weight)
    gradients: list[list[Array]] = []
    for actions in batch:
        gradients.append([])
        for a in actions:
            w = 1.0 / (a.n * len(actions) * len(batch))
            p, q = np.exp(a.student), np.exp(a.teacher)
            if not a.gate:
                slope = w * (p - q)
            elif a.student_logprob < math.log(tau0):
                onehot = np.arange(p.shape[1]) == np.reshape(a.tokens, (-1, 1))
                slope = floor_weight * w * (p - onehot)
            else:
                slope = np.zeros_like(p)
            gradients[-1].append(slope)
    return gradients


class _Action(NamedTuple):
    student: Array  # log p (n, V)
    teacher: Array  # log q (n, V)
    tokens: NDArray[np.int64]  # (n,)
    student_logprob: float  # l_p
    teacher_logprob: float  # l_q
    gate: bool

    @property
    def n(self) -> int:
        return len(self.tokens)


def _checked(episodes: Episodes, tau0: float, floor_weight: float) -> list[list[_Action]]:
    if not 0.0 < tau0 <= 1.0:
        raise ValueError(f"spod: tau0 is {tau0}; it lies in (0, 1]")
    if not (math.isfinite(floor_weight) and floor_weight >= 0.0):
        raise ValueError(f"spod: floor_weight is {floor_weight}; it is finite and not negative")
    if len(episodes) == 0:
        raise ValueError("spod: the batch has no episode")
    batch: list[list[_Action]] = []
    for e, episode in enumerate(episodes):
        if len(episode["actions"]) == 0:
            raise ValueError(f"spod: episode {e} has no action")
        places = [(f"episode {e}, action {i}", action) for i, action in enumerate(episode["actions"])]
        batch.append([_scored(action, bool(episode["success"]), where) for where, action in places])
    return batch


def _scored(action: Mapping[str, Any], success: bool, where: str) -> _Action:
    student, teacher, tokens = _checks.action(action, f"spod: {where}")
    log_p = np.stack([log_softmax(row, f"{where}, student row {j}") for j, row in enumerate(student)])
    log_q = np.stack([log_softmax(row, f"{where}, teacher row {j}") for j, row in enumerate(teacher)])
    l_p = math.fsum(log_p[j, token] for j, token in enumerate(tokens))
    l_q = math.fsum(log_q[j, token] for j, token in enumerate(tokens))
    return _Action(log_p, log_q, tokens, l_p, l_q, gate(success, l_p, l_q))
