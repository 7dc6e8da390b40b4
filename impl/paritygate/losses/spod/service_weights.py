"""SPOD on a service that knows only cross-entropy: weights with the gradient of the loss, on policy."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import refuse_where, same_shape
from ..gate import gate, sum_by
from ..sdpo.service_weights import cross_entropy_weights
from .levels import SpodBatch, check_batch, levels_of


class SpodWeights(NamedTuple):
    """For a `cross_entropy` of K + 1 targets a row, float64: the K tokens' weights (N, K) and the sampled token's (N,).

    `gate` (A,) bool tells which actions were protected, `tail_dropped` (N,) where the tail was too small to use.
    """

    weights: Tensor
    sampled: Tensor
    gate: Tensor
    tail_dropped: Tensor


def success_preserving_weights(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    student_sampled: Tensor,
    teacher_sampled: Tensor,
    action_index: Tensor,
    episode_index: Tensor,
    success: Tensor,
    *,
    tau0: float = 0.5,
    floor_weight: float = 1.0,
    tail: bool = True,
) -> SpodWeights:
    """Weights with which `-sum w log p(x)` has, on policy, the gradient of `success_preserving_loss`.

    (N, K) log-probabilities of the same K distinct tokens under student and teacher, as `cross_entropy_weights` takes
    them, and those of the sampled tokens (N,), in nats; indices and options as `success_preserving_loss`. Unprotected
    rows have 1 / (n S E) times the forward KL's weights, protected ones under the floor floor_weight / (n S E) on the
    sampled token, the others 0. ValueError names the place.
    Obligations: spod/service_weights.
    """
    batch = SpodBatch(torch.zeros_like(action_index), action_index, episode_index, success, tau0, floor_weight)
    check_batch(batch, 1, validate=True)
    student, teacher = student_sampled.detach().double(), teacher_sampled.detach().double()
    same_shape("spod", student_sampled=student, teacher_sampled=teacher, action_index=action_index)
    if student_logprobs.shape[:1] != student.shape:
        raise ValueError(
            f"spod: {student_logprobs.shape[0]} rows of log-probabilities, {student.shape[0]} sampled tokens"
        )
    refuse_where(~torch.isfinite(student), student, "spod: the student's sampled logprob")
    refuse_where(teacher.isnan() | (teacher == math.inf), teacher, "spod: the teacher's sampled logprob")
    tokens, succeeded, of_action = levels_of(batch)
    protected = gate(succeeded, student, teacher, tokens)
    floored = protected & (sum_by(student, tokens) < math.log(tau0))
    weights = of_action[action_index]
    kl = cross_entropy_weights(student_logprobs, teacher_logprobs, divergence="forward_kl", tail=tail)
    return SpodWeights(
        weights=torch.where(protected[action_index, None], 0.0, weights[:, None] * kl.weights),
        sampled=torch.where(floored[action_index], floor_weight * weights, 0.0),
        gate=protected,
        tail_dropped=kl.tail_dropped,
    )
