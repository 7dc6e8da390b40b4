"""Cases of the losses here, as the reference and as an implementation takes them; the generators are the harness's."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from paritygate.harness.strategies import MASKS, logit_pair, masks, ragged, sampled, seeded, tensor

GATE_MARGIN = 1e-3  # |l_p - l_q| below which float32 may decide otherwise: such episodes are made unsuccessful


@dataclass
class SpodCase:
    """A ragged batch: packed float64 logits and indices, and the same as the reference's episodes."""

    dtype: str
    regime: str
    student: np.ndarray
    teacher: np.ndarray
    actions: np.ndarray
    action_index: np.ndarray
    episode_index: np.ndarray
    success: np.ndarray
    options: dict[str, float]

    def episodes(self) -> list[dict[str, Any]]:
        """The reference's form."""
        episodes: list[dict[str, Any]] = [{"success": bool(s), "actions": []} for s in self.success]
        for a, e in enumerate(self.episode_index):
            rows = self.action_index == a
            episodes[e]["actions"].append(
                {
                    "student_logits": self.student[rows],
                    "teacher_logits": self.teacher[rows],
                    "tokens": self.actions[rows],
                }
            )
        return episodes

    def arguments(self, device: str) -> dict[str, Any]:
        """The packed form of an implementation, student_logits without requires_grad."""
        return {
            "student_logits": tensor(self.student, self.dtype, device),
            "teacher_logits": tensor(self.teacher, self.dtype, device),
            "actions": torch.tensor(self.actions, device=device),
            "action_index": torch.tensor(self.action_index, device=device),
            "episode_index": torch.tensor(self.episode_index, device=device),
            "success": torch.tensor(self.success, device=device),
            **self.options,
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Plain float64 log-softmax of (N, V): only to look at a case, never to judge one."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@st.composite
def spod_cases(draw: st.DrawFn, dtype: str, regime: str, vocabularies: tuple[int, ...] = (2, 3, 7, 33)):
    """Ragged batches: single tokens, long and short actions, lone episodes, tying rows, every kind of success."""
    rng = seeded(draw, dtype, regime)
    vocabulary = draw(sampled(*vocabularies))
    action_index, episode_index = draw(ragged())
    student, teacher = logit_pair(rng, (len(action_index), vocabulary), regime, dtype)
    tied = rng.random(len(episode_index)) < 0.2
    teacher = np.where(tied[action_index][:, None], student, teacher)
    finite = np.isfinite(student)
    actions = np.array([rng.choice(np.flatnonzero(row)) for row in finite])
    likely = rng.random(len(actions)) < 0.5
    actions = np.where(likely, student.argmax(-1), actions)
    options = {
        "tau0": draw(sampled(0.5, 1.0, 0.05)),
        "floor_weight": draw(sampled(1.0, 0.3, 2.0, 0.0)),
    }
    case = SpodCase(dtype, regime, student, teacher, actions, action_index, episode_index, np.ones(0, bool), options)
    case.success = settled(case, rng.random(episode_index[-1] + 1) < 0.7)
    return case


def settled(case: SpodCase, success: np.ndarray | None = None) -> np.ndarray:
    """`success`, but none for an episode with an action so near the gate or the floor that rounding decides."""
    success = case.success if success is None else success
    same = (case.student == case.teacher).all(-1)
    tied = np.bincount(case.action_index, weights=~same) == 0
    rows = np.arange(len(case.actions))
    l_p, l_q = (
        np.bincount(case.action_index, weights=log_softmax(logits)[rows, case.actions])
        for logits in (case.student, case.teacher)
    )
    with np.errstate(invalid="ignore"):
        gate_near = ~tied & ~(np.abs(l_p - l_q) > GATE_MARGIN * np.maximum(1.0, np.minimum(np.abs(l_p), 1e3) / 30))
    floor_near = np.abs(l_p - np.log(case.options["tau0"])) < 1e-5
    near = np.bincount(case.episode_index, weights=gate_near | floor_near) > 0
    return success & ~near


@dataclass
class LogitCase:
    """Logits (B, T, V), a mask and options of `logit_loss`; poison stands where the mask is 0."""

    dtype: str
    regime: str
    student: np.ndarray
    teacher: np.ndarray
    mask: np.ndarray
    ratio: np.ndarray | None
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, device: str) -> dict[str, Any]:
        """For an implementation, masked positions poisoned with NaN and infinities."""
        student, teacher = self.student.copy(), self.teacher.copy()
        poison = np.array([np.nan, np.inf, -np.inf])
        hidden = self.mask == 0
        student[hidden] = poison[np.arange(student[hidden].size) % 3].reshape(student[hidden].shape)
        teacher[hidden] = np.nan
        return {
            "student_logits": tensor(student, self.dtype, device),
            "teacher_logits": tensor(teacher, self.dtype, device),
            "mask": torch.tensor(self.mask, device=device),
            "importance_ratio": None if self.ratio is None else tensor(self.ratio, "float64", device),
            **self.options,
        }

    def reference(self) -> dict[str, Any]:
        """For the reference."""
        arrays = {"student_logits": self.student, "teacher_logits": self.teacher, "mask": self.mask}
        return {**arrays, "importance_ratio": self.ratio, **self.options}


@st.composite
def logit_cases(draw: st.DrawFn, dtype: str, regime: str, vocabularies: tuple[int, ...] = (2, 3, 7, 33)):
    """Every divergence, truncation and aggregation over masks of every pattern."""
    rng = seeded(draw, dtype, regime)
    vocabulary = draw(sampled(*vocabularies))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    student, teacher = logit_pair(rng, (*shape, vocabulary), regime, dtype)
    options = {
        "divergence": draw(sampled("forward_kl", "reverse_kl", "jsd")),
        "mixture": draw(sampled(0.5, 0.1, 0.9, 1e-3)),
        "top_k": draw(st.none() | st.integers(1, vocabulary)),
        "tail": draw(st.booleans()),
        "aggregation": draw(sampled("token_mean", "sequence_mean", "sequence_sum", "token_sum")),
    }
    ratio = rng.choice([0.0, 0.3, 1.0, 2.5], size=shape) if draw(st.booleans()) else None
    mask = masks(rng, draw(sampled(*MASKS)), shape)
    return LogitCase(dtype, regime, student, teacher, mask, ratio, options)
