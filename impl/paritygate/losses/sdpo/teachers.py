"""SDPO's teachers: which parameters or logits they are made of, and which sibling is their demonstration."""

import math
from collections.abc import Sequence

from torch import Tensor

from ..checks import as_float, same_shape

DECIMALS = 12  # that composites are compared to: means of scores differ by float64's 1e-16, or by 1e-6 and more


def ema(teacher: Tensor, student: Tensor, rate: float) -> Tensor:
    """`(1 - rate) teacher + rate student`, on parameters of equal shapes, in the teacher's dtype, a constant.

    ValueError: rate outside [0, 1], shapes differ. Source: SDPO, arXiv 2601.20802, teacher regularisation.
    Obligations: sdpo/teacher, sdpo/constants.
    """
    return _between("ema", teacher, student, rate)


def trust_region(initial_logits: Tensor, student_logits: Tensor, rate: float) -> Tensor:
    """`(1 - rate) initial + rate student`, on logits (..., V), a constant: the teacher stays near the initial one.

    ValueError as `ema`. Source: SDPO, arXiv 2601.20802, teacher regularisation.
    Obligations: sdpo/teacher, sdpo/constants.
    """
    return _between("trust_region", initial_logits, student_logits, rate)


def frozen_initial(initial_logits: Tensor, student_logits: Tensor) -> Tensor:
    """The initial policy's logits (..., V) as the teacher, a constant, whatever the student has become.

    Obligations: sdpo/unmixed_teacher, sdpo/constants.
    """
    return _between("frozen_initial", initial_logits, student_logits, 0.0)


def current(initial_logits: Tensor, student_logits: Tensor) -> Tensor:
    """The current policy's logits (..., V) as the teacher, a constant: the experiment's choice.

    Obligations: sdpo/unmixed_teacher, sdpo/constants.
    """
    return _between("current", initial_logits, student_logits, 1.0)


def _between(name: str, start: Tensor, end: Tensor, rate: float) -> Tensor:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"{name}: rate is {rate}; it lies in [0, 1]")
    start, end = as_float(start, name).detach(), as_float(end, name).detach()
    same_shape(name, start=start, end=end)
    if rate in (0.0, 1.0):  # 0 times -inf is NaN
        return (end if rate == 1.0 else start).to(start.dtype, copy=True)
    return ((1.0 - rate) * start.double() + rate * end.double()).to(start.dtype)


def select_sibling(
    composites: Sequence[float | None] | Tensor, index: int, threshold: float = 0.8, rule: str = "best"
) -> int | None:
    """The sibling of rollout `index` in its group that serves as demonstration, or None where none reaches `threshold`.

    `best`: the highest composite, ties to the lowest index (the experiment's). `first`: the first at or above the
    threshold (the official code at 0e6d5106). Never `index` itself; a composite of None was not judged and is passed
    over. A composite is a mean of decimal scores and compared to 12 decimals: (0.6 + 0.8 + 1.0) / 3, in float64
    0.7999999999999999, reaches 0.8.
    ValueError: index outside the group, an unknown rule, a composite or threshold that is NaN.
    Obligations: sdpo/sibling.
    """
    group: list[float | None] = composites.tolist() if isinstance(composites, Tensor) else list(composites)
    if not 0 <= index < len(group):
        raise ValueError(f"select_sibling: index {index} lies outside the group of {len(group)}")
    if rule not in ("best", "first"):
        raise ValueError(f"select_sibling: rule is {rule!r}; it is best or first")
    if math.isnan(threshold):
        raise ValueError("select_sibling: threshold is NaN")
    for i, composite in enumerate(group):
        if composite is not None and math.isnan(composite):
            raise ValueError(f"select_sibling: the composite of rollout {i} is NaN")
    decimals = [None if c is None else round(c, DECIMALS) for c in group]
    least = round(threshold, DECIMALS)
    reached = [(c, i) for i, c in enumerate(decimals) if i != index and c is not None and c >= least]
    if not reached:
        return None
    return reached[0][1] if rule == "first" else max(reached, key=lambda pair: (pair[0], -pair[1]))[1]
