"""The statistics of a row of logits: what every engine measures, and its gradient is made from."""

from torch import Tensor

COLUMNS = (
    "student_maximum",
    "student_sum",
    "teacher_maximum",
    "teacher_sum",
    "student_logprob",
    "teacher_logprob",
    "kl",
    "slope",
    "curve",
)
"""What `statistics` keeps of a row, float64; by slope and curve nearly equal rows keep their digits."""


def column(rows: Tensor, name: str) -> Tensor:
    """One of the COLUMNS of statistics (N, 9), (N,)."""
    return rows[:, COLUMNS.index(name)]
