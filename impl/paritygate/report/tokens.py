"""Transcripts token by token: which ones the page shows, and how strongly each token was pushed."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paritygate.receipts import canonical, write_atomic
from paritygate.report.files import Record, RunFiles, read_object, read_run

VOCABULARY = "vocabulary.json"
EACH_ARM = 2


@dataclass(frozen=True)
class Token:
    """A token of a transcript: its text, whether the agent sampled it, and its colour (CSS) where it was pushed."""

    text: str
    sampled: bool
    colour: str | None
    hint: str


@dataclass(frozen=True)
class Transcript:
    """One episode for a reader: a title, what it scored, the user's opening, and the tokens after the prompt."""

    title: str
    first_of_arm: bool
    scores: str
    opening: str
    rationale: tuple[tuple[str, str], ...]
    tokens: tuple[Token, ...]
    largest: float


def chosen(run: RunFiles) -> list[tuple[str, int, Record]]:
    """(arm, step, trajectory) of what is shown: an arm's last training step, highest and lowest composite."""
    picked: list[tuple[str, int, Record]] = []
    for arm in run.arms:
        steps = run.training(arm)
        if not steps:
            continue
        step = steps[-1]["step"]
        rows = [row for row in run.trajectories("train", arm, step) if _composite(row) is not None]
        ordered = sorted(rows, key=lambda row: -(_composite(row) or 0.0))
        ends = [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered
        picked += [(arm, step, row) for row in ends[:EACH_ARM]]
    return picked


def _composite(row: Record) -> float | None:
    """None for an episode that left its group: no parsed judge, or a fault of the user simulator."""
    return (row.get("judgement") or {}).get("composite")


def write_vocabulary(run_dir: Path | str, decode: Callable[[list[int]], str]) -> str:
    """Write the texts of the tokens that the page shows, so that the files alone make it; return the file's name."""
    run = read_run(run_dir)
    ids = sorted({token for _, _, row in chosen(run) for token in row["tokens"]})
    write_atomic(run.directory / VOCABULARY, canonical({str(token): decode([token]) for token in ids}))
    return VOCABULARY


def transcripts(run: RunFiles) -> list[Transcript]:
    """The chosen transcripts with their heat maps; token ids stand for texts where there is no vocabulary."""
    texts = read_object(run.directory / VOCABULARY) or {}
    shown = [_transcript(arm, step, row, texts) for arm, step, row in chosen(run)]
    arms = [arm for arm, _, _ in chosen(run)]
    return [replace(one, first_of_arm=arms.index(arms[i]) == i) for i, one in enumerate(shown)]


def _transcript(arm: str, step: int, row: Record, texts: Record) -> Transcript:
    advantages: Sequence[float] = row.get("advantages") or [0.0] * len(row["tokens"])
    values = [_finite(value) for value in advantages]
    largest = max((abs(value) for value in values), default=0.0)
    teacher = (row.get("teacher") or {}).get("logprobs") or [None] * len(row["tokens"])
    tokens = (
        _token(
            texts.get(str(row["tokens"][t]), f"[{row['tokens'][t]}]"),
            bool(row["mask"][t]),
            values[t],
            largest,
            {"sampled at": row["sampler_logprobs"][t], "teacher": teacher[t]},
        )
        for t in range(row.get("prompt_length", 0), len(row["tokens"]))
    )
    judgement, opening = row["judgement"], next(iter(row.get("messages") or ()), Record())
    turns = f"{row['turns']} turn" + ("s" if row["turns"] != 1 else "")
    ended = f"{turns}, ended by {row['ended_by']}"
    scores = f"composite {judgement['composite']:.3f}; task reward {row['reward']:g}; {ended}"
    rationale = judgement.get("rationale") or {}
    return Transcript(
        title=f"{arm}, step {step}, {row['split']} task {row['task_index']}, rollout {row['rollout']}",
        first_of_arm=False,
        scores=scores,
        opening=str(opening["content"]) if opening.get("role") == "user" else "",
        rationale=tuple((str(key), str(value)) for key, value in rationale.items()),
        tokens=tuple(_merged(tokens)),
        largest=largest,
    )


def _merged(tokens: Iterable[Token]) -> Iterator[Token]:
    """Neighbours that the agent did not sample as one, which makes the page of a long episode small."""
    for sampled, group in itertools.groupby(tokens, key=lambda token: token.sampled):
        if sampled:
            yield from group
        else:
            yield Token("".join(token.text for token in group), False, None, "")


def _finite(value: object) -> float:
    number = float(value) if isinstance(value, int | float | str) else 0.0
    return number if abs(number) < float("inf") else 0.0


def _token(text: str, sampled: bool, advantage: float, largest: float, logprobs: Record) -> Token:
    if not sampled:
        return Token(text, False, None, "")
    described = [f"{name} {float(value):.3f} nats" for name, value in logprobs.items() if value is not None]
    hint = "; ".join([f"advantage {advantage:+.3f}", *described])
    if not largest or not advantage:
        return Token(text, True, None, hint)
    strength = abs(advantage) / largest
    red, green, blue = (11, 110, 153) if advantage > 0 else (194, 86, 12)
    return Token(text, True, f"rgba({red},{green},{blue},{0.12 + 0.68 * strength:.2f})", hint)
