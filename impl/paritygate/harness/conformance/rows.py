"""The rows of a report: plain inputs per option and dtype, one row a stress, our promises."""

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paritygate.harness import Unsupported
from paritygate.harness.conformance.functions import Arrays, Function, Option, Outputs, Refusal, Stress
from paritygate.harness.conformance.judge import (
    TOLERANCES,
    Question,
    factor,
    inputs_as_json,
    plain_numbers,
    rounded,
)
from paritygate.harness.conformance.smallest import smallest

Row = dict[str, Any]
CASES = 6
PLAIN_DTYPES = ("float64", "float32")


def rows_of(function: Function, call: Callable[..., Any]) -> Iterator[tuple[str, Row]]:
    """("plain" | "stress" | "promises", row) of one function, each as soon as it is known."""
    supported: list[Option] = []
    departing: dict[str, dict[str, str]] = {}
    narrow = False
    for option, dtype in itertools.product(function.options, PLAIN_DTYPES):
        row, inside = plain(function, call, option, dtype)
        narrow |= inside
        departing.setdefault(option.label, {}).update(row.get("departs_in", {}))
        yield "plain", row
        if row["outcome"] != "unsupported" and option not in supported:
            supported.append(option)
    firsts = list({option.group: option for option in reversed(supported)}.values())[::-1]
    for given in function.stresses:
        for option in stressed(given, supported, firsts):
            for dtype in given.dtypes:
                row = stress(function, call, option, dtype, given)
                ways = row.get("departs_in", {}).items()
                if ways and ways <= departing[option.label].items():
                    row["as_plain"] = True
                yield "stress", row
    if supported:
        for row in promises(function, call, supported, narrow=narrow):
            yield "promises", row


def stressed(given: Stress, supported: list[Option], firsts: list[Option]) -> list[Option]:
    """The options that a stress is made for: one of each group, of those to which it applies."""
    rng = np.random.default_rng(0)
    fitting = [option for option in supported if given.make(rng, option.keywords) is not None]
    return [option for option in firsts if option in fitting] or list(
        {option.group: option for option in reversed(fitting)}.values()
    )[::-1]


def seeded(*names: str) -> np.random.Generator:
    """The same numbers for the same names, everywhere."""
    return np.random.default_rng(zlib.crc32("/".join(names).encode()))


def row_of(function: Function, option: Option, dtype: str, outcome: str) -> Row:
    """A row without its findings."""
    return {
        "loss": function.name,
        "option": option.label,
        "dtype": dtype,
        "outcome": outcome,
        "factor": None,
        "smallest": None,
    }


def plain(function: Function, call: Callable[..., Any], option: Option, dtype: str) -> tuple[Row, bool]:
    """The row of one option and dtype, and whether it agrees in float32's precision alone where float64 is given."""
    rng = seeded(function.name, option.label, dtype)
    cases = [rounded(function.draw(rng, option.keywords), dtype) for _ in range(CASES)]
    question = Question(function, call, option.keywords, dtype, TOLERANCES[dtype])
    try:
        first = next((arrays for arrays in cases if question.departures(arrays)), None)
        narrow = False
        if first is not None and dtype == "float64":
            wider = Question(function, call, option.keywords, dtype, TOLERANCES["float32"])
            narrow = not any(wider.departures(arrays) for arrays in cases)
            question = question if narrow else wider
        if first is None or narrow:
            return row_of(function, option, dtype, "agrees"), narrow
        departing_in = merged(question, cases)
        first = next(arrays for arrays in cases if question.departures(arrays))
        pairs = [(question.theirs(arrays), question.defined(arrays)) for arrays in cases]
    except Unsupported as reason:
        return row_of(function, option, dtype, "unsupported") | {"reason": str(reason)}, False
    numbers = [(t, d) for t, d in pairs if isinstance(t, Outputs) and isinstance(d, Outputs)]
    constant = (
        factor(numbers, TOLERANCES["float32" if dtype == "float64" else dtype]) if len(numbers) == CASES else None
    )
    row = row_of(function, option, dtype, "scaled" if constant is not None else "departs")
    row |= {"factor": constant, "departs_in": departing_in}
    return row | {"smallest": reduced(question, first, lambda arrays: True)}, False


def merged(question: Question, cases: list[Arrays]) -> dict[str, str]:
    """How each quantity departs, over all cases."""
    departing_in: dict[str, str] = {}
    for arrays in cases:
        departing_in = {**question.departures(arrays), **departing_in}
    return departing_in


def stress(function: Function, call: Callable[..., Any], option: Option, dtype: str, given: Stress) -> Row:
    """The row of one stress."""
    rng = seeded(function.name, option.group, given.name, dtype)
    tolerance = given.tolerance or TOLERANCES[dtype]
    if given.tolerance is None and dtype == "float64":
        tolerance = TOLERANCES["float32"]  # precision is a promise of its own
    row = row_of(function, option, dtype, "agrees") | {"stress": given.name}
    try:
        for _ in range(CASES):
            drawn = given.make(rng, option.keywords)
            assert drawn is not None
            arrays = rounded(drawn, dtype)
            swap = given.either(arrays, option.keywords) if given.either else None
            question = Question(function, call, option.keywords, dtype, tolerance, given.zero_is_fine, swap)
            if departing_in := question.departures(arrays):
                small = reduced(question, arrays, lambda candidate: given.inside(candidate, option.keywords))
                return row | {"outcome": "departs", "departs_in": departing_in, "smallest": small}
    except Unsupported as reason:
        return row | {"outcome": "unsupported", "reason": str(reason)}
    return row


def reduced(question: Question, arrays: Arrays, inside: Callable[[Arrays], bool]) -> dict[str, Any]:
    """The smallest input that departs as `arrays` do, with both numbers."""
    kind = question.departures(arrays)

    def departs(candidate: Arrays) -> bool:
        candidate = rounded(candidate, question.dtype)
        fits = question.function.inside(candidate) if not isinstance(question.defined(candidate), Refusal) else True
        return fits and inside(candidate) and question.departures(candidate) == kind

    small = rounded(smallest(arrays, question.function.axes, departs), question.dtype)
    return {
        "input": inputs_as_json(small, question.keywords),
        "theirs": plain_numbers(question.theirs(small)),
        "defined": plain_numbers(question.defined(small)),
    }


def promises(function: Function, call: Callable[..., Any], supported: list[Option], *, narrow: bool) -> Iterator[Row]:
    """What paritygate's own losses promise beyond the arithmetic: precision, dtype, tie order, what is refused."""
    option = supported[0]
    yield promise(function, option, "float64", "float64 is computed in float64", not narrow)
    if function.leaf is not None:
        for dtype, expected in (("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")):
            question = Question(function, call, option.keywords, dtype, TOLERANCES[dtype])
            given = question.theirs(rounded(function.draw(seeded(function.name), option.keywords), dtype))
            dtype_is = given.dtype if isinstance(given, Outputs) else str(given)
            row = promise(function, option, dtype, f"the loss is {expected}", dtype_is == expected)
            yield row if row["outcome"] == "agrees" else row | {"departs_in": {"dtype": dtype_is}}
    cut = next((one for one in supported if "top_k" in one.keywords), None)
    if function.tie_order and cut is not None:
        made = next(stress for stress in function.stresses if stress.either is not None)
        drawn = made.make(seeded(function.name, "ties"), cut.keywords)
        assert drawn is not None
        question = Question(function, call, cut.keywords, "float64", TOLERANCES["float32"])
        kept = not question.departures(drawn)
        yield promise(function, cut, "float64", "ties in the top k go to the lowest index", kept)
    for wrong in function.refused:
        keywords = {**option.keywords, **wrong.keywords}
        try:
            given = Question(function, call, keywords, "float64", TOLERANCES["float64"]).theirs(wrong.arrays)
        except Unsupported:
            continue
        row = promise(function, option, "float64", f"refuses {wrong.what}", isinstance(given, Refusal))
        yield (
            row
            if isinstance(given, Refusal)
            else row
            | {
                "smallest": {
                    "input": inputs_as_json(wrong.arrays, keywords),
                    "theirs": plain_numbers(given),
                    "defined": {"refused": "ValueError"},
                }
            }
        )


def promise(function: Function, option: Option, dtype: str, what: str, kept: bool) -> Row:
    """The row of one promise."""
    return row_of(function, option, dtype, "agrees" if kept else "departs") | {"promise": what}
