"""The numbers in data/: what other projects' real functions returned, at the versions that each file names."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paritygate.losses import sdpo
from paritygate_reference import sdpo as reference

EXACT = {"rtol": 1e-12, "atol": 1e-15}  # both sides in float64
ALPHA = {0.0: ("forward_kl", 0.5), 1.0: ("reverse_kl", 0.5)}  # upstream's names for the two ends
TRUNCATIONS = {"full": (None, True), "topk4_tail": (4, True), "topk4_renorm": (4, False), "top2tail": (2, True)}
KINDS = {"fkl": ("forward_kl", 0.5), "rkl": ("reverse_kl", 0.5), "jsd": ("jsd", 0.5), "gjsd03": ("jsd", 0.3)}


@cache
def golden(name: str) -> dict[str, Any]:
    """The content of data/<name>.json."""
    return json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text())


def divergence_of(alpha: float) -> dict[str, Any]:
    """Options for upstream's alpha: the ends are asked for by name here."""
    name, mixture = ALPHA.get(alpha, ("jsd", alpha))
    return {"divergence": name, "mixture": mixture}


def options_of(name: str) -> dict[str, Any]:
    """Options for a name such as `topk4_tail_jsd`."""
    truncation, kind = name.rsplit("_", 1)
    top_k, tail = TRUNCATIONS[truncation]
    return {"divergence": KINDS[kind][0], "mixture": KINDS[kind][1], "top_k": top_k, "tail": tail}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Plain float64 log-softmax."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@cache
def inputs(file: str = "sdpo_losses_official") -> dict[str, np.ndarray]:
    """student, teacher (B, T, V), response and effective masks (B, T), and log-probabilities of the sampled tokens."""
    given = golden(file)["inputs"]
    student, teacher = (np.array(given[f"{who}_logits"], dtype=float) for who in ("student", "teacher"))
    mask = np.array(given.get("response_mask", given.get("mask")), dtype=float)
    kept = np.array(given.get("self_distillation_mask", np.ones(len(mask))), dtype=float)
    tokens = np.array(given["completion_ids"], dtype=int)[..., None]
    return {
        "student": student,
        "teacher": teacher,
        "response": mask,
        "distilled": mask * kept[:, None],
        "student_logprobs": np.take_along_axis(log_softmax(student), tokens, -1)[..., 0],
        "teacher_logprobs": np.take_along_axis(log_softmax(teacher), tokens, -1)[..., 0],
    }


def sampled_gradient(weight: np.ndarray, file: str = "sdpo_losses_official") -> np.ndarray:
    """d `-sum weight log p(token)` / d student logits (B, T, V), weights (B, T) held fixed."""
    student = inputs(file)["student"]
    onehot = np.zeros_like(student)
    np.put_along_axis(onehot, np.array(golden(file)["inputs"]["completion_ids"], dtype=int)[..., None], 1.0, -1)
    return weight[..., None] * (np.exp(log_softmax(student)) - onehot)


def both(student: np.ndarray, teacher: np.ndarray, mask: np.ndarray, **options: Any) -> tuple[float, np.ndarray]:
    """Loss and gradient of the reference, after the implementation was found equal."""
    loss = reference.logit_loss(student, teacher, mask, **options)
    gradient = reference.logit_loss_grad(student, teacher, mask, **options)
    logits = torch.tensor(student, requires_grad=True)
    tensors = {key: torch.tensor(v) if isinstance(v, np.ndarray) else v for key, v in options.items()}
    actual = sdpo.logit_loss(logits, torch.tensor(teacher), torch.tensor(mask), **tensors)
    np.testing.assert_allclose(actual.item(), loss, **EXACT)
    np.testing.assert_allclose(torch.autograd.grad(actual, logits)[0].numpy(), gradient, rtol=1e-12, atol=1e-15)
    return loss, gradient
