"""Every obligation of spec/service.json, at the embedded server or at the one that `--service` names."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from paritygate.service.lab import Lab
from paritygate.service.obligations import Obligation, load
from paritygate.service.runner import Result, run_one

RESULTS: dict[str, Result] = {}


@pytest.mark.parametrize("entry", load().entries, ids=lambda entry: entry.name)
def test_obligation(
    entry: Obligation, lab: Lab, foreign: bool, ending: Callable[[], AbstractContextManager[None]]
) -> None:
    with ending():
        result = RESULTS[entry.name] = run_one(lab, entry, RESULTS)
    if result.outcome == "departs":
        pytest.fail(f"{entry.name}: {entry.claim}\n{result.because}\n\n{result.program}", pytrace=False)
    if foreign:
        if result.outcome != "holds":
            pytest.skip(f"{result.outcome}: {result.because}")
        return
    assert result.outcome == "holds", result.because
    assert (result.contrast is not None) == bool(entry.contrast), "a contrast has a name in the spec, and is measured"
    assert result.bound == entry.bound, "the embedded server holds at the declared tolerance, not at its noise"
