"""One finished episode: the exact tokens that the model saw and sampled, and what it all meant."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from paritygate.agent.conversation import Message

Ending = Literal[
    "user_stop",  # the user simulator ended the conversation, or had said its last when the agent spoke: graded
    "transfer",  # the agent handed over to a human: graded
    "turn_limit",
    "token_limit",  # a turn did not end within its tokens
    "sequence_limit",  # no room for another turn
    "user_fault",  # the user simulator failed: says nothing of the agent, never trained on
    "unbridgeable",  # the renderer cannot extend these tokens without rewriting sampled ones
]
GRADED: frozenset[str] = frozenset({"user_stop", "transfer"})


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """An episode of L tokens, ending with the last sampled one.

    tokens, mask (1 on sampled assistant tokens, their end token included, else 0) and sampler_logprobs (nats, None
    where mask is 0) are of length L. prompt_length: tokens before the first turn. spans: (start, end) of each sampled
    turn. messages: the conversation after the system message. reward: 0.0 or 1.0; an episode that a limit cut is 0.0,
    ungraded. user_retries: simulator replies asked for again, user_cut_replies those of them that their limit cut.
    dropped_tokens: sampled past a stop token, and left out.
    """

    split: str
    task_index: int
    rollout: int
    seed: int
    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    sampler_logprobs: tuple[float | None, ...]
    prompt_length: int
    spans: tuple[tuple[int, int], ...]
    messages: tuple[Message, ...]
    ended_by: Ending
    turns: int
    reward: float
    grade: Mapping[str, Any]
    user_retries: int = 0
    dropped_tokens: int = 0
    user_cut_replies: int = 0

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.mask) == len(self.sampler_logprobs):
            raise ValueError(
                f"Task {self.task_index}, rollout {self.rollout}: {len(self.tokens)} tokens, {len(self.mask)} mask "
                f"entries and {len(self.sampler_logprobs)} logprobs must be as many."
            )

    @property
    def trains(self) -> bool:
        """Whether this episode may be trained on: the user simulator held, and the agent said something."""
        return self.fault is None

    @property
    def fault(self) -> str | None:
        """Why it may not be trained on, as a clause; None where it may."""
        if self.ended_by == "user_fault":
            return "the user simulator failed"
        return None if any(self.mask) else "the agent said nothing"

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values that `from_json` reads back equal."""
        fields = dataclasses.asdict(self) | {"grade": dict(self.grade)}
        return json.loads(json.dumps(fields))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Trajectory":
        """The trajectory that `to_json` wrote; other keys are ignored."""
        names = [field.name for field in dataclasses.fields(cls)]
        values = {name: data[name] for name in names if name in data}
        for name in ("tokens", "mask", "sampler_logprobs", "messages"):
            values[name] = tuple(values[name])
        values["spans"] = tuple((start, end) for start, end in values["spans"])
        return cls(**values)
