"""One episode on the retail database: tool calls until the end, then one grade, by upstream's rules and unmutated."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paritygate.retail.errors import EpisodeOver
from paritygate.retail.source import Source, Task
from paritygate.retail.tools import TERMINATING, call


@dataclass(frozen=True, slots=True)
class Grade:
    """The native reward (0.0 or 1.0) and why; `graded` is false for an episode that was cut and so scores 0."""

    reward: float
    database_ok: bool
    outputs_ok: bool
    outputs: dict[str, bool]
    substring_only: tuple[str, ...]  # expected outputs found only inside a longer word or number
    graded: bool = True


class Episode(ABC):
    """Task `index` of `split` on a fresh database; DataError for a split or an index that does not exist."""

    def __init__(self, source: Source, split: str, index: int) -> None:
        self.source = source
        self.split = split
        self.index = index
        self.task: Task = source.task(split, index)
        self._ended_by: str | None = None
        self._graded: tuple[tuple[str, ...], Grade] | None = None

    @property
    def done(self) -> bool:
        """Whether a transfer, a grade or a cut has ended the episode."""
        return self._ended_by is not None

    def call(self, name: str, arguments: Any) -> str:
        """Make one tool call and give the observation; EpisodeOver after the end."""
        if self._ended_by is not None:
            raise EpisodeOver(f"{self._place()} was ended by {self._ended_by}: the call of {name} came after that")
        observation = self._invoke(name, arguments)
        if name in TERMINATING:
            self._ended_by = "a transfer"
        return observation

    def grade(self, agent_messages: Sequence[str]) -> Grade:
        """End the episode and grade it, given everything that the agent said to the user.

        Reward 1.0 where the database equals the goal's and every expected output is in some message, in lower case and
        with the message's commas removed (calculate_reward in upstream tau_bench/envs/base.py at 59a200c6). Asked again
        with the same messages it gives the same grade; with others, or after a cut, it raises EpisodeOver.
        """
        messages = tuple(agent_messages)
        if self._graded is None:
            if self._ended_by == "a limit":
                raise EpisodeOver(f"{self._place()} was ended by a limit: it scores 0 and is not graded")
            self._ended_by = self._ended_by or "its grade"
            self._graded = (messages, self._grade(messages))
        elif self._graded[0] != messages:
            raise EpisodeOver(f"{self._place()} was graded before, on other messages: there is no second grade")
        return self._graded[1]

    def cut(self) -> Grade:
        """End the episode at a limit: reward 0, not graded; EpisodeOver where it was graded before."""
        if self._graded is not None:
            raise EpisodeOver(f"{self._place()} was graded before: it cannot be cut any more")
        self._ended_by = "a limit"
        outputs = dict.fromkeys(self.task.outputs, False)
        return Grade(0.0, database_ok=False, outputs_ok=False, outputs=outputs, substring_only=(), graded=False)

    @abstractmethod
    def _invoke(self, name: str, arguments: Any) -> str:
        """The observation of one tool call."""

    @abstractmethod
    def _grade(self, messages: tuple[str, ...]) -> Grade:
        """The grade; called once at the most."""

    def _place(self) -> str:
        return f"the episode of {self.split} task {self.index}"


class RetailEpisode(Episode):
    """Our environment: a copy-on-write database, graded by comparing the touched records with the goal's."""

    def __init__(self, source: Source, split: str, index: int) -> None:
        super().__init__(source, split, index)
        self.db = source.database()

    def _invoke(self, name: str, arguments: Any) -> str:
        return call(self.db, name, arguments)

    def _grade(self, messages: tuple[str, ...]) -> Grade:
        goal = self.source.goal(self.split, self.index)
        return graded(self.task, messages, database_ok=self.db.changes() == goal.changes)


def graded(task: Task, messages: Sequence[str], *, database_ok: bool) -> Grade:
    """The grade of a task from its two criteria."""
    texts = [message.lower().replace(",", "") for message in messages]
    outputs = {output: any(output.lower() in text for text in texts) for output in task.outputs}
    alone = {output for output in task.outputs if any(_stands_alone(output.lower(), text) for text in texts)}
    outputs_ok = all(outputs.values())
    return Grade(
        reward=1.0 if database_ok and outputs_ok else 0.0,
        database_ok=database_ok,
        outputs_ok=outputs_ok,
        outputs=outputs,
        substring_only=tuple(output for output, present in outputs.items() if present and output not in alone),
    )


def _stands_alone(output: str, text: str) -> bool:
    """Whether `output` occurs with no letter or digit, and no other part of a number, directly around it."""
    return re.search(rf"(?<!\w)(?<!\d\.){re.escape(output)}(?!\w)(?!\.\d)", text) is not None
