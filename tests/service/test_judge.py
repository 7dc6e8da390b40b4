"""The rule from figures to outcomes."""

import pytest

from paritygate.service.outcome import Measured, judge


@pytest.mark.parametrize(
    ("figure", "contrast", "noise", "outcome"),
    [
        (0.001, 0.5, 0.0, "holds"),
        (0.005, None, 0.0, "holds"),
        (0.0051, 0.5, 0.0, "departs"),
        (0.001, 0.01, 0.0, "undecided"),  # the contrast shows nothing
        (0.001, float("nan"), 0.0, "undecided"),
        (0.9, 0.01, 0.0, "departs"),  # whatever the contrast, this is far off
        (0.03, 0.5, 0.02, "undecided"),  # between the noise and three times the noise
        (0.07, 0.5, 0.02, "departs"),
        (0.015, 0.5, 0.02, "holds"),
        (0.015, 0.05, 0.02, "undecided"),
        (float("nan"), 0.5, 0.0, "departs"),
        (float("inf"), 0.5, 0.0, "departs"),
    ],
)
def test_judge(figure: float, contrast: float | None, noise: float, outcome: str) -> None:
    assert judge(Measured(figure, "", contrast, noise), 0.005).outcome == outcome
