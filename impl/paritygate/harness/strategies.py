"""Generators that aim: values, shapes and masks at which losses go wrong, rounded to a dtype before anyone sees them.

Teacher and student that nearly agree, logits of +-65504 and -inf, ties, padded vocabularies, masks of every pattern,
ragged batches. All numbers are float64 arrays that their dtype holds exactly, so that every side is given the same.
"""

import functools
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = ("float16", "bfloat16", "float32", "float64")
REGIMES = ("ordinary", "near_equal", "extreme")
LARGEST = 65504.0  # of float16
SEEDS = st.integers(0, 2**32 - 1)


@functools.lru_cache(maxsize=None, typed=True)  # 1 and 1.0 are two values
def sampled(*values: Any) -> st.SearchStrategy[Any]:
    """`sampled_from` of hashable `values`, made once: where a draw makes it, Hypothesis checks it again each time."""
    return st.sampled_from(values)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` rounded to `dtype`, as float64: what every side is given."""
    return torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype)).double().numpy()


def tensor(values: Any, dtype: str, device: str) -> torch.Tensor:
    """Rounded `values` as a tensor that loses nothing."""
    return torch.tensor(np.asarray(values), dtype=torch.float64).to(getattr(torch, dtype)).to(device)


def seeded(draw: st.DrawFn, dtype: str, regime: str) -> np.random.Generator:
    """Other numbers for each dtype and regime, from a seed that is drawn."""
    return np.random.default_rng((draw(SEEDS), DTYPES.index(dtype), REGIMES.index(regime)))


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
def logprob_rows(draw: st.DrawFn, dtype: str, batched: bool = True):
    """Teacher and student log-probabilities and a mask, (..., T); near-equal, far apart, teacher at -inf."""
    rng = seeded(draw, dtype, "ordinary")
    lead = draw(sampled((), (1,), (3,), (2, 3))) if batched else ()
    shape = (*lead, draw(st.integers(1, 9)))
    student = rounded(-rng.exponential(rng.choice([0.01, 2.0, 30.0]), size=shape), dtype)
    teacher = rounded(student + rng.normal(size=shape) * rng.choice([1e-4, 0.5, 10.0]), dtype)
    if draw(st.booleans()):
        teacher = np.where(rng.random(shape) < 0.2, -np.inf, teacher)
    mask = (rng.random(shape) < draw(sampled(0.0, 0.5, 1.0))).astype(np.int64)
    return teacher, student, mask


@st.composite
def ragged(draw: st.DrawFn, episodes: int = 4, actions: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """(action_index (N,), episode_index (A,)) of at most `episodes` of `actions` actions each, 1 to 5 tokens each."""
    lengths = draw(_lengths(episodes, actions))
    episode_index = np.repeat(np.arange(len(lengths)), [len(tokens) for tokens in lengths])
    action_index = np.repeat(np.arange(len(episode_index)), [n for tokens in lengths for n in tokens])
    return action_index, episode_index


@functools.cache
def _lengths(episodes: int, actions: int) -> st.SearchStrategy[list[list[int]]]:
    tokens = st.lists(sampled(1, 1, 2, 5), min_size=1, max_size=actions)
    return st.lists(tokens, min_size=1, max_size=episodes)
