"""What a run has committed: one file a unit of work, and the JSON Lines files that are derived from them.

A unit (a training step, an evaluated item) counts once its file under `units/` is there; it is written in one atomic
step after everything that it speaks of. `metrics.jsonl` repeats the units' metrics in the order of commitment and is
rebuilt from them when a run is opened, so that a kill between the two loses nothing and repeats nothing.
"""

import dataclasses
import math
import re
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from paritygate.receipts import canonical, write_atomic
from paritygate.receipts.files import append_whole, read_json

Record = dict[str, Any]


class Journal:
    """The committed units of the run in `directory`; one process writes (the caller holds the run's lock)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines = self._rebuild_metrics()

    def commit(self, unit: str, record: Mapping[str, Any]) -> Record:
        """Write the unit whole or not at all; its `metrics`, if any, follow as one line of metrics.jsonl."""
        path = self._path(unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        clean = cast(Record, finite(dict(record)))
        metrics = clean.get("metrics")
        if metrics is not None:
            clean["metrics"] = {"index": self._lines, **metrics}
        write_atomic(path, canonical(clean), exclusive=True)
        if metrics is not None:
            append_line(self.directory / "metrics.jsonl", clean["metrics"])
            self._lines += 1
        return clean

    def committed(self, unit: str) -> Record | None:
        """The record of a committed unit, or None."""
        path = self._path(unit)
        return read_json(path) if path.is_file() else None

    def units(self, prefix: str = "") -> list[str]:
        """The names of the committed units that start with `prefix`, numbers in them in the order of their values."""
        root = self.directory / "units"
        names = (str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.json"))
        return sorted((name for name in names if name.startswith(prefix)), key=by_number)

    def files(self, prefix: str) -> list[str]:
        """The same units as paths relative to the run directory."""
        return [f"units/{unit}.json" for unit in self.units(prefix)]

    def _rebuild_metrics(self) -> int:
        """metrics.jsonl again from the units: a killed writer may have left it short, torn or ahead by nothing."""
        records = [self.committed(unit) or {} for unit in self.units()]
        lines = sorted((record["metrics"] for record in records if "metrics" in record), key=lambda line: line["index"])
        path = self.directory / "metrics.jsonl"
        content = b"".join(canonical(line) + b"\n" for line in lines)
        if not path.is_file() or path.read_bytes() != content:
            write_atomic(path, content)
        return len(lines)

    def _path(self, unit: str) -> Path:
        return self.directory / "units" / f"{unit}.json"


def by_number(name: str) -> list[tuple[int, str]]:
    """A key to sort names by: step-1000 comes after step-999, not after step-100."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def finite(value: Any) -> Any:
    """The same JSON value with NaN and infinities as strings: RFC 8785 has no other place for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast(list[Any], value)]
    return value


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """One canonical JSON line at the end of `path`, on the disk when this returns."""
    append_whole(path, canonical(dict(record)) + b"\n")


def drop_torn_tail(path: Path) -> None:
    """Cut a JSONL file after its last whole line: a killed writer may have left half of one."""
    if path.is_file():
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            write_atomic(path, whole)


def read_lines(path: Path) -> list[Record]:
    """The records of a JSONL file; none where there is no file. Raises Refused for a line that is no JSON of ours."""
    return [read_json(path, line) for line in path.read_bytes().splitlines()] if path.is_file() else []


@dataclasses.dataclass(frozen=True)
class Timings:
    """Wall times (seconds), in a file of their own so that metrics.jsonl can be equal bit for bit."""

    path: Path

    def entries(self, phase: str | None = None) -> list[Record]:
        """The whole entries so far, of one phase or of all."""
        return [entry for entry in read_lines(self.path) if phase in (None, entry["phase"])]

    def append(self, phase: str, **what: Any) -> None:
        """One more entry."""
        append_line(self.path, {"phase": phase, **what})

    @contextmanager
    def measure(self, phase: str, **what: Any) -> Generator[Record]:
        """Time the block; the yielded record has `seconds` after it."""
        record: Record = {"phase": phase, **what}
        started = time.perf_counter()
        try:
            yield record
        finally:
            record["seconds"] = round(time.perf_counter() - started, 4)
            append_line(self.path, record)
