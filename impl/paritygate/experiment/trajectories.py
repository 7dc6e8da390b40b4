"""trajectories/<name>.jsonl: what was sampled, judged and advised, one episode a line, by (task, rollout)."""

from collections.abc import Sequence
from pathlib import Path

from paritygate.experiment.journal import finite
from paritygate.experiment.rollouts import Rollout
from paritygate.receipts import canonical, write_atomic


def write_trajectories(
    directory: Path, name: str, rollouts: Sequence[Rollout], advantages: Sequence[Sequence[float]] | None = None
) -> str:
    """Write the file whole (a step taken again replaces it) and return its path relative to the run directory."""
    path = directory / "trajectories" / f"{name}.jsonl"
    rows = advantages if advantages is not None else [None] * len(rollouts)
    lines = [canonical(finite({**r.to_json(), "advantages": row})) for r, row in zip(rollouts, rows, strict=True)]
    write_atomic(path, b"".join(line + b"\n" for line in lines))
    return str(path.relative_to(directory))
