"""The whole client against the embedded server in its own process: one life of it, its death, its parent's death."""

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paritygate import bootstrap
from paritygate.backend import BackendError, ServiceDown, connect, cross_entropy_datum, policy_gradient_datum
from paritygate.backend.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [5, 80, 90, 100, 110, 120]


def children():
    return {p.pid for p in psutil.Process().children(recursive=True)}


def test_one_life_of_a_session(tmp_path):
    async def main():
        before = children()
        async with connect(embedded_model="tiny", state_dir=tmp_path) as backend:
            [server] = children() - before
            assert backend.embedded
            assert backend.models == ("paritygate/tiny-qwen3",)
            with pytest.raises(BackendError, match="does not serve Qwen/Nothing"):
                await backend.training("Qwen/Nothing")
            trainer = await backend.training(backend.models[0], rank=4, seed=0)
            assert (trainer.base_model, trainer.rank) == (backend.models[0], 4)
            sampler = await trainer.snapshot("first")
            options = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
            [sample] = await sampler.sample(TOKENS, **options)
            # Deterministic by seed, alone or among others, and scored as it was sampled.
            many = await asyncio.gather(*(sampler.sample(TOKENS, **options) for _ in range(16)))
            assert all(again == [sample] for again in many)
            scored = await sampler.score([*TOKENS, *sample.tokens])
            assert scored[0] is None
            assert scored[len(TOKENS) :] == pytest.approx(sample.logprobs, abs=1e-4)
            rows = await sampler.topk(TOKENS, 3)
            assert rows[0] is None
            assert [len(row) for row in rows[1:]] == [3] * 5
            # Training moves the trainer, not the snapshot.
            datum = cross_entropy_datum(TOKENS, [0, 1, 1, 1, 1, 1])
            first = await trainer.forward_backward([datum], "cross_entropy")
            assert len(first.logprobs[0]) == len(TOKENS) - 1
            assert first.loss == pytest.approx(-sum(first.logprobs[0]), rel=1e-5)
            await trainer.optim_step(1e-2)
            state = await trainer.save("state")
            await trainer.save("state")  # over an older save
            moved = (await trainer.forward([datum], "cross_entropy")).loss
            assert moved < first.loss
            assert (await sampler.score([*TOKENS, *sample.tokens])) == scored
            # A saved state comes back with its optimiser: the next step from it is the same step.
            await trainer.forward_backward([datum], "cross_entropy")
            await trainer.optim_step(1e-2)
            ahead = (await trainer.forward([datum], "cross_entropy")).loss
            await trainer.load(state)
            assert (await trainer.forward([datum], "cross_entropy")).loss == moved
            await trainer.forward_backward([datum], "cross_entropy")
            await trainer.optim_step(1e-2)
            assert (await trainer.forward([datum], "cross_entropy")).loss == ahead
            other = await backend.restored(state)
            assert (await other.forward([datum], "cross_entropy")).loss == moved
            same = await backend.sampling(model_path=sampler.path)
            assert (await same.score(TOKENS)) == (await sampler.score(TOKENS))
            base = await backend.sampling(base_model=backend.models[0])
            assert base.tokenizer.encode("hello") == sampler.tokenizer.encode("hello")
            # Importance sampling on the sampling policy: every ratio is 1.
            full = [*TOKENS, *sample.tokens]
            mask = [0] * len(TOKENS) + [1] * len(sample.tokens)
            old = [None] * len(TOKENS) + list(sample.logprobs)
            fresh = await backend.training(backend.models[0], rank=4, seed=0)
            passed = await fresh.forward_backward([policy_gradient_datum(full, mask, old, [2.0] * len(full))])
            assert passed.loss == pytest.approx(-2.0 * len(sample.tokens), rel=1e-4)
            with pytest.raises(BackendError, match="Sampling failed"):
                await sampler.sample(TOKENS * 3000, max_tokens=1, temperature=1.0)
        return server

    server = asyncio.run(main())
    assert not psutil.pid_exists(server)
    assert (tmp_path / "server.log").exists()


def test_a_killed_server_ends_what_waits_for_it_and_is_named():
    async def main():
        before = children()
        async with connect(embedded_model="tiny") as backend:
            [server] = children() - before
            trainer = await backend.training(backend.models[0], rank=4)
            sampler = await trainer.snapshot("first")
            calls = [
                asyncio.ensure_future(sampler.sample(TOKENS, max_tokens=4000, temperature=1.0, seed=i, stop=[-1]))
                for i in range(4)
            ]
            await asyncio.sleep(0.3)
            os.kill(server, signal.SIGKILL)
            killed = time.monotonic()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            return outcomes, time.monotonic() - killed

    outcomes, took = asyncio.run(main())
    assert all(isinstance(outcome, ServiceDown) for outcome in outcomes)
    assert "process ended with code -9" in str(outcomes[0])
    assert took < 10


def test_a_server_that_cannot_start_says_why():
    async def main():
        async with connect(embedded_model="/no/such/model"):
            raise AssertionError

    before = children()
    with pytest.raises(BackendError, match=r"did not start.*no/such/model"):
        asyncio.run(main())
    assert children() == before


def test_the_server_does_not_outlive_a_parent_that_is_killed():
    program = (
        "import asyncio\n"
        "from paritygate.backend.embedded import EmbeddedServer\n"
        "async def main():\n"
        "    server = EmbeddedServer('tiny'); starting = asyncio.ensure_future(server.start())\n"
        "    await asyncio.sleep(0.2); print(server.pid, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    command, environment = [sys.executable, "-c", program], os.environ | {"PYTHONPATH": str(ROOT / "impl")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert server.is_running()
        parent.kill()
    until = time.monotonic() + 15
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        time.sleep(0.1)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def test_stopping_twice_and_without_a_start_is_harmless(tmp_path):
    async def main():
        server = EmbeddedServer("tiny", tmp_path)
        await server.stop()
        await server.stop()
        return server.ended()

    assert asyncio.run(main()) is None


def test_a_start_that_is_cancelled_leaves_no_process():
    async def main():
        server = EmbeddedServer("tiny")
        starting = asyncio.ensure_future(server.start())
        await asyncio.sleep(0.3)
        assert server.pid is not None
        assert psutil.pid_exists(server.pid)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return server.pid

    assert not psutil.pid_exists(asyncio.run(main()))


def test_the_exit_code_of_a_process_that_cannot_serve_is_told(tmp_path):
    """2, as of any command that is given what is no model."""
    with pytest.raises(BackendError, match=r"ended with code 2: .*nowhere"):
        asyncio.run(EmbeddedServer(str(tmp_path / "nowhere")).start())


PROVE = """
import asyncio, hashlib, pathlib, sys
from paritygate import bootstrap
from paritygate.backend.embedded import EmbeddedServer

root = pathlib.Path(sys.argv[1])
files = [path for path in (root / "impl").rglob("*") if path.is_file()]
shown = {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
bootstrap.expect(root, shown)
for name in sys.argv[2:]:
    with (root / name).open("a") as file:
        file.write("\\n")

async def main():
    server = EmbeddedServer("tiny")
    await server.start()
    print("started")
    await server.stop()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "edited",
    [
        "impl/paritygate/__init__.py",
        "impl/paritygate/bootstrap.py",
        "impl/paritygate/backend/embedded.py",
        "impl/paritygate/server/engine/losses.py",
        "impl/paritygate/server/model/products.cpp",
        "impl/argparse.py",
        "impl/h11.py",
        None,
    ],
)
def test_the_servers_process_loads_only_what_was_proven(tmp_path, edited):
    """One more newline at the end of any file between the proof and the start, and the process refuses it by name.

    A file that is new counts. Of the working folder it imports nothing, and of PYTHONPATH nothing either, though the
    process that starts it does: what is read before our sources are checked, by the server, by uvicorn.
    """
    for folder, names in (("work", ("hashlib", "uvicorn", "h11")), ("path", ("uvicorn", "h11"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"{name}.py").write_text("raise SystemExit(7)")
    in_the_child = "import os, sys\nif '--model' in sys.orig_argv:\n    os._exit(7)\n"
    (tmp_path / "path" / "sitecustomize.py").write_text(in_the_child)
    shutil.copytree(ROOT / "impl", tmp_path / "impl", ignore=shutil.ignore_patterns("__pycache__"))
    arguments = [str(tmp_path), *filter(None, [edited])]
    path = os.pathsep.join([str(tmp_path / "path"), str(tmp_path / "impl")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-c", PROVE, *arguments]
    done = subprocess.run(command, cwd=tmp_path / "work", capture_output=True, text=True, env=environment, check=False)
    if edited in (None, "impl/argparse.py"):  # the standard library's comes first
        assert done.stdout == "started\n", done.stderr
        return
    assert "started" not in done.stdout
    assert f"{tmp_path / edited} is not the source that parity was shown for" in done.stderr


def test_what_the_servers_process_loaded_is_known_at_its_end(monkeypatch):
    loaded = {"something of ours": "its digest"}
    monkeypatch.setattr("paritygate.backend.embedded.LOADED", loaded)
    monkeypatch.setattr(bootstrap, "LOADED", loaded)
    libraries = dict[str, str]()
    monkeypatch.setattr(bootstrap, "LIBRARIES", libraries)

    async def main():
        async with connect(embedded_model="tiny"):
            assert not any("/server/" in path for path in loaded)

    asyncio.run(main())
    for name in ("__init__.py", "errors.py", "backend/embedded.py", "server/engine/losses.py", "server/http/app.py"):
        path = ROOT / "impl" / "paritygate" / name
        assert loaded[os.path.realpath(path)] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_of_which_two_processes_loaded_different_bytes_fits_no_proof(monkeypatch):
    monkeypatch.setattr(bootstrap, "LOADED", {"a": "1", "b": "2"})
    monkeypatch.setattr(bootstrap, "LIBRARIES", {"x": "5"})
    bootstrap.merge({"a": "1", "b": "3", "c": "4"}, {"x": "6"})
    assert bootstrap.LOADED == {"a": "1", "b": "two processes loaded different bytes", "c": "4"}
    assert bootstrap.LIBRARIES == {"x": "two processes loaded different bytes"}
