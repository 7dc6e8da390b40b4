"""An arm is its advantage: judged rollouts of one group in, one advantage a token out; pure functions of numbers."""

import dataclasses
from collections.abc import Sequence

import torch

from paritygate.losses import grpo, sdpo

SDPO_KINDS = frozenset({"sdpo_token", "sdpo_sequence", "sdpo_logit", "hybrid"})


@dataclasses.dataclass(frozen=True)
class Scores:
    """What an advantage may look at: one rollout of a group, every list of length L, as its tokens are."""

    composite: float | None  # None: the judge was not parsed, or the simulator failed: the rollout leaves its group
    mask: Sequence[int]
    sampler_logprobs: Sequence[float | None]
    teacher_logprobs: Sequence[float | None] | None = None


def needs_teacher(kind: str) -> bool:
    """Whether an arm of this kind scores its rollouts under the feedback-conditioned teacher."""
    return kind in SDPO_KINDS


def group_advantages(
    kind: str, group: Sequence[Scores], *, clip: float = 5.0, hybrid_weight: float = 0.9
) -> list[list[float]]:
    """One advantage a token (nats for SDPO, composite for GRPO), exactly 0 where mask is 0 and for a rollout that left.

    Raises ValueError for an unknown kind, a missing teacher, or scores that the losses refuse, naming the rollout.
    """
    centred = _centred_composites(group)
    rows: list[list[float]] = []
    for index, scores in enumerate(group):
        if scores.composite is None:
            rows.append([0.0] * len(scores.mask))
            continue
        try:
            rows.append(_row(kind, scores, centred[index], clip, hybrid_weight))
        except ValueError as error:
            raise ValueError(f"rollout {index} of the group: {error}") from None
    return rows


def _centred_composites(group: Sequence[Scores]) -> dict[int, float]:
    """Composite minus the mean over the rollouts that have one (Dr. GRPO: no division by the deviation)."""
    present = [index for index, scores in enumerate(group) if scores.composite is not None]
    if not present:
        return {}
    rewards = torch.tensor([group[index].composite for index in present], dtype=torch.float64)
    return dict(zip(present, grpo.group_mean_advantage(rewards).tolist(), strict=True))


def _row(kind: str, scores: Scores, centred: float, clip: float, hybrid_weight: float) -> list[float]:
    mask = torch.tensor(scores.mask, dtype=torch.float64)
    if kind == "grpo":
        return (centred * mask).tolist()
    teacher, student = teacher_and_student(scores)
    if kind == "sdpo_token":
        return sdpo.token_advantage(teacher, student, mask, clip=clip).tolist()
    if kind == "sdpo_sequence":
        return sdpo.sequence_advantage(teacher, student, mask).tolist()
    if kind == "hybrid":
        token = sdpo.token_advantage(teacher, student, mask, clip=clip)
        return sdpo.hybrid_advantage(centred * mask, token, hybrid_weight).tolist()
    raise ValueError(f"an arm of kind {kind!r} has no per-token advantage")


def teacher_and_student(scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """The two rows of logprobs (L,) float64, NaN where there is none; masked positions are never read by the losses."""
    if scores.teacher_logprobs is None:
        raise ValueError("no teacher logprobs were scored for it")
    return _float64(scores.teacher_logprobs), _float64(scores.sampler_logprobs)


def _float64(values: Sequence[float | None]) -> torch.Tensor:
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64)
