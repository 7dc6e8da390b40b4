"""trajectories/<name>.jsonl: what was sampled, judged and advised, one episode a line, by (task, rollout)."""

import json
from collections.abc import Sequence
from pathlib import Path

from paritygate.agent.rollouts import Rollout
from paritygate.experiment.run.journal import Record, finite
from paritygate.receipts import write_atomic


def write_trajectories(
    directory: Path, name: str, rollouts: Sequence[Rollout], advantages: Sequence[Sequence[float]] | None = None
) -> str:
    """Write the file whole (a step taken again replaces it) and return its path relative to the run directory."""
    path = directory / "trajectories" / f"{name}.jsonl"
    rows = advantages if advantages is not None else [None] * len(rollouts)
    lines = [_line({**r.to_json(), "advantages": row}) for r, row in zip(rollouts, rows, strict=True)]
    write_atomic(path, b"".join(lines))
    return str(path.relative_to(directory))


def _line(record: Record) -> bytes:
    """One line of JSON with sorted keys: thousands of tokens, so the fast encoder; infinities as text."""
    try:
        text = json.dumps(record, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(record), sort_keys=True, allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"
