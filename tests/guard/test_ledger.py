"""The ledger: what `compare` lets pass, what it refuses, and what it counts."""

import math

import numpy as np
import pytest
import torch
from mpmath import mpf

from paritygate.errors import Refused
from paritygate.harness.ledger import Ledger
from paritygate.spec.losses import required, shortfalls

ROWS = [
    {"dtype": "float32", "device": "any", "regime": "ordinary", "rtol": 0.1, "atol": 0.01},
    {"dtype": "float32", "device": "cuda", "regime": "ordinary", "rtol": 0.5, "atol": 0.0},
    {"dtype": "float32", "device": "any", "regime": "scaled", "rtol": 0.1, "atol": 0.0, "scale": "max"},
    {"dtype": "float32", "device": "any", "regime": "angle", "rtol": 1.0, "atol": 1.0, "min_cosine": 0.99},
    {"dtype": "float64", "device": "any", "regime": "exact", "rtol": 0.0, "atol": 0.0},
    {"dtype": "bfloat16", "device": "cuda", "regime": "ordinary", "rtol": 0.5, "atol": 0.0},
]
SPEC = {"losses": {"toy": {"obligations": {"toy/value": {"claim": "c", "min_comparisons": 2, "tolerances": ROWS}}}}}


@pytest.fixture
def book() -> Ledger:
    return Ledger(SPEC, "cpu", frozenset({"toy/value"}))


def margin(book: Ledger) -> float:
    return book.results()["toy/value"]["worst_margin"]


@pytest.mark.parametrize(
    ("actual", "expected", "dtype", "regime"),
    [
        (1.1, 1.0, "float32", "ordinary"),
        (0.01, 0.0, "torch.float32", "ordinary"),
        ([1.0, math.inf, -math.inf, math.nan], [1.0, math.inf, -math.inf, math.nan], "float32", "ordinary"),
        (torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]), "float64", "exact"),
        (torch.tensor([1.0], dtype=torch.bfloat16, requires_grad=True), [1.0], "float64", "exact"),
        ([[1.0], [1.0, 2.0]], [[1.0], [1.0, 2.0]], "float64", "exact"),
        ([torch.ones(2), torch.ones(3)], [np.ones(2), np.ones(3)], "float64", "exact"),
        ([torch.tensor(1.0), torch.tensor(2.0)], [1.0, 2.0], "float64", "exact"),
        (torch.tensor([True, False]), [True, False], "float32", "ordinary"),
        (mpf("0.5"), 0.5, "float64", "exact"),
        (None, None, "float64", "exact"),
        ([None, 1.0], [None, 1.0], "float64", "exact"),
        ([9.0, 101.0], [1.0, 100.0], "float32", "scaled"),
        (3, 3, "float64", "exact"),
    ],
)
def test_agreement(book: Ledger, actual: object, expected: object, dtype: str, regime: str) -> None:
    book.compare("toy/value", actual, expected, dtype=dtype, regime=regime)
    assert margin(book) <= 1.0
    assert book.failures == []


@pytest.mark.parametrize(
    ("actual", "expected", "dtype", "regime", "words"),
    [
        (1.12, 1.0, "float32", "ordinary", "value is 1.12, expected 1.0, difference 0.12, allowed 0.11"),
        ([0.0, math.nan], [0.0, 1.0], "float32", "ordinary", "[1] is nan"),
        ([0.0, 1.0], [0.0, math.nan], "float32", "ordinary", "[1] is 1.0, expected nan"),
        (math.inf, -math.inf, "float32", "ordinary", "value is inf, expected -inf"),
        (math.inf, 1.0, "float32", "ordinary", "value is inf"),
        (1.0, math.inf, "float32", "ordinary", "expected inf"),
        (np.nextafter(1.0, 2.0), 1.0, "float64", "exact", "allowed 0"),
        ([[1.0], [1.0, 3.0]], [[1.0], [1.0, 2.0]], "float64", "exact", "[1][1] is 3.0"),
        ([[1.0]], [[1.0], [2.0]], "float64", "exact", "shape"),
        ([1.0, 2.0], [[1.0, 2.0]], "float64", "exact", "shape"),
        (torch.ones(2, 1), torch.ones(2), "float64", "exact", "shape"),
        (torch.ones(1), 1.0, "float64", "exact", "shape"),
        (torch.tensor([True, True]), [True, False], "float32", "angle", "[1] is 1.0, expected 0.0"),
        (None, 0.0, "float64", "exact", "expected"),
        (0.0, None, "float64", "exact", "expected"),
        ([9.0, 111.0], [1.0, 100.0], "float32", "scaled", "[1] is 111.0"),
        ([1.0, 0.5], [1.0, 1.0], "float32", "angle", "cosine"),
    ],
)
def test_departure(book: Ledger, actual: object, expected: object, dtype: str, regime: str, words: str) -> None:
    with pytest.raises(AssertionError) as failure:
        book.compare("toy/value", actual, expected, dtype=dtype, regime=regime, where="action 3")
    message = str(failure.value)
    assert words in message
    assert message.startswith("toy/value (float")
    assert "at action 3: " in message
    assert "\n" not in message
    assert book.failures == [message]
    assert margin(book) > 1.0
    assert shortfalls(required(SPEC, "cpu"), book.results())


def test_the_row_of_the_device_goes_before_the_row_of_any() -> None:
    book = Ledger(SPEC, "cuda:0", frozenset({"toy/value"}))
    book.compare("toy/value", 1.4, 1.0, dtype="float32")
    with pytest.raises(AssertionError):
        book.compare("toy/value", 0.01, 0.0, dtype="float32")


def test_a_test_that_is_not_marked_may_not_compare(book: Ledger) -> None:
    with pytest.raises(ValueError, match="is not marked"):
        book.compare("toy/other", 1.0, 1.0, dtype="float32")
    book.current = frozenset()
    with pytest.raises(ValueError, match="is not marked"):
        book.compare("toy/value", 1.0, 1.0, dtype="float32")


def test_an_undeclared_tolerance(book: Ledger) -> None:
    for dtype, regime in (("float16", "ordinary"), ("bfloat16", "ordinary"), ("float32", "other")):
        with pytest.raises(ValueError, match="declares no tolerance"):
            book.compare("toy/value", 1.0, 1.0, dtype=dtype, regime=regime)


def test_comparing_nothing_counts_for_nothing(book: Ledger) -> None:
    book.compare("toy/value", [], [], dtype="float32")
    book.compare("toy/value", torch.zeros(0, 3), np.zeros((0, 3)), dtype="float32")
    assert book.results() == {}
    with pytest.raises(AssertionError, match="shape"):
        book.compare("toy/value", [], [1.0], dtype="float32")


def test_what_is_counted(book: Ledger) -> None:
    book.compare("toy/value", 1.0, 1.0, dtype="float32")
    book.compare("toy/value", 1.055, 1.0, dtype="float32")
    book.compare("toy/value", 1.0, 1.0, dtype="float64", regime="exact", oracle="mpmath")
    result = book.results()["toy/value"]
    assert result["comparisons"] == 3
    assert result["worst_margin"] == pytest.approx(0.5)
    assert [(cell["dtype"], cell["oracle"], cell["comparisons"]) for cell in result["cells"]] == [
        ("float32", "reference", 2),
        ("float64", "mpmath", 1),
    ]


def test_green_asks_for_every_declared_tolerance_of_the_device(book: Ledger) -> None:
    wanted = required(SPEC, "cpu")
    for regime, dtype in (("ordinary", "float32"), ("scaled", "float32"), ("angle", "float32")):
        book.compare("toy/value", 1.0, 1.0, dtype=dtype, regime=regime)
    assert shortfalls(wanted, book.results()) == [
        "toy/value was never compared in float64, regime exact, for which it declares a tolerance"
    ]
    book.compare("toy/value", 1.0, 1.0, dtype="float64", regime="exact")
    assert shortfalls(wanted, book.results()) == []
    assert len(shortfalls(required(SPEC, "cuda"), book.results())) == 1  # bfloat16, on the device only


def test_a_loss_without_a_comparison_is_one_sentence_where_it_has_many_obligations() -> None:
    wanted = {f"{loss}/{i}": {"min_comparisons": 2, "rows": []} for loss, n in (("a", 3), ("b", 4)) for i in range(n)}
    assert shortfalls(wanted, {}) == [
        *(f"a/{i} has 0 of the 2 comparisons that count" for i in range(3)),
        "b has no comparison for any of its 4 obligations",
    ]
    met = {"b/0": {"comparisons": 2, "worst_margin": 0.5, "cells": []}}
    assert shortfalls(wanted, met)[3:] == [f"b/{i} has 0 of the 2 comparisons that count" for i in (1, 2, 3)]


def test_a_loss_that_the_spec_does_not_know() -> None:
    with pytest.raises(Refused, match="knows no loss 'ppo'"):
        required(SPEC, "cpu", ["toy", "ppo"])


@pytest.mark.parametrize(("made", "margin", "met"), [(3, 1.0, True), (2, 1.0, False), (3, 1.0000001, False)])
def test_an_obligation_is_met_exactly_at_its_least_number_and_at_its_tolerance(
    made: int, margin: float, met: bool
) -> None:
    """An error of all that is allowed is allowed; of a receipt as of a session."""
    wanted = {"toy/value": {"min_comparisons": 3, "rows": [("float64", "ordinary")]}}
    cell = {
        "dtype": "float64",
        "regime": "ordinary",
        "oracle": "reference",
        "comparisons": made,
        "worst_margin": margin,
    }
    result = {"comparisons": made, "worst_margin": margin, "cells": [cell]}
    assert (shortfalls(wanted, {"toy/value": result}) == []) is met
