"""Inputs that aim: shapes, masks and values at which losses go wrong, rounded to a dtype before anyone sees them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = ("float16", "bfloat16", "float32", "float64")
REGIMES = ("ordinary", "near_equal", "extreme")
GATE_MARGIN = 1e-3  # |l_p - l_q| below which float32 may decide otherwise: such episodes are made unsuccessful
LARGEST = 65504.0  # of float16


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` rounded to `dtype`, as float64: what every side is given."""
    return torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype)).double().numpy()


def tensor(values: Any, dtype: str, device: str) -> torch.Tensor:
    """Rounded `values` as a tensor that loses nothing."""
    return torch.tensor(np.asarray(values), dtype=torch.float64).to(getattr(torch, dtype)).to(device)


def seeded(draw: st.DrawFn, dtype: str, regime: str) -> np.random.Generator:
    """Other numbers for each dtype and regime, from a seed that is drawn."""
    return np.random.default_rng((draw(st.integers(0, 2**32 - 1)), DTYPES.index(dtype), REGIMES.index(regime)))


def logit_pair(
    rng: np.random.Generator, shape: tuple[int, ...], regime: str, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Student and teacher logits (..., V), at least one finite entry in common in each row."""
    student = rng.normal(size=shape) * rng.choice([0.5, 3.0, 10.0])
    if rng.random() < 0.25:
        student = np.round(student)  # ties
    if regime == "near_equal":
        student = rounded(student, dtype)
        teacher = student + rng.normal(size=shape) * 10.0 ** -rng.integers(1, 7)
    else:
        teacher = rng.normal(size=shape) * rng.choice([0.5, 3.0, 10.0])
    if regime == "extreme":
        for logits in (student, teacher):
            spots = rng.random(shape) < 0.3
            logits[spots] = rng.choice([LARGEST, -LARGEST, 0.0, 30.0, -120.0], size=int(spots.sum()))
        anchor = rng.integers(shape[-1])
        student[..., anchor], teacher[..., anchor] = np.clip(student[..., anchor], -9, 9), rng.normal()
        padding = rng.random(shape[-1]) < rng.choice([0.0, 0.4])
        padding[anchor] = False
        student[..., padding] = teacher[..., padding] = -np.inf
        if rng.random() < 0.4:
            excluded = rng.random(shape) < 0.2
            excluded[..., anchor] = False
            (student if rng.random() < 0.3 else teacher)[excluded] = -np.inf
    return rounded(student, dtype), rounded(teacher, dtype)


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
        found: list[dict[str, Any]] = [{"success": bool(s), "actions": []} for s in self.success]
        for a, e in enumerate(self.episode_index):
            rows = self.action_index == a
            found[e]["actions"].append(
                {
                    "student_logits": self.student[rows],
                    "teacher_logits": self.teacher[rows],
                    "tokens": self.actions[rows],
                }
            )
        return found

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
    vocabulary = draw(st.sampled_from(vocabularies))
    lengths = draw(st.lists(st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=4), min_size=1, max_size=4))
    episode_index = np.repeat(np.arange(len(lengths)), [len(actions) for actions in lengths])
    action_index = np.repeat(np.arange(len(episode_index)), [n for actions in lengths for n in actions])
    student, teacher = logit_pair(rng, (len(action_index), vocabulary), regime, dtype)
    tied = rng.random(len(episode_index)) < 0.2
    teacher = np.where(tied[action_index][:, None], student, teacher)
    finite = np.isfinite(student)
    actions = np.array([rng.choice(np.flatnonzero(row)) for row in finite])
    likely = rng.random(len(actions)) < 0.5
    actions = np.where(likely, student.argmax(-1), actions)
    options = {
        "tau0": draw(st.sampled_from([0.5, 1.0, 0.05])),
        "floor_weight": draw(st.sampled_from([1.0, 0.3, 2.0, 0.0])),
    }
    case = SpodCase(dtype, regime, student, teacher, actions, action_index, episode_index, np.ones(0, bool), options)
    case.success = settled(case, rng.random(len(lengths)) < 0.7)
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


def masks(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """(B, T) of 0 and 1, at least one 1: full, prompt then action, scattered, one token, one row empty."""
    mask = np.ones(shape, dtype=np.int64)
    if kind == "prompt":
        mask[:, : shape[1] // 2] = 0
    elif kind == "scattered":
        mask = (rng.random(shape) < 0.5).astype(np.int64)
    elif kind == "one token":
        mask[:] = 0
    elif kind == "empty row":
        mask[rng.integers(shape[0])] = 0
    if not mask.any():
        mask[rng.integers(shape[0]), rng.integers(shape[1])] = 1
    return mask


MASKS = ("full", "prompt", "scattered", "one token", "empty row")


@st.composite
def logit_cases(draw: st.DrawFn, dtype: str, regime: str, vocabularies: tuple[int, ...] = (2, 3, 7, 33)):
    """Every divergence, truncation and aggregation over masks of every pattern."""
    rng = seeded(draw, dtype, regime)
    vocabulary = draw(st.sampled_from(vocabularies))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    student, teacher = logit_pair(rng, (*shape, vocabulary), regime, dtype)
    options = {
        "divergence": draw(st.sampled_from(["forward_kl", "reverse_kl", "jsd"])),
        "mixture": draw(st.sampled_from([0.5, 0.1, 0.9, 1e-3])),
        "top_k": draw(st.none() | st.integers(1, vocabulary)),
        "tail": draw(st.booleans()),
        "aggregation": draw(st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "token_sum"])),
    }
    ratio = rng.choice([0.0, 0.3, 1.0, 2.5], size=shape) if draw(st.booleans()) else None
    mask = masks(rng, draw(st.sampled_from(MASKS)), shape)
    return LogitCase(dtype, regime, student, teacher, mask, ratio, options)


@st.composite
def logprob_rows(draw: st.DrawFn, dtype: str, batched: bool = True):
    """Teacher and student log-probabilities and a mask, (..., T); near-equal, far apart, teacher at -inf."""
    rng = seeded(draw, dtype, "ordinary")
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 3)])) if batched else ()
    shape = (*lead, draw(st.integers(1, 9)))
    student = rounded(-rng.exponential(rng.choice([0.01, 2.0, 30.0]), size=shape), dtype)
    teacher = rounded(student + rng.normal(size=shape) * rng.choice([1e-4, 0.5, 10.0]), dtype)
    if draw(st.booleans()):
        teacher = np.where(rng.random(shape) < 0.2, -np.inf, teacher)
    mask = (rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))).astype(np.int64)
    return teacher, student, mask
