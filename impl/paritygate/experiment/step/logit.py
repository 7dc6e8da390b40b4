"""Logit-level SDPO on an unmodified service: 2-D cross-entropy whose gradient is that of the bucketed divergence."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from paritygate.agent.rollouts import Rollout
from paritygate.backend import Datum, Sampler, soft_cross_entropy_datum
from paritygate.losses.sdpo import cross_entropy_weights

DIVERGENCE = "reverse_kl"  # the paper's choice for rich feedback (arXiv 2601.20802, section 4)


async def logit_datums(
    rollouts: Sequence[Rollout], sent: Sequence[int], student: Sampler, teacher: Sampler, *, k: int
) -> tuple[list[Datum], list[list[float]], dict[str, Any]]:
    """A datum for each rollout whose index is in `sent`: at each assistant token the student's top k, by reverse KL.

    Also, for every rollout, the weight of each sampled token that is among the k (shown as its advantage), and, as
    metrics, the share of positions whose tail was too small to use. Rollouts without a teacher context weigh nothing.
    """
    scored = await asyncio.gather(*(_datum(rollouts[index], student, teacher, k) for index in sent))
    tail_dropped = [flag for _, _, flags in scored for flag in flags]
    advantages = [[0.0] * len(rollout.trajectory.mask) for rollout in rollouts]
    for index, (_, row, _) in zip(sent, scored, strict=True):
        advantages[index] = row
    share = sum(tail_dropped) / len(tail_dropped) if tail_dropped else None
    return [datum for datum, _, _ in scored], advantages, {"logit_frac_tail_dropped": share, "logit_top_k": k}


async def _datum(rollout: Rollout, student: Sampler, teacher: Sampler, k: int) -> tuple[Datum, list[float], list[bool]]:
    trajectory = rollout.trajectory
    tokens, length = trajectory.tokens, len(trajectory.tokens)
    acted = [t for t in range(1, length) if trajectory.mask[t]]
    if rollout.teacher is None or not rollout.teacher.context:
        return _weightless(tokens, k), [0.0] * length, []
    top = await student.topk(tokens, k)
    ids = [[token for token, _ in top[t] or []] for t in acted]
    student_NK = torch.tensor([[logprob for _, logprob in top[t] or []] for t in acted], dtype=torch.float64)
    teacher_NK = torch.tensor(await _teacher_rows(rollout, teacher, acted, ids, k), dtype=torch.float64)
    result = cross_entropy_weights(student_NK, teacher_NK, divergence=DIVERGENCE)
    weights = result.weights.tolist()
    target_ids, target_weights = [[0] * k for _ in range(length)], [[0.0] * k for _ in range(length)]
    shown = [0.0] * length
    for row, t in enumerate(acted):
        target_ids[t], target_weights[t] = ids[row], weights[row]
        if tokens[t] in ids[row]:
            shown[t] = weights[row][ids[row].index(tokens[t])]
    return soft_cross_entropy_datum(tokens, target_ids, target_weights), shown, result.tail_dropped.tolist()


async def _teacher_rows(
    rollout: Rollout, teacher: Sampler, acted: Sequence[int], ids: Sequence[Sequence[int]], k: int
) -> list[list[float]]:
    """The teacher's logprobs (N, K) of `ids` at the trajectory's positions `acted`, under its own context."""
    assert rollout.teacher is not None
    trajectory, context = rollout.trajectory, rollout.teacher.context
    tokens = [*context, *trajectory.tokens[trajectory.prompt_length :]]
    shift = len(context) - trajectory.prompt_length
    asked = [[-1] * k for _ in tokens]
    for t, row in zip(acted, ids, strict=True):
        asked[t + shift] = list(row)
    scored = await teacher.score_targets(tokens, asked)
    return [scored[t + shift] for t in acted]


def _weightless(tokens: Sequence[int], k: int) -> Datum:
    return soft_cross_entropy_datum(tokens, [[0] * k for _ in tokens], [[0.0] * k for _ in tokens])
