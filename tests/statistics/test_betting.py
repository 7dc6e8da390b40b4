"""The betting interval against the reference's capital, and its own laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paritygate.statistics import betting_bounds, betting_interval, half_width
from paritygate_reference.decision import betting_log_capital

samples = st.lists(st.floats(0, 1), min_size=1, max_size=40)


@given(samples, st.sampled_from([0.01, 0.05, 0.2]))
def test_the_interval_is_where_the_reference_s_capital_stays_below_one_over_alpha(values: list[float], alpha: float):
    interval = betting_interval(values, alpha=alpha)
    goal = math.log(1 / alpha)
    for mean in np.linspace(0, 1, 101):
        capital = betting_log_capital(values, float(mean), alpha=alpha)
        if abs(capital - goal) > 1e-6:
            assert (capital < goal) == (interval.low <= mean <= interval.high), mean


@given(samples)
def test_mirrored_values_have_the_mirrored_interval(values: list[float]):
    one, other = betting_interval(values), betting_interval([1 - value for value in values])
    assert one.low == pytest.approx(1 - other.high, abs=1e-9)
    assert one.high == pytest.approx(1 - other.low, abs=1e-9)


@given(samples)
def test_shifted_and_scaled_values_have_the_shifted_and_scaled_interval(values: list[float]):
    one, other = betting_interval(values), betting_interval([2 * value - 1 for value in values], bounds=(-1, 1))
    assert other.low == pytest.approx(2 * one.low - 1, abs=1e-7)
    assert other.high == pytest.approx(2 * one.high - 1, abs=1e-7)


def test_rows_do_not_see_each_other():
    rows = np.random.default_rng(1).random((5, 30))
    low, high = betting_bounds(rows)
    for index, row in enumerate(rows):
        alone = betting_interval(list(row))
        assert (alone.low, alone.high) == (low[index], high[index])


def test_it_is_narrower_than_hoeffding_where_differences_are_small():
    differences = np.full(60, 0.02)
    interval = betting_interval(list(differences), bounds=(-1, 1), alpha=0.05)
    assert interval.high - interval.low < half_width(60)


@pytest.mark.parametrize("values", [[], [1.5], [math.nan]])
def test_what_has_no_interval_is_refused(values: list[float]):
    with pytest.raises(ValueError, match=r"at least one|outside"):
        betting_interval(values)
