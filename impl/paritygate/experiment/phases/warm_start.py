"""The warm start: supervised steps on gold train episodes, the same weights for every arm; cached by its inputs."""

import dataclasses
import importlib.metadata
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

from paritygate import native
from paritygate import server as embedded_server
from paritygate.agent.trajectory import Trajectory
from paritygate.backend import Backend, Datum, Trainer, cross_entropy_datum
from paritygate.errors import GateStopped
from paritygate.experiment.run.account.meter import MeteredBackend, Usage
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided
from paritygate.experiment.run.state import State
from paritygate.experiment.step.arm_run import PROCESS
from paritygate.experiment.step.collector import Collector
from paritygate.receipts import digest, sha256_file
from paritygate.receipts.files import read_json
from paritygate.server.model.sources import cache_folder
from paritygate.spec.protocol import WarmStart

PHASE = "warm_start"
UNIT = f"{PHASE}/adapter"


@dataclasses.dataclass
class Steps:
    """The supervised steps, taken: their client, and of each the loss (nats a trained token) and the seconds.

    used: what was asked of a session that is not the phase's, to be counted; `close` ends that session.
    """

    trainer: Trainer
    losses: list[float]
    seconds: list[float]
    used: Usage
    close: Callable[[], Awaitable[None]]


async def warm_start(state: State) -> Decided:
    """Train (or take from the cache) the adapter that both arms begin with; its saved state is in the facts."""
    spec = state.exp.protocol.warm_start
    assert spec is not None
    collector = await Collector.of(state, state.settings())
    episodes = gold_episodes(collector, spec)
    key = digest(_inputs(state, spec, collector, episodes))
    record = state.journal.committed(UNIT)
    if record is None:
        record = state.journal.commit(UNIT, await _made(state, spec, episodes, key))
    tokens = sum(len(episode.tokens) for episode in episodes)
    return Decided(
        f"{len(episodes)} gold episodes ({tokens} tokens), last loss {record['last_loss']:.4f} nats a trained token",
        f"{'from the cache' if record['cached'] else 'trained through the service'}; digest of its inputs {key[:16]}",
        {"state": record["state"], "inputs": key, "episodes": len(episodes), "last_loss": record["last_loss"]},
        state.journal.files(PHASE),
    )


async def begin(state: State) -> Steps | None:
    """The steps, at the embedded server that the phase before leaves idle; None where there is none or they are done.

    Nothing is saved or counted before the phase takes them.
    """
    server, spec = await state.spare_server(), state.exp.protocol.warm_start
    if server is None or spec is None or state.journal.committed(UNIT) is not None:
        return None
    used: Usage = Counter()
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(server.session())
        session = cast(Backend, MeteredBackend(opened, used, state.states))
        collector = await Collector.of(state, state.settings(), session)
        episodes = gold_episodes(collector, spec)
        if (_cached(digest(_inputs(state, spec, collector, episodes))) / "record.json").is_file():
            return None
        steps = await _steps(state, session, spec, episodes)
        return dataclasses.replace(steps, used=used, close=stack.pop_all().aclose)


async def _made(state: State, spec: WarmStart, episodes: Sequence[Trajectory], key: str) -> Record:
    """The record of the adapter: trained already, else from the cache, else trained now."""
    steps = await state.early(PHASE)
    if steps is None:
        kept = await _from_cache(state, key)
        if kept is not None:
            return kept
        steps = await _steps(state, await state.backend(), spec, episodes, state.progress.update)
    return await _saved(state, steps, key)


def gold_episodes(collector: Collector, spec: WarmStart) -> list[Trajectory]:
    """The gold episodes of the selected tasks; every other one asks for confirmation before it writes."""
    indices = spec.tasks.indices(len(collector.source.tasks(spec.tasks.split)))
    return [collector.gold(spec.tasks.split, task, confirm=place % 2 == 1) for place, task in enumerate(indices)]


def batches(spec: WarmStart, episodes: Sequence[Trajectory]) -> list[list[Datum]]:
    """Every epoch shuffled by the seed; the loss of a batch is the mean over its trained tokens (nats)."""
    datums: list[list[Datum]] = []
    for epoch in range(spec.epochs):
        order = list(range(len(episodes)))
        random.Random(f"{spec.seed}/{epoch}").shuffle(order)
        for start in range(0, len(order), spec.batch_size):
            chosen = [episodes[index] for index in order[start : start + spec.batch_size]]
            trained = sum(sum(episode.mask) for episode in chosen)
            datums.append([cross_entropy_datum(e.tokens, [mask / trained for mask in e.mask]) for e in chosen])
    return datums


async def _steps(
    state: State,
    backend: Backend,
    spec: WarmStart,
    episodes: Sequence[Trajectory],
    update: Callable[[str], None] = lambda detail: None,
) -> Steps:
    trainer = await backend.training(state.exp.base_model, rank=state.exp.lora_rank, seed=spec.seed)
    losses, seconds = list[float](), list[float]()
    todo = batches(spec, episodes)
    for number, batch in enumerate(todo):
        update(f"batch {number + 1} of {len(todo)}" + (f", loss {losses[-1]:.3f}" if losses else ""))
        started = time.perf_counter()
        losses.append(await _step(state, spec, trainer, batch, number))
        seconds.append(round(time.perf_counter() - started, 4))
    return Steps(trainer, losses, seconds, Counter(), _nothing)


async def _nothing() -> None:
    """A session of the phase ends with it."""


async def _saved(state: State, steps: Steps, key: str) -> Record:
    """What was trained, saved: it counts from here on."""
    for number, seconds in enumerate(steps.seconds):
        state.timings.append(PHASE, what="batch", step=number, seconds=seconds)
    saved = await steps.trainer.save(f"warm-start-{PROCESS}")
    state.account.usage.update(steps.used)
    await steps.close()
    record: Record = {"state": saved, "last_loss": steps.losses[-1], "losses": steps.losses, "cached": False}
    if (await state.backend()).embedded:
        _to_cache(state, key, record)
    return record


async def _step(state: State, spec: WarmStart, trainer: Trainer, batch: Sequence[Datum], number: int) -> float:
    passed = await trainer.forward_backward(batch, "cross_entropy")
    if not abs(passed.loss) < float("inf"):
        raise GateStopped(
            f"warm start, batch {number}: stopped before the optimiser step, since the loss is {passed.loss}."
        )
    adam = state.exp.adam
    await trainer.optim_step(spec.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps)
    return passed.loss


def _inputs(state: State, spec: WarmStart, collector: Collector, episodes: Sequence[Trajectory]) -> Record:
    """All that the adapter's bits depend on: what is trained on, how, by which model, code and library."""
    weights = sorted(Path(collector.policy_tokenizer.name_or_path).glob("*.safetensors"))
    adam = state.exp.adam
    return {
        "episodes": [[list(episode.tokens), list(episode.mask)] for episode in episodes],
        "schedule": {"learning_rate": spec.learning_rate, "batch": spec.batch_size, "epochs": spec.epochs},
        "seed": spec.seed,
        "adam": [adam.beta1, adam.beta2, adam.eps],
        "rank": state.exp.lora_rank,
        "model": {"name": state.exp.base_model, "weights": [sha256_file(path) for path in weights]},
        "dtype": state.exp.protocol.service.embedded_dtype,
        "server": server_sources(),
        "kernels": native.build_record(),
        "torch": importlib.metadata.version("torch"),
    }


def server_sources() -> dict[str, str]:
    """Digest of every source that computes in an embedded server, those of its compiled kernels included."""
    home = Path(embedded_server.__file__).resolve().parents[1]
    paths = [path for folder in ("native", "server") for path in (home / folder).rglob("*.[chp]*") if path.is_file()]
    kept = sorted(path for path in paths if path.suffix in (".py", ".cpp", ".hpp"))
    return {path.relative_to(home).as_posix(): sha256_file(path) for path in kept}


def _cached(key: str) -> Path:
    return cache_folder() / "warm-start" / key[:32]


async def _from_cache(state: State, key: str) -> Record | None:
    """The record of a cached adapter, its files put where the embedded server looks for saved states."""
    folder = _cached(key)
    if not (await state.backend()).embedded or not (folder / "record.json").is_file():
        return None
    record: Record = read_json(folder / "record.json")
    for name, sha256 in record["files"].items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            return None
    target = state.saved(record["state"])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in record["files"]:
        shutil.copyfile(folder / file, target / file)
    return {**record, "cached": True}


def _to_cache(state: State, key: str, record: dict[str, Any]) -> None:
    """Copy the saved adapter, without Adam's moments, beside and rename it: a reader never sees half of one.

    Where another run has put its own there meanwhile, that one stays: it is of the same inputs.
    """
    source = state.saved(record["state"])
    folder = _cached(key)
    scratch = folder.with_name(f".{folder.name}-{PROCESS}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    names = ("adapter.safetensors", "checkpoint.json")
    for file in names:
        shutil.copyfile(source / file, scratch / file)
    files = {file: sha256_file(scratch / file) for file in names}
    (scratch / "record.json").write_text(json.dumps({**record, "files": files}))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(scratch, ignore_errors=True)
