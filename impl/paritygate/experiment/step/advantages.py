"""An arm is its advantage: the composites and logprobs of one group in, one advantage a token out; pure functions."""

import math
from collections.abc import Sequence

import torch

from paritygate.experiment.run.entry_points import GroupAdvantages, ScoredRollout
from paritygate.losses import grpo, sdpo

Logprobs = Sequence[float | None]


def group_advantages(
    kind: str,
    composites: Sequence[float | None],
    masks: Sequence[Sequence[int]],
    student_logprobs: Sequence[Logprobs],
    teacher_logprobs: Sequence[Logprobs | None],
    *,
    clip: float,
    hybrid_weight: float,
    loss: GroupAdvantages | None = None,
) -> list[list[float]]:
    """One advantage a token for each of the G rollouts of a group, exactly 0 where its mask is 0.

    composites (G,): None for a rollout that left its group (no parsed judgement, or the simulator failed): its
    advantages are 0 and the group's mean is over the others. masks, student_logprobs, teacher_logprobs: G lists, each
    as long as its rollout's tokens (nats; None where nothing was scored; no teacher row where the arm needs none).
    Advantages are nats for SDPO, composites for GRPO. Raises ValueError for an unknown kind, a missing teacher, or
    numbers that the losses refuse, naming the rollout. clip (nats) and hybrid_weight are the spec's; `loss` is what an
    arm of kind entry_point names.
    """
    if loss is not None:
        return _of_another_repository(loss, composites, masks, student_logprobs, teacher_logprobs)
    centred = _centred_composites(composites)
    rows: list[list[float]] = []
    for index, rollout in enumerate(zip(masks, student_logprobs, teacher_logprobs, strict=True)):
        mask, student, teacher = rollout
        if composites[index] is None:
            rows.append([0.0] * len(mask))
            continue
        try:
            rows.append(_advantages(kind, centred[index], mask, student, teacher, clip, hybrid_weight))
        except ValueError as error:
            raise ValueError(f"rollout {index} of the group: {error}") from None
    return rows


def _of_another_repository(
    loss: GroupAdvantages,
    composites: Sequence[float | None],
    masks: Sequence[Sequence[int]],
    student_logprobs: Sequence[Logprobs],
    teacher_logprobs: Sequence[Logprobs | None],
) -> list[list[float]]:
    """What `loss` makes of the rollouts that have a composite; ValueError where that is not one number a token."""
    present = {index: composite for index, composite in enumerate(composites) if composite is not None}
    group = [
        ScoredRollout(composite, tuple(masks[index]), _or_nan(student_logprobs[index]), _or_nan(teacher))
        if (teacher := teacher_logprobs[index]) is not None
        else ScoredRollout(composite, tuple(masks[index]), _or_nan(student_logprobs[index]), None)
        for index, composite in present.items()
    ]
    try:
        made = [[float(value) for value in row] for row in loss(group)] if group else []
    except Exception as error:
        raise ValueError(f"the group: its loss raised {type(error).__name__}: {error}") from error
    if len(made) != len(group):
        raise ValueError(f"the group: its loss gives {len(made)} rows of advantages for {len(group)} rollouts")
    rows = [[0.0] * len(mask) for mask in masks]
    for index, row in zip(present, made, strict=True):
        mask = masks[index]
        if len(row) != len(mask) or any(value != 0.0 for value, sampled in zip(row, mask, strict=True) if not sampled):
            raise ValueError(
                f"rollout {index} of the group: its loss gives {len(row)} advantages for {len(mask)} tokens, "
                "and they have to be 0 where the mask is 0"
            )
        rows[index] = row
    return rows


def _or_nan(values: Logprobs) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


def _centred_composites(composites: Sequence[float | None]) -> dict[int, float]:
    """Composite minus the mean over the rollouts that have one (Dr. GRPO: no division by the deviation)."""
    present = {index: composite for index, composite in enumerate(composites) if composite is not None}
    if not present:
        return {}
    rewards = torch.tensor(list(present.values()), dtype=torch.float64)
    return dict(zip(present, grpo.group_mean_advantage(rewards).tolist(), strict=True))


def _advantages(
    kind: str,
    centred: float,
    mask_row: Sequence[int],
    student_row: Logprobs,
    teacher_row: Logprobs | None,
    clip: float,
    hybrid_weight: float,
) -> list[float]:
    mask = torch.tensor(mask_row, dtype=torch.float64)
    if kind == "grpo":
        return (centred * mask).tolist()
    if teacher_row is None:
        raise ValueError("no teacher logprobs were scored for it")
    teacher, student = _float64(teacher_row), _float64(student_row)
    if kind == "sdpo_token":
        return sdpo.token_advantage(teacher, student, mask, clip=clip).tolist()
    if kind == "sdpo_sequence":
        return sdpo.sequence_advantage(teacher, student, mask).tolist()
    if kind == "hybrid":
        token = sdpo.token_advantage(teacher, student, mask, clip=clip)
        return sdpo.hybrid_advantage(centred * mask, token, hybrid_weight).tolist()
    raise ValueError(f"an arm of kind {kind!r} has no per-token advantage")


def _float64(values: Logprobs) -> torch.Tensor:
    """Logprobs (L,) as float64, NaN where there is none: the losses refuse it at a position that the mask reads."""
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64)
