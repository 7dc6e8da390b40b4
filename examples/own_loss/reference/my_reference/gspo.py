"""GSPO (Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, eq. 5 and 7), one clipped ratio a sequence.

s_i = exp(mean_t (logprob_it - old_logprob_it)),   L = - mean_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)
"""

import numpy as np


def sequence_ratio(logprobs: np.ndarray, old_logprobs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """s_i: (B,) from (B, T) log-probabilities in nats and a mask of 0 and 1; 1 for a sequence without a token."""
    difference = np.where(mask == 1, logprobs - old_logprobs, 0.0)
    return np.exp(difference.sum(-1) / np.maximum(mask.sum(-1), 1))


def loss(
    logprobs: np.ndarray,
    old_logprobs: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    low: float = 3e-4,
    high: float = 4e-4,
) -> float:
    """L over the sequences that have a token; 0 where none has one. advantages: (B,)."""
    ratio, some = sequence_ratio(logprobs, old_logprobs, mask), mask.any(-1)
    gain = np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)
    return -float(gain[some].sum()) / max(int(some.sum()), 1)


def grad(
    logprobs: np.ndarray,
    old_logprobs: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    low: float = 3e-4,
    high: float = 4e-4,
) -> np.ndarray:
    """d L / d logprobs, (B, T): -s_i A_i / (n_i B) on tokens of a sequence whose ratio is not clipped, else 0."""
    ratio, some = sequence_ratio(logprobs, old_logprobs, mask), mask.any(-1)
    clipped = np.where(advantages > 0, ratio > 1 + high, ratio < 1 - low)
    slope = np.where(clipped, 0.0, -ratio * advantages) / np.maximum(mask.sum(-1), 1) / max(int(some.sum()), 1)
    return np.where(mask == 1, slope[:, None], 0.0)


def advantages(logprobs: np.ndarray, composites: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """-d L / d logprobs (B, T) at the log-probabilities that sampled, s_i = 1, for centred composites (B,)."""
    return -grad(logprobs, logprobs, composites - composites.mean(), mask)
