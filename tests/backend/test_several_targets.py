"""A pass with several targets a position has no single logprob a position, and says so by giving none."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from paritygate.backend.trainer import _passed
from paritygate.experiment.step.metrics import logprob_difference


def output(*arrays: np.ndarray) -> Any:
    rows = [{"logprobs": SimpleNamespace(to_numpy=lambda array=array: array)} for array in arrays]
    return SimpleNamespace(metrics={"loss:sum": 1.5}, loss_fn_outputs=rows)


def test_one_target_a_position_has_one_logprob_each():
    assert _passed(output(np.array([-1.0, -2.0])), 1).logprobs == ((-1.0, -2.0),)


def test_several_targets_a_position_have_none():
    passed = _passed(output(np.full((2, 3), -1.0), np.full((4, 3), -2.0)), 2)
    assert (passed.loss, passed.logprobs) == (1.5, ())


def test_nothing_recomputed_is_no_difference_of_zero():
    assert logprob_difference([], ()) == {
        "sampler_recomputed_mean_abs_diff": None,
        "sampler_recomputed_max_abs_diff": None,
    }
