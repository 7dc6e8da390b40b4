"""The rule from figures to outcomes."""

import pytest

from paritygate.service.outcome import Measured, judge, worst


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


def test_of_several_that_have_to_hold_one_that_departs_decides_then_one_that_cannot_be_told() -> None:
    holds, blind, departs = Measured(0.004, "", 0.5), Measured(0.0, "", 0.0), Measured(0.006, "", 0.5)
    assert worst((holds, blind)) is blind
    assert worst((blind, departs, holds)) is departs
    assert worst((Measured(0.001, "", 0.5), holds)) is holds


def test_a_service_without_room_refuses_and_one_that_fails_is_broken() -> None:
    import httpx
    import tinker

    from paritygate.service.connection import Broken, Refusal, _classified

    for status, kind in ((429, Refusal), (400, Refusal), (422, Refusal), (500, Broken), (501, Broken), (408, Broken)):
        answer = httpx.Response(status, request=httpx.Request("POST", "http://127.0.0.1/api/v1/create_model"))
        error = tinker.APIStatusError(f"status {status}", response=answer, body=None)
        assert isinstance(_classified("create_model", error), kind), status
