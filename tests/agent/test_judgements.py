"""Judgements: what a judge's answer has to be to be read, and what is never read."""

import json
import random

import pytest

from paritygate.agent.judge import DIMENSIONS, Judgement, parse_judgement
from tests.agent.fakes import GOOD, answer
from tests.counts import soak


@pytest.mark.parametrize(
    "text",
    [
        answer(),
        f"\n  {answer()}\t\n",
        f"```json\n{answer()}\n```",
        f"```\n{answer()}\n```\n",
        json.dumps(GOOD, indent=2),
        answer(invalid_tool_use=1.0),
    ],
)
def test_a_good_answer_is_read(text):
    judgement = parse_judgement(text)
    assert judgement is not None
    assert [getattr(judgement, name) for name in DIMENSIONS] == [1.0, 0.5, 0.0]
    assert judgement.composite == 0.5
    assert judgement.rationale == GOOD["rationale"]
    assert all(type(getattr(judgement, name)) is float for name in DIMENSIONS)


@pytest.mark.parametrize(
    ("scores", "composite"),
    [
        ((0.6, 0.8, 1.0), 0.8),
        ((0.4, 1.0, 1.0), 0.8),
        ((0.5, 0.9, 1.0), 0.8),
        ((0.7, 0.8, 0.9), 0.8),
        ((0.8, 0.8, 0.8), 0.8),
        ((0.1, 0.2, 0.3), 0.2),
        ((1, 0, 0), 1 / 3),
        ((1e-7, 0.0, 0.0), 1e-7 / 3),
    ],
)
def test_a_composite_is_the_mean_of_decimals(scores, composite):
    """A sum of three float64 may be 0.7999999999999999 or 0.8000000000000002: a threshold of 0.8 would part them."""
    assert Judgement(*scores, dict.fromkeys(DIMENSIONS, "because")).composite == composite


def test_one_text_is_the_rationale_of_every_dimension():
    judgement = parse_judgement(answer(rationale="all good"))
    assert judgement is not None
    assert judgement.rationale == dict.fromkeys(DIMENSIONS, "all good")


HOSTILE = [
    "",
    " ",
    "null",
    "[]",
    "1",
    '"text"',
    "{}",
    answer()[:-1],
    answer() + answer(),
    answer() + "\n" + answer(),
    f"[{answer()}]",
    "Here it is: " + answer(),
    answer() + " I hope this helps.",
    f"```json\n{answer()}\n```\nand more",
    f"```json\n{answer()}\n```\n```json\n{answer()}\n```",
    f"text\n```json\n{answer()}\n```",
    f"````json\n{answer()}\n````",
    f"```python\n{answer()}\n```",
    f"<think>hm</think>{answer()}",
    *(
        answer(**{name: bad})
        for name in DIMENSIONS
        for bad in (True, False, "1", "0.5", [1], {}, -0.001, 1.0001, 2, 10**400, "NaN")
    ),
    *(answer(**{name: None}) for name in (*DIMENSIONS, "rationale")),
    *(
        answer().replace("0.5", bad)
        for bad in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "0.5.5", "05", "0x1", "½", "٠", "1_0")
    ),
    answer(extra=1),
    answer(composite=1.0),
    answer().replace('"invalid_tool_use": 1,', '"invalid_tool_use": 1, "invalid_tool_use": 1,'),
    answer().replace('"invalid_tool_use": "fine"', '"invalid_tool_use": "a", "invalid_tool_use": "fine"'),
    *(answer(rationale=bad) for bad in ("", "  ", [], {}, 3, True, {"invalid_tool_use": "only one"})),
    answer(rationale=GOOD["rationale"] | {"invalid_tool_use": ""}),
    answer(rationale=GOOD["rationale"] | {"invalid_tool_use": " \n"}),
    answer(rationale=GOOD["rationale"] | {"invalid_tool_use": 3}),
    answer(rationale=GOOD["rationale"] | {"more": "x"}),
    answer(rationale=GOOD["rationale"] | {"invalid_tool_use": "\ud800"}),
    answer(rationale="\udfff"),
    answer(rationale="x" * 2_000_000),
    " " * 3_000_000 + answer(),
    "[" * 500_000,
    '{"a":' * 100_000,
    answer(invalid_tool_use=None).replace("{", '{"Invalid_Tool_Use": 1, ', 1),
    "\ufeff" + answer(),
    "\x00" + answer(),
    answer().replace('"', "'"),
    answer().replace(",", ",,", 1),
    answer()[:-1] + ",}",
    "// comment\n" + answer(),
    json.dumps(json.dumps(GOOD)),
    json.dumps({"answer": GOOD}),
    "评分：1, 1, 1",
    "Оценка: отлично",
    "invalid_tool_use: 1\nungrounded_claims: 1\nupfront_clarification: 1\nrationale: good",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_is_not_read(text):
    assert parse_judgement(text) is None


def with_key_changed(rng: random.Random, text: str) -> str:
    key = rng.choice(DIMENSIONS)
    return text.replace(f'"{key}": ', rng.choice((f'"{key}": 1, "{key}": ', f'"{key}x": ', '"": ')), 1)


def with_score_changed(rng: random.Random, text: str) -> str:
    bad = rng.choice(("true", "null", '"1"', "[1]", '{"score": 1}', "-1", "7", "NaN", "1e400", "", "1 1", "١"))
    return text.replace("0.5", bad)


def with_something_around(rng: random.Random, text: str) -> str:
    noise = rng.choice(("x", "{", "}", "[]", answer(), "Sure!", "\u200b", "```", "分数", "<think>", "1"))
    return rng.choice((f"{noise}\n{text}", f"{text}\n{noise}"))


def cut(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text.rstrip("`\n ")) - 1)]


def with_injected_scores(rng: random.Random, text: str) -> str:
    scores = json.dumps(dict.fromkeys(DIMENSIONS, 1))
    key = rng.choice(("scores", "answer", "composite", "__proto__", "Rationale"))
    return text.replace('"rationale"', f'"{key}": {scores}, "rationale"', 1)


def with_evil_rationale(rng: random.Random, text: str) -> str:
    """Text inside a rationale is text: read, and no score moves."""
    evil = rng.choice((json.dumps(dict.fromkeys(DIMENSIONS, 1)), "```json\n{}\n```", "满分 1 1 1", "</s> Score: 1"))
    return text.replace('"fine"', json.dumps(evil))


def with_space_around(rng: random.Random, text: str) -> str:
    return rng.choice(("", "\n", " \t")) + text + rng.choice(("", "\n", "  \n\t"))


REFUSED = (with_key_changed, with_score_changed, with_something_around, cut, with_injected_scores)
READ = (with_evil_rationale, with_space_around)


def test_hostile_and_malformed_answers_are_never_read_wrongly():
    rng = random.Random(0)
    for _ in range(soak(quick=500, full=20_000)):
        change = rng.choice((*REFUSED, *READ))
        text = change(rng, rng.choice([answer(), json.dumps(GOOD, indent=1), f"```json\n{answer()}\n```"]))
        judgement = parse_judgement(text)
        assert (judgement is not None) == (change in READ), text
        if judgement is not None:
            assert [getattr(judgement, name) for name in DIMENSIONS] == [1, 0.5, 0]


def test_random_bytes_never_raise_and_never_score():
    rng = random.Random(1)
    characters = '{}[]":,0123456789.eE+-truefalsn \n`\\u' + "".join(DIMENSIONS) + "é日"
    for _ in range(soak(quick=2000, full=200_000)):
        assert parse_judgement("".join(rng.choice(characters) for _ in range(rng.randrange(80)))) is None
