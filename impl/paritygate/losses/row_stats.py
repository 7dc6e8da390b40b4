"""The statistics of a row of logits: what every engine measures, and its gradient is made from."""

from enum import IntEnum, auto


class RowStat(IntEnum):
    """Columns of `row_stats` (N, len(RowStat)) float64, in nats where logarithms; the enum of cpp/rows.hpp is the same.

    Maximum and sum of exponentials are kept apart: one float32 log-sum-exp loses 5e-4 at float16's +-65504. By SLOPE
    and CURVE, NaN and anything where a row has none, nearly equal rows keep their digits.
    """

    STUDENT_MAXIMUM = 0
    STUDENT_SUM = auto()
    TEACHER_MAXIMUM = auto()
    TEACHER_SUM = auto()
    STUDENT_LOGPROB = auto()
    TEACHER_LOGPROB = auto()
    KL = auto()
    SLOPE = auto()
    CURVE = auto()
