"""Hold an embedded server with a mistake in it to obligations of spec/service.json, in a process of its own."""

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paritygate
from tests.mutants.mutant import Mutant

if TYPE_CHECKING:  # paritygate.service is imported in functions: some mutants of the losses are edits of it
    from paritygate.service.runner import Result

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600.0  # after which a proof has not ended
LIMIT = 60.0  # seconds for a call: what hangs is told from what is slow on a busy machine


def names() -> list[str]:
    """Every obligation of spec/service.json."""
    from paritygate.service.obligations import load

    return [entry.name for entry in load().entries]


def preload() -> None:
    """What every server and every client imports, so that the processes that part do not; nothing of the server."""
    import tinker  # noqa: F401 - loaded once
    import torch  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import uvicorn.protocols.http.h11_impl  # noqa: F401

    import paritygate.service.proof  # noqa: F401


def copy_server(folder: Path, mutant: Mutant | None) -> None:
    """Write a copy of paritygate/server with the mutant's edits to `folder`; ValueError: a text is not there once."""
    shutil.copytree(ROOT / "impl/paritygate/server", folder / "server", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in mutant.edits if mutant else ():
        path = folder / name
        source = path.read_text()
        if source.count(old) != 1:
            raise ValueError(f"{mutant}: {name} holds the text to edit {source.count(old)} times: {old!r}")
        path.write_text(source.replace(old, new))


def proved(mutant: Mutant | None, chosen: Sequence[str], **options: Any) -> "dict[str, Result] | str":
    """The results of `chosen` obligations at a server with the mutant's edits, or why there are none.

    options: of `paritygate.server.start`.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(mutant, chosen, options, theirs))
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(SECONDS) else f"no proof within {SECONDS:g} s"
    except EOFError:
        answer = "the process ended without a word"
    process.kill()
    process.join()
    return answer


def _child(mutant: Mutant | None, chosen: Sequence[str], options: Mapping[str, Any], answers: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            copy_server(Path(folder), mutant)
            paritygate.__path__.insert(0, folder)
            answers.send(_prove(folder, chosen, options))
        except BaseException as error:
            answers.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def _prove(folder: str, chosen: Sequence[str], options: Mapping[str, Any]) -> "dict[str, Result]":
    import logging

    from paritygate import server
    from paritygate.service.lab import Settings
    from paritygate.service.obligations import load
    from paritygate.service.proof import prove_at

    if not str(server.__file__).startswith(folder):
        raise RuntimeError(f"the server under test comes from {server.__file__}")
    logging.getLogger("tinker").setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn.error").disabled = True
    running = server.start("tiny", **options)
    report = prove_at(running.base_url, running.api_key, None, load().only(chosen), settings=Settings(), limit=LIMIT)
    return {result.name: result for result in report.results}
