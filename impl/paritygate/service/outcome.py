"""What a check measures, and the outcome that follows: holds, departs, undecided or refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["holds", "departs", "undecided", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("holds", "departs", "undecided", "refused")
STEP = 0.005  # the tolerance of two steps that are equal by right, of the class `step` in spec/service.json
CONTRAST = 4.0  # a contrast arm must differ by at least this many bounds, else the check sees too little to decide


class Undecided(Exception):  # noqa: N818
    """The check cannot tell, and why."""


@dataclass(frozen=True)
class Measured:
    """A difference, and the sizes that it is judged by, all in one unit.

    figure: how far the service is from what is right. noise: the bound that its measured noise asks for (0: none).
    contrast: how far an arm that is wrong on purpose is; None where the check needs none, with `because`.
    because: what was compared, in words, with the numbers.
    """

    figure: float
    because: str
    contrast: float | None = None
    noise: float = 0.0


@dataclass(frozen=True)
class Judged:
    """An outcome with the bound that decided it."""

    outcome: Outcome
    bound: float
    because: str


def judge(measured: Measured, tolerance: float) -> Judged:
    """Hold `measured` to the declared tolerance or to the noise, whichever is larger.

    A contrast of 0 shows nothing, at a bound of 0 either. Where the noise is what decides, a figure between the bound
    and three times the bound is undecided.
    """
    bound = max(tolerance, measured.noise)
    contrast = measured.contrast
    blind = contrast is not None and not (contrast > 0 and contrast >= CONTRAST * bound)
    if measured.figure <= bound and not blind:
        return Judged("holds", bound, measured.because)
    if measured.figure <= bound or (blind and measured.figure <= CONTRAST * bound):
        return Judged(
            "undecided",
            bound,
            f"{measured.because}; what is wrong on purpose differs by {contrast:.3g} only, "
            f"and {CONTRAST * bound:.3g} is needed to tell",
        )
    if measured.noise > tolerance and measured.figure <= 3 * bound:
        return Judged("undecided", bound, f"{measured.because}; the service's noise allows {bound:.3g}")
    return Judged("departs", bound, measured.because)


def worst(each: Sequence[Measured], tolerance: float = STEP) -> Measured:
    """The one that decides where all have to hold: one that departs, else one that cannot be told, else the farthest.

    Where nothing tells a right from a wrong one in one of them, that another holds says nothing of it.
    """
    order = ("departs", "undecided", "holds")
    return min(each, key=lambda m: (order.index(judge(m, tolerance).outcome), -m.figure / max(m.noise, tolerance)))
