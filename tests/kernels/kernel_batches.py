"""Batches of packed actions for the kernel tests, and the reference's answer to them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paritygate_reference import spod as reference


def batch(
    lengths: list[list[int]],
    vocabulary: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    noise: float = 2.0,
    sure: float = 0.0,
) -> dict[str, Tensor]:
    """`lengths[e][s]` tokens in action s of episode e; the teacher is noisier; the action taken gains `sure`."""
    generator = torch.Generator().manual_seed(seed)
    flat = [n for episode in lengths for n in episode]
    count = sum(flat)
    student = torch.randn(count, vocabulary, generator=generator) * 2
    teacher = student + noise * torch.randn(count, vocabulary, generator=generator)
    actions = torch.randint(0, vocabulary, (count,), generator=generator)
    student[torch.arange(count), actions] += sure
    return {
        "student_logits": student.to(dtype),
        "teacher_logits": teacher.to(dtype),
        "actions": actions,
        "action_index": torch.repeat_interleave(torch.arange(len(flat)), torch.tensor(flat)),
        "episode_index": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor([len(e) for e in lengths])),
        "success": torch.arange(len(lengths)) % 3 != 2,
    }


def answer(data: dict[str, Tensor], **options: Any) -> tuple[Any, np.ndarray]:
    """The reference's loss, fields flat over actions, and gradient (N, V), from the same rounded inputs."""
    student, teacher = (data[f"{side}_logits"].double().numpy() for side in ("student", "teacher"))
    tokens, of_action, of_episode = (data[name].numpy() for name in ("actions", "action_index", "episode_index"))
    episodes = []
    for e, success in enumerate(data["success"].tolist()):
        actions = []
        for a in np.flatnonzero(of_episode == e):
            rows = np.flatnonzero(of_action == a)
            actions.append({
                "student_logits": student[rows], "teacher_logits": teacher[rows], "tokens": tokens[rows]
            })  # fmt: skip
        episodes.append({"success": success, "actions": actions})
    result = reference.success_preserving_loss(episodes, **options)
    fields = ("gate", "student_logprob", "teacher_logprob", "kl", "floor")
    flat = {name: np.array([x for episode in getattr(result, name) for x in episode]) for name in fields}
    gradient = reference.success_preserving_grad(episodes, **options)
    return SimpleNamespace(loss=result.loss, **flat), np.concatenate([x for episode in gradient for x in episode])
