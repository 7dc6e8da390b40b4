"""The retail benchmark as data: found in one of a few places, held to the pinned digests, given out read-only."""

import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from paritygate.retail import layout
from paritygate.retail.database import Base, Database, database_hash, ordered_digest
from paritygate.retail.errors import DataError
from paritygate.retail.tools import TERMINATING, call
from paritygate.spec.pins import TAU_BENCH, TAU_BENCH_DATABASE_SHA256, TAU_BENCH_PARTS_SHA256

ROOT = Path(__file__).resolve().parents[3]
BESIDE = ROOT.parent / "shared" / "tau_bench_retail"
ENVIRONMENT_VARIABLE = "PARITYGATE_TAU_BENCH"


@dataclass(frozen=True, slots=True)
class Action:
    """A gold tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One task: who the user is, what they were told to want, the gold actions, and texts the agent must say."""

    user_id: str
    instruction: str
    actions: tuple[Action, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Goal:
    """The state that a task's gold actions lead to, as canonical text of the records that they change."""

    changes: dict[tuple[str, str], str]
    failing: tuple[int, ...]  # positions of gold actions that are answered with an error
    observations: tuple[str, ...] = field(repr=False)
    database: Database = field(repr=False)


class Source:
    """The retail data: `.tasks(split)`, `.wiki`, `.rules`, `.tools`, `.initial_hash`, `.provenance`, `.database()`."""

    def __init__(self, parts: layout.Parts, *, folder: Path, place: str) -> None:
        self.folder = folder
        self.place = place
        self.base = Base({table: parts[table] for table in layout.TABLES})
        self.wiki: str = parts["wiki"]
        self.rules: list[str] = parts["rules"]
        self.tools: list[dict[str, Any]] = parts["tools"]
        self.digests = {name: ordered_digest(part) for name, part in parts.items()}
        self._tasks = {split: tuple(_task(entry) for entry in parts[f"tasks/{split}"]) for split in layout.SPLITS}
        self._goals: dict[tuple[str, int], Goal] = {}

    def tasks(self, split: str) -> tuple[Task, ...]:
        """The tasks of "train", "dev" or "test"; DataError for another name."""
        if split not in self._tasks:
            raise DataError(f"no split {split!r} in tau-bench retail; there are {', '.join(self._tasks)}")
        return self._tasks[split]

    def task(self, split: str, index: int) -> Task:
        """One task by its index; DataError for an index outside the split."""
        tasks = self.tasks(split)
        if not 0 <= index < len(tasks):
            raise DataError(f"no task {index} in split {split!r} of tau-bench retail, which has 0 to {len(tasks) - 1}")
        return tasks[index]

    def database(self) -> Database:
        """A fresh database; it shares every record with the others until it writes to one."""
        return Database(self.base)

    @cached_property
    def initial_hash(self) -> str:
        """Upstream's hash of the untouched database, hex."""
        return database_hash(self.database())

    def goal(self, split: str, index: int) -> Goal:
        """The goal state of a task, replayed once and cached."""
        key = (split, index)
        if key not in self._goals:
            db = self.database()
            actions = self.task(split, index).actions
            observations = tuple(
                "" if action.name in TERMINATING else call(db, action.name, action.arguments) for action in actions
            )
            failing = tuple(place for place, text in enumerate(observations) if text.startswith("Error: "))
            self._goals[key] = Goal(db.changes(), failing, observations, db)
        return self._goals[key]

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the data came from and what it is, for a receipt: no path of this machine in it."""
        return {
            "name": TAU_BENCH.source,
            "revision": TAU_BENCH.revision,
            "place": self.place,
            "initial_database_hash": self.initial_hash,
            "parts_sha256": dict(self.digests),
        }


def _task(entry: dict[str, Any]) -> Task:
    actions = tuple(Action(action["name"], action["kwargs"]) for action in entry["actions"])
    return Task(entry["user_id"], entry["instruction"], actions, tuple(entry["outputs"]))


def places() -> Iterator[tuple[str, Path]]:
    """(name, folder) of every place that may hold the data, in the order in which they are tried."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        yield ENVIRONMENT_VARIABLE, Path(named)
    yield "data/tau_bench_retail", ROOT / "data" / "tau_bench_retail"
    yield "beside the checkout", BESIDE
    package = importlib.util.find_spec("tau_bench")
    for folder in (package.submodule_search_locations or ()) if package else ():
        yield "installed package tau_bench", Path(folder) / "envs" / "retail"


def load(path: str | os.PathLike[str] | None = None) -> Source:
    """The retail data from `path`, else from PARITYGATE_TAU_BENCH, else from the first of `places()` that has any.

    The files are read at each call; while their bytes are the same, so is the Source, with all that it has computed.
    Raises DataError, in one sentence, where there is none, a file is missing, or a digest is not the pinned one.
    """
    if path is not None:
        return _load(Path(path), "--tau-bench", layout.digest(Path(path)))
    for place, folder in places():
        if place == ENVIRONMENT_VARIABLE or folder.is_dir():
            return _load(folder, place, layout.digest(folder))
    raise DataError(
        f"no tau-bench retail data: run `make data`, or name a folder with --tau-bench or {ENVIRONMENT_VARIABLE}"
    )


@lru_cache(maxsize=2)  # a run and its audit may name one folder in two ways
def _load(folder: Path, place: str, _digest: str) -> Source:
    return checked(layout.read(folder), folder=folder, place=place)


def checked(parts: layout.Parts, *, folder: Path, place: str) -> Source:
    """A Source over `parts` after each one's digest and the initial database hash were found as pinned."""
    for name, digest in TAU_BENCH_PARTS_SHA256.items():
        actual = ordered_digest(parts[name])
        if actual != digest:
            raise DataError(
                f"{folder}: {name} is not tau-bench's at {TAU_BENCH.revision[:8]} (sha256 {actual[:12]}… where "
                f"{digest[:12]}… is pinned); `make data` fetches it again"
            )
    source = Source(parts, folder=folder, place=place)
    if source.initial_hash != TAU_BENCH_DATABASE_SHA256:
        raise DataError(
            f"{folder}: the database hash is {source.initial_hash[:12]}…, not upstream's "
            f"{TAU_BENCH_DATABASE_SHA256[:12]}…; `make data` fetches it again"
        )
    return source


def write(parts: layout.Parts, folder: Path) -> None:
    """Write `parts` in the JSON layout into an existing folder."""
    for table in layout.TABLES:
        (folder / f"{table}.json").write_text(_dumped(parts[table]), encoding="utf-8")
    for split in layout.SPLITS:
        (folder / f"retail_tasks_{split}.json").write_text(_dumped(parts[f"tasks/{split}"]), encoding="utf-8")
    (folder / "wiki.md").write_text(parts["wiki"], encoding="utf-8")
    (folder / "rules.json").write_text(_dumped(parts["rules"]), encoding="utf-8")
    (folder / "tools_info.json").write_text(_dumped(parts["tools"]), encoding="utf-8")


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
