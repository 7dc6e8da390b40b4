"""A run directory as data: whatever of it is there, since a stopped run has a report too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paritygate.errors import BadInputError
from paritygate.spec.strict import parse_json

Record = dict[str, Any]


@dataclass(frozen=True)
class PhaseReceipt:
    """What one phase decided and why (`outcome`: done or stopped)."""

    name: str
    outcome: str
    decided: str
    because: str
    facts: Record
    seconds: float | None


@dataclass(frozen=True)
class RunFiles:
    """The files of a run that the page is made of; empty and None where a run did not get there."""

    directory: Path
    spec: Record
    phases: tuple[PhaseReceipt, ...]
    metrics: tuple[Record, ...]
    items: tuple[Record, ...]
    deviations: tuple[Record, ...]
    verdict: Record | None
    cost: Record | None
    parity: Record | None
    parity_name: str | None

    def facts(self, phase: str) -> Record:
        """The facts of a phase; {} where it left none."""
        return next((receipt.facts for receipt in self.phases if receipt.name == phase), {})

    @property
    def stopped(self) -> PhaseReceipt | None:
        """The phase that a gate stopped the run at."""
        return next((receipt for receipt in self.phases if receipt.outcome == "stopped"), None)

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, in the spec's order."""
        return tuple(arm["name"] for arm in self.spec["arms"])

    def training(self, arm: str) -> list[Record]:
        """The metrics of an arm's training steps, in order."""
        rows = [row for row in self.metrics if row.get("phase") == "train" and row.get("arm") == arm]
        return sorted(rows, key=lambda row: row["step"])

    def pilot(self, arm: str) -> list[Record]:
        """The metrics of an arm's first activation pilot (no fallback), in order."""
        rows = [row for row in self.metrics if row.get("phase") == "activation_pilot" and row.get("arm") == arm]
        return sorted((row for row in rows if not row.get("variant")), key=lambda row: row["step"])

    def trajectories(self, phase: str, arm: str, step: int) -> list[Record]:
        """The trajectories of one step; [] where there is no such file."""
        for pattern in (f"{phase}-{arm}-{step:03d}.jsonl", f"{phase}-{arm}-{step}.jsonl"):
            rows = read_lines(self.directory / "trajectories" / pattern)
            if rows:
                return rows
        return []


def read_run(run_dir: Path | str) -> RunFiles:
    """The run in a directory; BadInputError when it holds none."""
    directory = Path(run_dir)
    spec = read_object(directory / "spec.json")
    if spec is None:
        raise BadInputError(f"{directory} holds no run: there is no spec.json.")
    parity = next(iter(sorted(directory.glob("parity-*.json"))), None)
    return RunFiles(
        directory=directory,
        spec=spec,
        phases=tuple(_phases(directory)),
        metrics=tuple(read_lines(directory / "metrics.jsonl")),
        items=tuple(read_lines(directory / "items.jsonl")),
        deviations=tuple(read_lines(directory / "deviations.jsonl")),
        verdict=read_object(directory / "verdict.json"),
        cost=read_object(directory / "cost.json"),
        parity=read_object(parity) if parity else None,
        parity_name=parity.name if parity else None,
    )


def read_object(path: Path) -> Record | None:
    """The JSON object in a file, None where there is no file; BadInputError when it is damaged."""
    if not path.is_file():
        return None
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise BadInputError(f"{path} is damaged: it is no longer JSON ({error}).") from None
    if not isinstance(value, dict):
        raise BadInputError(f"{path} is damaged: it should hold one JSON object.")
    return cast("Record", value)


def read_lines(path: Path) -> list[Record]:
    """The records of a JSON Lines file; a last line without its newline (a killed writer's) is left out."""
    if not path.is_file():
        return []
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        return [parse_json(line) for line in whole]
    except ValueError as error:
        raise BadInputError(f"{path} is damaged: a line is no longer JSON ({error}).") from None


def _phases(directory: Path) -> list[PhaseReceipt]:
    seconds: dict[str, float] = {}
    for entry in read_lines(directory / "timings.jsonl"):
        if entry.get("what") == "phase":
            seconds[entry["phase"]] = seconds.get(entry["phase"], 0.0) + entry["seconds"]
    receipts: list[PhaseReceipt] = []
    for path in sorted((directory / "phases").glob("[0-9][0-9]-*.json")):
        entry = read_object(path) or {}
        record = entry.get("record", {})
        receipts.append(
            PhaseReceipt(
                name=entry.get("phase", path.stem[3:]),
                outcome=record.get("outcome", "done"),
                decided=record.get("decided", ""),
                because=record.get("because", ""),
                facts=record.get("facts", {}),
                seconds=seconds.get(entry.get("phase", "")),
            )
        )
    return receipts
