"""A judgement and the strict reading of one from a model's answer."""

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from paritygate.agent.trajectory import Trajectory
from paritygate.spec.protocol import DIMENSIONS

# Far above any honest answer; reading a longer one would only cost time.
MAX_CHARACTERS = 100_000

_FENCED = re.compile(r"\A```(?:json|JSON)?[ \t]*\r?\n(.*)\n[ \t]*```\Z", re.DOTALL)


@dataclass(frozen=True)
class Judgement:
    """Three scores in [0, 1], 1 the best in each, and a non-empty rationale for each dimension."""

    invalid_tool_use: float
    ungrounded_claims: float
    upfront_clarification: float
    rationale: dict[str, str]

    @property
    def composite(self) -> float:
        """The mean of the three scores as the decimals they were written as: 0.8 of 0.6, 0.8 and 1.0."""
        return float(sum(Fraction(repr(float(getattr(self, name)))) for name in DIMENSIONS) / len(DIMENSIONS))


@dataclass(frozen=True)
class Answer:
    """One answer of a judge, kept whole: its text, thoughts included, how it ended, and what was wrong with it.

    stop_reason: "stop", "length" (cut by max_tokens), or "error" where the service refused. tokens: how many were
    sampled. error: why it is no judgement, "" where it is one.
    """

    text: str
    stop_reason: str
    tokens: int
    error: str


@dataclass(frozen=True)
class Judged:
    """What came of judging one trajectory: the judgement (None: never parsed), the tries, whether the first parsed.

    answers: each answer of a served judge, in order; empty for rules.
    """

    judgement: Judgement | None
    tries: int
    first_try_parsed: bool
    answers: tuple[Answer, ...] = ()


class Judge(Protocol):
    """Anything that judges a trajectory of a task."""

    async def judge(self, trajectory: Trajectory, task: Any) -> Judged:
        """Judge one trajectory; never an exception for what a model wrote."""
        ...


def parse_judgement(text: str) -> Judgement | None:
    """The judgement that `text` is, or None: one JSON object, alone or in one code fence, nothing else around it.

    Refused: NaN, infinities, booleans or text for scores, scores out of [0, 1], missing, extra or repeated keys, empty
    rationales, several objects, prose around the object, text that is no valid Unicode. A single text as rationale
    stands for all three dimensions.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    stripped = text.strip(" \t\r\n")
    fenced = _FENCED.match(stripped)
    try:
        answer: Any = json.loads(
            fenced.group(1) if fenced else stripped, object_pairs_hook=_unique, parse_constant=_refuse
        )
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or set(answer) != {*DIMENSIONS, "rationale"}:
        return None
    scores = [_score(answer[name]) for name in DIMENSIONS]
    rationale = _rationale(answer["rationale"])
    if rationale is None or None in scores:
        return None
    tools, claims, clarification = (float(score) for score in scores if score is not None)
    return Judgement(tools, claims, clarification, rationale)


def judgements_in(text: str) -> list[Judgement]:
    """Every judgement that stands somewhere in `text`, an answer kept whole with thoughts and markers around it."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
    judgements: list[Judgement] = []
    for match in re.finditer(r"\{", text[:MAX_CHARACTERS]):
        try:
            _, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if judgement := parse_judgement(text[match.start() : end]):
            judgements.append(judgement)
    return judgements


def _score(value: Any) -> float | None:
    # bool is an int to Python; huge integers do not fit a float, and compare exactly without becoming one.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1 else None


def _rationale(value: Any) -> dict[str, str] | None:
    if isinstance(value, str):
        value = dict.fromkeys(DIMENSIONS, value)
    if not isinstance(value, dict) or set(value) != set(DIMENSIONS):
        return None
    if not all(isinstance(text, str) and text.strip() and _is_unicode(text) for text in value.values()):
        return None
    return {name: value[name].strip() for name in DIMENSIONS}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key occurs twice")
    return members


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
