"""The part of an experiment that the original spec says only in prose, as data."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DIMENSIONS = ("invalid_tool_use", "ungrounded_claims", "upfront_clarification")
"""What the judge's rubric scores, in the order in which it is shown: each in [0, 1], 1 the best; the composite is
their mean.
"""


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """How many episodes a step has and what bounds one (counts, tokens; temperature is a divisor of logits)."""

    tasks_per_step: int
    rollouts_per_task: int
    max_turns: int
    max_tokens_per_turn: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Advantage:
    """How an SDPO advantage is built: `clip` in nats, the least composite of a sibling, whose weights teach.

    `student` says which logprobs are taken from the teacher's: those returned by sampling, or scored again as it is.
    """

    clip: float
    sibling_threshold: float
    sibling_rule: Literal["best", "first"]
    success_wording: bool
    teacher: Literal["current", "frozen_initial"]
    student: Literal["sampled", "recomputed"]


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """Which tasks of a split, in which order: the first `first` after an optional shuffle, or `tasks` as listed."""

    split: Literal["train", "dev", "test"]
    shuffle_seed: int | None
    first: int | None
    tasks: tuple[int, ...] | None
    why: str | None

    @property
    def count(self) -> int:
        """How many tasks are selected."""
        return len(self.tasks) if self.tasks is not None else self.first or 0

    def indices(self, split_size: int) -> tuple[int, ...]:
        """The selected task indices out of `range(split_size)`; ValueError when the split is too small."""
        if self.tasks is not None:
            chosen = self.tasks
        else:
            order = list(range(split_size))
            if self.shuffle_seed is not None:
                random.Random(self.shuffle_seed).shuffle(order)
            chosen = tuple(order[: self.first])
        if len(chosen) != self.count or any(not 0 <= index < split_size for index in chosen):
            raise ValueError(f"the {self.split} split has {split_size} tasks, too few for this selection")
        return chosen


@dataclass(frozen=True, slots=True)
class User:
    """The user simulator: a served model (system prompt with `{instruction}`) or a script computed from the task."""

    kind: Literal["model", "scripted"]
    model: str | None
    prompt: str
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Judge:
    """The rubric judge: a served model or the rules; `tries` is how often it is asked in all.

    max_tokens and, of every try after the first, retry_max_tokens bound an answer, thoughts included. reasoning_effort:
    None is what the model does by itself (gpt-oss: medium; others: no thinking); another makes others think.
    """

    kind: Literal["model", "rule"]
    model: str | None
    prompt: str
    temperature: float
    max_tokens: int
    retry_max_tokens: int
    reasoning_effort: Literal["low", "medium", "high"] | None
    tries: int


@dataclass(frozen=True, slots=True)
class Context:
    """`full`: the policy and the tools' JSON schemas; `compact`: tools as signatures, the policy abridged by rule."""

    kind: Literal["full", "compact"]
    why: str | None


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Supervised steps on gold episodes before either arm, the same weights for both."""

    tasks: TaskSelection
    learning_rate: float
    batch_size: int
    epochs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Pilot:
    """The activation pilot: steps an arm, the fallbacks in their fixed order, and the cap on trying them."""

    steps: int
    fallbacks: tuple[Literal["frozen_initial_teacher", "max_turns"], ...]
    fallback_max_turns: int
    max_fallback_steps: int
    max_fallback_minutes: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which arm the decision calls treatment and which baseline."""

    treatment: str
    baseline: str


@dataclass(frozen=True, slots=True)
class Service:
    """Which model the embedded server loads where no service is named, and the dtype of its frozen weights.

    undecided: obligations of spec/service.json that need not be shown by the service, each with the reason.
    """

    embedded_model: str | None
    embedded_dtype: Literal["float32", "bfloat16"]
    undecided: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Noise:
    """How far two clients may differ: `multiple` of the noise floor, which itself may be `at_most` (nats a token)."""

    multiple: float
    at_most: float


@dataclass(frozen=True, slots=True)
class Protocol:
    """Everything that the original spec says only in prose; every field is written out in the frozen spec."""

    rollout: RolloutOptions
    advantage: Advantage
    train: TaskSelection
    evaluation: TaskSelection
    user: User
    judge: Judge
    context: Context
    renderer: str
    warm_start: WarmStart | None
    pilot: Pilot
    comparison: Comparison
    service: Service
    noise: Noise
