"""The calculator against Python's own evaluation of the same characters, and its bounds."""

import random
import time
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paritygate.retail import arithmetic
from tests.counts import soak

PIECES = ["1", "2", "3", "0", "10", "2.5", ".5", "1.", "00", "00.5", "012", "7", "+", "-", "*", "/", "//", "**"]
PIECES += ["(", ")", "(", ")", " ", "()", "."]


def by_python(expression: str) -> str:
    """What upstream's tool answers, for expressions that stay small."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return str(round(float(eval(expression, {"__builtins__": None}, {})), 2))
        except Exception:
            return "error"


def by_us(expression: str) -> str:
    try:
        return str(round(float(arithmetic.evaluate(expression)), 2))
    except arithmetic.TooLargeError:
        return "too large"
    except Exception:
        return "error"


numbers = st.sampled_from(["0", "1", "2", "7", "10", "0.1", "3.5", ".25", "7.", "00", "466.75", "1.005", "2.675"])
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+-"), inner).map("".join),
        inner.map("({})".format),
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", " + ", " - ", "* ", " /"]), inner).map("".join),
        st.tuples(numbers, st.just("**"), st.sampled_from(["2", "-1", "0.5", "(1-3)", "-2**2"])).map("".join),
        st.tuples(st.just("-"), numbers, st.just("**2")).map("".join),
    ),
    max_leaves=12,
)


@settings(max_examples=soak(quick=300, full=5_000))
@given(expressions)
@example("-2**2")
@example("2**-1")
@example("2**3**2")
@example("(-8)**0.5")
@example("7//-2")
@example("-7//2")
@example("--1")
@example("0.5+0.125")
@example("2.5/2")
def test_well_formed_expressions_have_pythons_value(expression: str) -> None:
    assert by_us(expression) == by_python(expression)


def test_any_sequence_of_pieces_is_accepted_or_refused_as_python_does() -> None:
    rng = random.Random(0)
    beyond = 0
    for _ in range(soak(quick=4_000, full=150_000)):
        expression = "".join(rng.choices(PIECES, k=rng.randint(1, 9)))
        if expression.count("**") > 1:
            continue
        ours, theirs = by_us(expression), by_python(expression)
        if ours == "too large":
            beyond += theirs != "error"  # such as 3//2**72012, which is 0.0
        else:
            assert ours == theirs, expression
    assert beyond <= 3


def test_rounding_is_half_to_even_on_the_binary_value() -> None:
    assert [by_us(text) for text in ("0.125", "0.375", "2.675", "1.005", "-0.001")] == [
        "0.12",
        "0.38",
        "2.67",
        "1.0",
        "-0.0",
    ]


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "9**9**9**9",
        "(9**9**4)**9",
        "9" * 4000 + "*" + "9" * 4000,
        "1+" * 6000 + "1",
        "(" * 200 + "1" + ")" * 200,
        "(" * 5000,
        "-" * 9000 + "1",
        "2**" * 3000 + "2",
        "1" * 9999,
        "((9**5000)" + "*9**5000" * 900 + ")",
    ],
)
def test_no_input_hangs_or_exhausts_the_stack(expression: str) -> None:
    started = time.process_time()
    by_us(expression)
    assert time.process_time() - started < 2


def test_bounds_are_beyond_what_a_shop_needs() -> None:
    assert by_us("2**10000//2**9990") == "1024.0"
    assert by_us("+".join(["0.1"] * 2000)) == "200.0"
    assert by_us("1**999999999999") == "1.0"
    assert by_us("(" * 199 + "1" + ")" * 199) == "1.0"
    with pytest.raises(arithmetic.TooLargeError, match="16384 bits"):
        arithmetic.evaluate("9**9**9")
