"""Reset and grade of a retail episode: ours against upstream's design, A B A B in one run, medians and their ratio.

The peer is the real tau_bench package where it is importable, else its design in our own words: read the JSON files
again at each reset, and at the end hash the whole database, read it again, replay the gold actions and hash that.
The floor is what no grading by content can leave out: the canonical text of the records that the episode touched.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "impl"))
from paritygate import retail  # noqa: E402
from paritygate.retail import upstream  # noqa: E402
from paritygate.retail.database import Base, Database, canonical_text  # noqa: E402
from paritygate.retail.source import write  # noqa: E402
from paritygate.retail.tools import TERMINATING  # noqa: E402

GOAL = 100.0


class ReloadingEpisode:
    """Upstream's design in our own words: nothing is shared between episodes and nothing is remembered."""

    def __init__(self, source: retail.Source, folder: Path, index: int) -> None:
        self.folder, self.task = folder, source.tasks("test")[index]
        self.data = self.read()

    def read(self) -> dict[str, Any]:
        return {
            table: json.loads((self.folder / f"{table}.json").read_bytes()) for table in ("orders", "products", "users")
        }

    def act(self, data: dict[str, Any]) -> dict[str, Any]:
        db = Database(Base(data))
        for action in self.task.actions:
            if action.name not in TERMINATING:
                retail.call(db, action.name, action.arguments)
        for (table, key), record in db.touched.items():
            data[table][key] = record
        return data

    def grade(self) -> float:
        return float(retail.database_hash(self.data) == retail.database_hash(self.act(self.read())))


def peer_package(source: retail.Source, index: int) -> tuple[float, float]:
    """(seconds of reset and grade, reward) of the real package."""
    started = perf_counter()
    episode = upstream.UpstreamEpisode(source, "test", index)
    reset = perf_counter() - started
    for action in episode.task.actions:
        if action.name not in TERMINATING:
            episode.call(action.name, action.arguments)
    messages = [" ".join(episode.task.outputs)]
    started = perf_counter()
    reward = episode.grade(messages).reward
    return reset + perf_counter() - started, reward


def peer_design(source: retail.Source, folder: Path, index: int) -> tuple[float, float]:
    """(seconds of reset and grade, reward) of the design."""
    started = perf_counter()
    episode = ReloadingEpisode(source, folder, index)
    reset = perf_counter() - started
    episode.data = episode.act(episode.data)
    started = perf_counter()
    reward = episode.grade()
    return reset + perf_counter() - started, reward


def ours(source: retail.Source, index: int) -> tuple[float, float]:
    """(seconds of reset and grade, reward) of our environment."""
    started = perf_counter()
    episode = retail.RetailEpisode(source, "test", index)
    reset = perf_counter() - started
    for action in episode.task.actions:
        if action.name not in TERMINATING:
            episode.call(action.name, action.arguments)
    messages = [" ".join(episode.task.outputs)]
    started = perf_counter()
    reward = episode.grade(messages).reward
    return reset + perf_counter() - started, reward


def floor(source: retail.Source, index: int) -> tuple[float, float]:
    """(seconds of canonical texts of the touched records, 1.0)."""
    touched = source.goal("test", index).database.touched
    started = perf_counter()
    for record in touched.values():
        canonical_text(record)
    return perf_counter() - started, 1.0


def main() -> int:
    """Measure and print; exit 1 where a reward differs from the recorded 1.0 or the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tau-bench", metavar="DIR")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=25)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        source = retail.load(options.tau_bench)
    except retail.DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    with tempfile.TemporaryDirectory() as name:
        parts = {table: source.base.tables[table] for table in source.base.tables}
        parts |= {"wiki": "", "rules": [], "tools": []} | {f"tasks/{split}": [] for split in ("train", "dev", "test")}
        write(parts, Path(name))
        return report(measure(source, Path(name), options.repeats, options.tasks), options.json)


def measure(source: retail.Source, folder: Path, repeats: int, tasks: int) -> dict[str, Any]:
    """Medians in seconds over tasks and repeats, the sides taking turns on every task."""
    real = True
    try:
        upstream.package()
    except retail.DataError:
        real = False
    sides: dict[str, Callable[[int], tuple[float, float]]] = {
        "peer": (lambda index: peer_package(source, index)) if real else (lambda i: peer_design(source, folder, i)),
        "ours": lambda index: ours(source, index),
        "floor": lambda index: floor(source, index),
    }
    started = perf_counter()
    indices = random.Random(0).sample(range(len(source.tasks("test"))), tasks)
    for index in indices:
        source.goal("test", index)
    goals = (perf_counter() - started) / tasks
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for index in indices:
            for side, run in sides.items():
                taken, reward = run(index)
                if reward != 1.0:
                    raise SystemExit(f"test task {index}: {side} gives {reward} for the gold actions, not 1.0")
                seconds[side].append(taken)
    result: dict[str, Any] = {side: median(values) for side, values in seconds.items()}
    pairs = zip(seconds["peer"], seconds["ours"], strict=True)
    result |= {"ratio": median(peer / this for peer, this in pairs), "first_goal": goals}
    return result | {"peer_is": "tau_bench" if real else "its design", "episodes": len(seconds["ours"])}


def report(result: dict[str, Any], target: Path | None) -> int:
    """Print one line a side, write JSON where asked, and say whether the goal was reached."""
    for side in ("peer", "ours", "floor"):
        print(
            f"{side:6} {result[side] * 1e6:12.1f} us a reset and grade" + f" ({result['peer_is']})" * (side == "peer")
        )
    print(f"ratio  {result['ratio']:12.0f} (goal {GOAL:.0f}; median of {result['episodes']} pairs)")
    print(f"a goal's first replay, once a task: {result['first_goal'] * 1e6:.0f} us")
    if target:
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["ratio"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
