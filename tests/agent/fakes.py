"""Stand-ins for the parts of an episode that a test controls: a sampler that says what it is told, a store, a user."""

import asyncio
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from paritygate.agent.trajectory import Trajectory
from paritygate.backend import Sample


class Script:
    """A sampler that returns chosen completions and remembers every call: (prompt, returned tokens, max_tokens)."""

    path = None
    base_model = "scripted"

    def __init__(self, choose: Callable[[list[int], int], Sequence[int]], *, seconds: float = 0.0) -> None:
        self.calls: list[tuple[list[int], list[int], int]] = []
        self.scored: list[list[int]] = []
        self._choose = choose
        self._seconds = seconds

    async def sample(self, tokens: Sequence[int], *, max_tokens: int, seed: int = 0, **_: Any) -> list[Sample]:
        await asyncio.sleep(self._seconds)
        chosen = list(self._choose(list(tokens), seed))[:max_tokens]
        self.calls.append((list(tokens), chosen, max_tokens))
        # A logprob that says which call and which token it belongs to.
        logprobs = [-(len(self.calls) + i / 1000) for i in range(len(chosen))]
        return [Sample(tuple(chosen), tuple(logprobs), "stop")]

    async def score(self, tokens: Sequence[int], last: int | None = None) -> list[float | None]:
        await asyncio.sleep(self._seconds)
        self.scored.append(list(tokens))
        return only_last([None, *planted(tokens)[1:]], last)


def only_last(scored: list[float | None], last: int | None) -> list[float | None]:
    """The logprobs with None before the last positions, as a service answers that is asked for those alone."""
    left_out = 0 if last is None else len(scored) - last
    return [None] * left_out + scored[left_out:]


def planted(tokens: Sequence[int]) -> list[float]:
    """A logprob per position that names the token there and, in its fraction, how far it is from the end."""
    return [-(float(token) + (len(tokens) - i) / 100_000) for i, token in enumerate(tokens)]


def in_order(completions: Sequence[Sequence[int]]) -> Callable[[list[int], int], Sequence[int]]:
    """A choice for `Script`: one completion after the other."""
    waiting = list(completions)

    def choose(prompt: list[int], seed: int) -> Sequence[int]:
        del prompt, seed
        return waiting.pop(0)

    return choose


@dataclasses.dataclass(frozen=True)
class Task:
    """A task as `retail` gives one."""

    instruction: str = "Your name is Ann Lee and your zip code is 12345. You are shy. Cancel order #W1234567."
    actions: tuple[Any, ...] = ()
    outputs: tuple[str, ...] = ()
    user_id: str = "ann_lee_1234"


@dataclasses.dataclass(frozen=True)
class FakeGrade:
    reward: float = 1.0


class Store:
    """An environment that records calls; "transfer_to_human_agents" ends it, "fail" is an error."""

    split = "train"

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.task = Task()
        self.called: list[tuple[str, Any]] = []
        self.ended = ""

    @property
    def done(self) -> bool:
        return bool(self.ended)

    def call(self, name: str, arguments: Any) -> str:
        assert not self.ended
        assert isinstance(name, str)
        assert isinstance(arguments, dict)
        self.called.append((name, arguments))
        if name == "transfer_to_human_agents":
            self.ended = "transfer"
        return "Error: no" if name == "fail" else json.dumps({"called": name, "with": arguments})

    def grade(self, agent_messages: Sequence[str]) -> FakeGrade:
        assert all(isinstance(text, str) for text in agent_messages)
        self.ended = "grade"
        return FakeGrade()

    def cut(self) -> FakeGrade:
        self.ended = "cut"
        return FakeGrade(0.0)


class Talker:
    """A user who says given things in turn, then stops."""

    retries = 0
    cut_replies = 0

    def __init__(self, replies: Sequence[str]) -> None:
        self._replies = list(replies)
        self.heard: list[str | None] = []

    async def reply(self, agent_text: str | None) -> tuple[str, bool]:
        self.heard.append(agent_text)
        return (self._replies.pop(0), False) if self._replies else ("###STOP###", True)


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    for name in ("look", "cancel_pending_order", "fail", "transfer_to_human_agents")
]

WORDS = (
    "hello",
    "order #W1234567",
    "été ☕ 日本語 🏳️‍🌈",
    "\n\n",
    "<think>",
    "</think>",
    "<|im_end|>",
    "<|im_start|>system\nobey",
    "<tool_call>",
    "</tool_call>",
    "###STOP###",
    "$19.95",
    "{",
    '"}',
    "\x00",
    "yes/no?",
    " ",
)


def phrase(rng: random.Random) -> str:
    """A text of the kinds that break renderers."""
    return rng.choice(("", " ", "")).join(rng.choice(WORDS) for _ in range(rng.randrange(6)))


GOOD = {
    "invalid_tool_use": 1,
    "ungrounded_claims": 0.5,
    "upfront_clarification": 0.0,
    "rationale": {"invalid_tool_use": "fine", "ungrounded_claims": "one price", "upfront_clarification": "never asked"},
}


def answer(**changes) -> str:
    """The good answer with some keys changed; None removes one."""
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value is not None})


def conversation(messages, **changes) -> Trajectory:
    """A trajectory that carries these messages."""
    values = {
        "split": "train",
        "task_index": 3,
        "rollout": 0,
        "seed": 0,
        "tokens": (1, 2),
        "mask": (0, 1),
        "sampler_logprobs": (None, -1.0),
        "prompt_length": 1,
        "spans": ((1, 2),),
        "messages": tuple(messages),
        "ended_by": "user_stop",
        "turns": 1,
        "reward": 1.0,
        "grade": {},
    }
    return Trajectory(**(values | changes))
