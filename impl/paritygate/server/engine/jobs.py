"""What the engine works on: sample requests, the rows they become, packed passes, and other tasks."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from paritygate.server.engine.sampling import SamplingParams, StopCheck
from paritygate.server.engine.scoring import PromptScores, Scoring
from paritygate.server.model.attention import Span
from paritygate.server.model.cache import Sequence
from paritygate.server.model.lora import Snapshot, Weights


@dataclass
class Sampled:
    """One finished sample: ids, their logprobs in nats at temperature 1, and whether a stop ended it."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[tuple[list[int], list[float]]] = field(default_factory=list[tuple[list[int], list[float]]])
    stopped: bool = False


@dataclass
class SampleResult:
    """Everything that one sample request returns."""

    samples: list[Sampled]
    scores: PromptScores | None
    cached_tokens: int


@dataclass
class SampleJob:
    """A sample request inside the engine."""

    prompt: list[int]
    params: SamplingParams
    num_samples: int
    snapshot: Snapshot
    scoring: Scoring | None
    top_k: int
    future: "Future[SampleResult]"
    cancelled: bool = False
    pages: list[bytes] = field(default_factory=list[bytes])
    sequence: Sequence | None = None
    cached_tokens: int = 0
    scores: PromptScores | None = None
    started: int = 0
    finished: dict[int, Sampled] = field(default_factory=dict[int, Sampled])

    def cancel(self) -> None:
        """Stop working on it as soon as the pass in flight is over; may be called from any thread."""
        self.cancelled = True

    @property
    def prefilled(self) -> bool:
        return self.sequence is not None and self.sequence.done >= len(self.prompt)

    def reads_from(self) -> int:
        """The first token of the prompt whose hidden state is read: by the first draw, or by what is scored."""
        last = len(self.prompt) - 1
        return last if self.scoring is None else min(last, self.scoring.rows(len(self.prompt)).start)

    def capacity(self) -> int:
        return len(self.prompt) + self.params.max_tokens


@dataclass
class Row:
    """One sample being decoded: its sequence holds the prompt and everything drawn but the last token."""

    job: SampleJob
    index: int
    sequence: Sequence
    stop: StopCheck
    sampled: Sampled = field(default_factory=Sampled)


@dataclass
class JobBatch:
    """One packed pass: spans of rows, who owns each, and which rows go through which weights."""

    spans: list[Span] = field(default_factory=list[Span])
    owners: list[Row | SampleJob] = field(default_factory=list[Row | SampleJob])
    ranges: list[tuple[int, int, Weights]] = field(default_factory=list[tuple[int, int, Weights]])


@dataclass
class Task:
    """Work on the engine's thread that is not sampling; it yields between bounded pieces and returns a result."""

    steps: Iterator[None]
    result: Callable[[], Any]
    future: "Future[Any]"


def snapshot_of(owner: Row | SampleJob) -> Snapshot:
    """The weights that a row or a job is computed with."""
    return owner.job.snapshot if isinstance(owner, Row) else owner.snapshot
