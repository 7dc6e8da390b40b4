"""The deciding interval against its float64 reference, and the design check against its published numbers."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paritygate.statistics import design_check, half_width, paired_hoeffding
from paritygate_reference import decision

scores = st.floats(0, 1)
pairs = st.lists(st.tuples(scores, scores), min_size=1, max_size=80)


@given(pairs, st.floats(1e-6, 0.999), st.integers(1, 8))
def test_the_interval_is_the_reference_s(pairs: list[tuple[float, float]], alpha: float, criteria: int):
    treatment, baseline = zip(*pairs, strict=True)
    ours = paired_hoeffding(treatment, baseline, alpha=alpha, criteria=criteria)
    theirs = decision.paired_hoeffding(treatment, baseline, alpha=alpha, criteria=criteria)
    for name in ("mean", "low", "high", "half_width"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-13, abs=1e-15)


@given(pairs)
def test_swapping_the_arms_mirrors_the_interval(pairs: list[tuple[float, float]]):
    treatment, baseline = zip(*pairs, strict=True)
    one, other = paired_hoeffding(treatment, baseline), paired_hoeffding(baseline, treatment)
    assert (one.mean, one.low, one.high) == (-other.mean, -other.high, -other.low)


def test_other_bounds_only_stretch_the_interval():
    treatment, baseline = [0.0, 10.0, 4.0], [2.0, 3.0, 1.0]
    wide = paired_hoeffding(treatment, baseline, bounds=(0, 10))
    unit = paired_hoeffding([t / 10 for t in treatment], [b / 10 for b in baseline])
    assert wide.half_width == pytest.approx(10 * unit.half_width)
    assert wide.mean == pytest.approx(10 * unit.mean)


def test_the_numbers_that_the_experiment_was_declared_with():
    check = design_check(60, margin=0.03)
    assert check.half_width == pytest.approx(2 * math.sqrt(math.log(80) / 120))
    assert round(check.half_width, 3) == 0.382
    assert dict(check.n_required) == {0.05: 30023, 0.10: 2451, 0.15: 834}
    assert check.smallest == pytest.approx(0.03 + check.half_width)
    assert not check.feasible
    assert design_check(834, margin=0.03).feasible
    assert not design_check(833, margin=0.03).feasible


def test_an_effect_that_is_no_larger_than_the_margin_is_never_certified():
    assert dict(design_check(10**9, margin=0.1, effects=(0.05, 0.1)).n_required) == {0.05: None, 0.1: None}
    assert not design_check(10**9, margin=0.1, effects=(0.05, 0.1)).feasible


def test_the_n_required_is_the_least_that_has_the_power():
    def power(n: int, effect: float) -> float:
        return NormalDist(effect, 0.6 / math.sqrt(n)).cdf(2 * effect - 0.03 - half_width(n, criteria=2))

    for effect, n in design_check(60, margin=0.03).n_required.items():
        assert n is not None
        assert power(n, effect) >= 0.8 > power(n - 1, effect)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"treatment": [0.5], "baseline": [0.5, 0.5]}, "pairs"),
        ({"treatment": [], "baseline": []}, "at least 1"),
        ({"treatment": [1.1], "baseline": [0.5]}, r"treatment\[0\] is 1.1"),
        ({"treatment": [0.1], "baseline": [math.nan]}, r"baseline\[0\] is nan"),
        ({"treatment": [0.1], "baseline": [0.2], "alpha": 0.0}, "alpha"),
        ({"treatment": [0.1], "baseline": [0.2], "alpha": 1.0}, "alpha"),
        ({"treatment": [0.1], "baseline": [0.2], "criteria": 0}, "criteria"),
        ({"treatment": [0.1], "baseline": [0.2], "bounds": (1.0, 0.0)}, "bounds"),
    ],
)
def test_what_is_no_paired_result_is_named(arguments: dict[str, object], words: str):
    with pytest.raises(ValueError, match=words):
        paired_hoeffding(**arguments)  # type: ignore[arg-type]


def test_numpy_scores_are_scores():
    rng = np.random.default_rng(0)
    treatment, baseline = rng.random(60), rng.random(60)
    assert paired_hoeffding(treatment, baseline).mean == pytest.approx(float((treatment - baseline).mean()))
