"""The chain of phase receipts in a run directory: each carries the digest of the one before."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paritygate.errors import Refused
from paritygate.receipts.files import canonical, read_canonical, write_atomic

FIRST = "0" * 64
NAME = re.compile(r"(\d\d)-([a-z_]+)\.json")


class PhaseChain:
    """phases/NN-<phase>.json under `run_dir`, in order; reading it checks the links, and raises Refused.

    A phase vouches for the files that it names as they were when it ended: their size and the digest of that many
    bytes. A later phase may append to such a file (metrics.jsonl grows) but not change what was there.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self._phases = self._read()

    @property
    def completed(self) -> list[str]:
        """Names of the phases that have a receipt, in order."""
        return [phase["phase"] for phase in self._phases]

    @property
    def head(self) -> str:
        """sha256 of the last phase receipt (64 zeros before the first): it stands for the whole chain."""
        return hashlib.sha256(canonical(self._phases[-1])).hexdigest() if self._phases else FIRST

    def append(self, phase: str, record: dict[str, Any], files: Iterable[str] = ()) -> str:
        """Write the receipt of `phase`: its `record` (JSON) and the digests of `files` (relative); return its sha256.

        Raises ValueError for a phase that has one already, and for a file that is not a plain file in the directory.
        """
        if phase in self.completed:
            raise ValueError(f"{self.run_dir} has a receipt for the phase {phase} already.")
        entry = {
            "index": len(self._phases) + 1,
            "phase": phase,
            "previous": self.head,
            "record": record,
            "files": {name: self._file(name) for name in sorted(set(files))},
        }
        data = canonical(entry)
        write_atomic(self._path(entry), data, exclusive=True)
        self._phases.append(json.loads(data))
        return hashlib.sha256(data).hexdigest()

    def record(self, phase: str) -> dict[str, Any]:
        """What `phase` recorded; raises KeyError for a phase without a receipt."""
        for entry in self._phases:
            if entry["phase"] == phase:
                return entry["record"]
        raise KeyError(phase)

    def verify(self) -> None:
        """Raise Refused, naming the file, unless the links hold and every file still has the bytes vouched for."""
        self._phases = self._read()
        promised: dict[str, dict[int, tuple[str, str]]] = {}
        for entry in self._phases:
            for name, file in entry["files"].items():
                promised.setdefault(name, {})[file["size"]] = (file["sha256"], entry["phase"])
        for name, cuts in sorted(promised.items()):
            path = inside(self.run_dir, name)
            if path is None:
                raise Refused(f"{self.run_dir / name} is missing: a phase receipt vouches for it.")
            digests = prefix_digests(path, sorted(cuts))
            for size, (sha256, phase) in sorted(cuts.items()):
                if digests.get(size) != sha256:
                    raise Refused(f"{path} was changed since the phase {phase} ended: its first {size} bytes differ.")

    def _path(self, entry: dict[str, Any]) -> Path:
        return self.run_dir / "phases" / f"{entry['index']:02}-{entry['phase']}.json"

    def _file(self, name: str) -> dict[str, Any]:
        path = inside(self.run_dir, name)
        if path is None:
            raise ValueError(f"{name} is not a plain file in {self.run_dir}.")
        size = path.stat().st_size
        return {"size": size, "sha256": prefix_digests(path, [size])[size]}

    def _read(self) -> list[dict[str, Any]]:
        phases: list[dict[str, Any]] = []
        previous = FIRST
        folder = self.run_dir / "phases"
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.name.startswith(".") and path.name.endswith(".tmp"):
                continue
            name = NAME.fullmatch(path.name)
            if name is None or path.is_symlink():
                raise Refused(f"{path} does not belong to the chain of phases.")
            entry, data = read_canonical(path, "phase-receipt")
            if (entry["index"], entry["phase"]) != (int(name[1]), name[2]) or entry["index"] != len(phases) + 1:
                raise Refused(f"{path} is not phase {len(phases) + 1} of the chain: phases were swapped or removed.")
            if entry["previous"] != previous:
                raise Refused(f"{path} does not follow the phase before it: one of the two was changed or swapped.")
            previous = hashlib.sha256(data).hexdigest()
            phases.append(entry)
        return phases


def inside(run_dir: Path, name: str) -> Path | None:
    """The path of the plain file `name` in `run_dir`, or None when it is none, or lies elsewhere."""
    path = run_dir / name
    if ".." in Path(name).parts or Path(name).is_absolute() or not path.is_file() or path.is_symlink():
        return None
    return path if path.resolve().is_relative_to(run_dir.resolve()) else None


def prefix_digests(path: Path, sizes: list[int]) -> dict[int, str]:
    """sha256 of the first n bytes of `path`, for each n in `sizes` (ascending) that the file is long enough for."""
    digests: dict[int, str] = {}
    running = hashlib.sha256()
    position = 0
    with path.open("rb") as file:
        for size in sizes:
            while position < size and (block := file.read(min(1 << 20, size - position))):
                running.update(block)
                position += len(block)
            if position == size:
                digests[size] = running.hexdigest()
    return digests
