"""What a stranger does to a server and its state folder: bad folders, tampered files, full disks, kills, odd bodies."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from paritygate import server
from paritygate.errors import BadInputError
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model.lora import Adapter, LoraSpec
from paritygate.server.model.network import Network
from paritygate.server.sessions import checkpoints as store_module
from paritygate.server.sessions.checkpoints import Store

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"ttl_seconds": None, "overwrite": True, "user_metadata": None}
JSON = {"Content-Type": "application/json"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paritygate.server", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "impl")}


def refused(arguments: list[str]) -> str:
    done = subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


@pytest.fixture
def session(http: httpx.Client) -> Any:
    session = http.post("create_session", json={}).json()["session_id"]
    yield session
    http.post(f"sessions/{session}/finish")


@pytest.fixture
def sampler(http: httpx.Client, session: str) -> str:
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "paritygate/tiny-qwen3"}
    return http.post("create_sampling_session", json=body).json()["sampling_session_id"]


def ask(http: httpx.Client, sampler: str) -> str:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"max_tokens": 3}}
    return http.post("asample", json=body).json()["request_id"]


def retrieve(http: httpx.Client, request_id: str) -> httpx.Response:
    while (answer := http.post("retrieve_future", json={"request_id": request_id})).status_code == 408:
        pass
    return answer


def saved(network: Any, folder: Path, name: str = "a", seed: int = 1) -> tuple[Store, Path]:
    store = Store(folder)
    store.save(Adapter(LoraSpec(2, seed), network.targets), "run", "weights", name, "m", **OPTIONS)
    return store, folder / "run" / "weights" / name


# ---------------------------------------------------------------------- the command line


def test_a_folder_that_transformers_cannot_load_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    for config in ("{", '{"model_type": "llama"}', "{}"):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(BadInputError, match=f"^--model {re.escape(str(tmp_path))}: transformers cannot load it"):
            Network.load(tmp_path)
    assert "transformers cannot load it" in refused(["--model", str(tmp_path)])


def test_a_state_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "nothing can be saved there" in refused(["--model", "tiny", "--state", str(tmp_path / "file")])


def test_a_port_in_use_is_refused_in_a_sentence(running: server.Running) -> None:
    port = running.base_url.rpartition(":")[2]
    assert "cannot listen" in refused(["--model", "tiny", "--port", port])


def test_a_signal_while_it_starts_ends_it(tmp_path: Path) -> None:
    """Before it has said a word: loading may take a minute."""
    process = subprocess.Popen(
        command("--model", "tiny", "--state", str(tmp_path / "state")), env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (tmp_path / "state").exists() and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out == "" or "base_url" in out  # the machine may have been quicker than the signal


def test_a_signal_while_it_samples_ends_it() -> None:
    process = subprocess.Popen(
        command("--model", "tiny", "--api-key", "tml-x"), env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    with httpx.Client(
        base_url=f"{ready['base_url']}/api/v1/", headers={"X-API-Key": "tml-x"}, timeout=30, trust_env=False
    ) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": ready["model"]}
        sampler = http.post("create_sampling_session", json=body).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        params = {"max_tokens": 8000, "stop": []}
        body = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": params, "num_samples": 16}
        waiting = http.post("asample", json=body).json()["request_id"]
        process.send_signal(signal.SIGTERM)
        answer = http.post("retrieve_future", json={"request_id": waiting})
        assert "stopping" in answer.json()["error"]
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


# ---------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    "metadata", [b'{"x": NaN}', b'{"x": "\\ud800"}', b'{"\\udfff": "x"}', b'{"x": {}}', b"[]", b'"x"']
)
def test_metadata_that_could_not_be_sent_back_is_refused(http: httpx.Client, metadata: bytes) -> None:
    answer = http.post("create_session", content=b'{"user_metadata": ' + metadata + b"}", headers=JSON)
    assert (answer.status_code, "object of strings" in answer.text) == (422, True)


def test_an_answer_that_is_gone_can_be_asked_for_again(http: httpx.Client, sampler: str) -> None:
    """410 makes the SDK send the same request once more: it must not get the answer that is gone."""
    first = ask(http, sampler)
    assert retrieve(http, first).status_code == 200
    http.post("cancel_future", json={"request_id": first})
    assert http.post("retrieve_future", json={"request_id": first}).status_code == 410
    second = ask(http, sampler)
    assert second != first
    assert retrieve(http, second).status_code == 200


def test_a_bug_is_answered_in_json_and_the_next_request_is_served(
    running: server.Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(body: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(running.service.sessions, "get", broken)
    answer = http.post("session_heartbeat", json={"session_id": "x"})
    assert (answer.status_code, answer.json()["detail"]) == (500, "a bug of the server: ZeroDivisionError: oops")
    monkeypatch.undo()
    assert http.get("healthz").status_code == 200


# ---------------------------------------------------------------------- the state folder


@pytest.mark.parametrize(
    "change",
    [{"expires": "soon"}, {"rank": "x"}, {"created": None}, {"base_model": 3}, {"steps": True}, {"unknown": 1}, None],
)
def test_a_tampered_checkpoint_is_named_and_stops_nothing_else(network: Any, tmp_path: Path, change: Any) -> None:
    store, bad = saved(network, tmp_path, "bad")
    saved(network, tmp_path, "good")
    file = bad / "checkpoint.json"
    if change is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(RequestError, match="cannot be read") as caught:
        store.find("tinker://run/weights/bad")
    assert caught.value.status == 422  # the SDK repeats 5xx for five minutes
    assert [c.name for c in store.listed("run")] == ["good"]
    store.sweep()


@pytest.mark.parametrize("seed", [2**53 - 1, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63)])
def test_a_state_of_every_seed_comes_back(network: Any, tmp_path: Path, seed: int) -> None:
    """One that the server drew itself has 63 bits."""
    store, _ = saved(network, tmp_path, seed=seed)
    assert store.find("tinker://run/weights/a").spec == LoraSpec(2, seed)
    assert [c.seed for c in store.listed("run")] == [seed]


def test_a_checkpoint_is_what_its_folder_is_called(network: Any, tmp_path: Path) -> None:
    """Not what is written in it: deleting a copy must not delete the original, nor leave the state folder."""
    store, folder = saved(network, tmp_path, "a")
    shutil.copytree(folder, folder.parent / "b")
    file = folder.parent / "b" / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "run": "../../elsewhere"}))
    assert store.find("tinker://run/weights/b").path == "tinker://run/weights/b"
    store.delete("tinker://run/weights/b")
    assert [c.name for c in store.listed()] == ["a"]


def test_a_full_disk_fails_the_save_and_keeps_what_was_saved(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder = saved(network, tmp_path)
    before = {f.name: f.read_bytes() for f in folder.iterdir()}

    def full(tensors: Any, path: Path, *_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "save_file", full)
    with pytest.raises(RequestError, match=r"could not be written.*No space left") as caught:
        store.save(Adapter(LoraSpec(2, 2), network.targets), "run", "weights", "a", "m", **OPTIONS)
    assert caught.value.status == 507
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    assert [f.name for f in folder.parent.iterdir()] == ["a"]


@pytest.mark.parametrize("at", [1, 2])
def test_a_kill_while_overwriting_leaves_the_old_or_the_new(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    store, folder = saved(network, tmp_path)
    real, calls = os.replace, []

    def replace(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == at:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        store.save(Adapter(LoraSpec(2, 2), network.targets), "run", "weights", "a", "m", **OPTIONS)
    monkeypatch.undo()
    again = Store(tmp_path)
    assert again.find("tinker://run/weights/a").seed == 1
    assert again.save(Adapter(LoraSpec(2, 3), network.targets), "run", "weights", "a", "m", **OPTIONS).seed == 3
    assert again.find("tinker://run/weights/a").seed == 3
    assert [f.name for f in folder.parent.iterdir()] == ["a"]


def test_what_killed_servers_left_is_cleared(network: Any, tmp_path: Path) -> None:
    store, folder = saved(network, tmp_path)
    mine = store.spill(Adapter(LoraSpec(2, 1), network.targets).freeze("v"), "x")
    dead = tmp_path / ".spilled-999999999"
    dead.mkdir()
    half, fresh = folder.parent / ".saving-old", folder.parent / ".saving-new"
    half.mkdir()
    fresh.mkdir()
    os.utime(half, (0, 0))
    Store(tmp_path).sweep()
    assert (mine.exists(), dead.exists(), half.exists(), fresh.exists()) == (True, False, False, True)


def test_samplers_outlive_a_full_disk_and_name_weights_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that cannot be moved to disk stay in memory; those that were taken from the disk are an error."""
    import tinker
    from tinker import types

    running = server.start("tiny", limits=Limits(sampler_bytes=1))
    client = tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key)
    trainer = client.create_lora_training_client(running.model_name, rank=2, seed=1).result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    first = trainer.save_weights_and_get_sampling_client().result()
    want = first.compute_logprobs(prompt).result()
    real = store_module.save_file

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "save_file", full)
    second = trainer.save_weights_and_get_sampling_client().result()
    assert first.compute_logprobs(prompt).result() == want
    monkeypatch.setattr(store_module, "save_file", real)
    assert second.compute_logprobs(prompt).result() == want
    trainer.save_weights_and_get_sampling_client().result()
    spilled = list(running.service.store.folder.rglob("*.safetensors"))
    assert len(spilled) == 2
    for file in spilled:
        file.unlink()
    sampler = next(s for s in running.service.samplers._samplers.values() if s.spilled is not None)
    with pytest.raises(RequestError, match="cannot be read"):
        running.service.samplers._snapshot(sampler)
    client.close("success").result()
    running.stop()


def test_a_sampler_that_leaves_memory_while_it_samples_ends_as_if_it_had_not() -> None:
    import tinker
    from tinker import types

    running = server.start("tiny", limits=Limits(sampler_bytes=1))
    client = tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key)
    trainer = client.create_lora_training_client(running.model_name, rank=2, seed=1).result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams(max_tokens=300, seed=5, stop=[])
    sampler = trainer.save_weights_and_get_sampling_client().result()
    want = sampler.sample(prompt, 2, params).result().sequences
    waiting = sampler.sample(prompt, 2, params)
    for _ in range(3):
        trainer.save_weights_and_get_sampling_client().result()
    assert next(iter(running.service.samplers._samplers.values())).snapshot is None
    assert [(s.tokens, s.logprobs) for s in waiting.result().sequences] == [(s.tokens, s.logprobs) for s in want]
    client.close("success").result()
    running.stop()


def test_two_models_may_save_under_one_name(running: server.Running) -> None:
    import tinker
    from tinker import types

    client = tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    datum = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3})
    paths, losses = [], []
    for seed in (1, 2):
        trainer = client.create_lora_training_client(running.model_name, rank=2, seed=seed).result()
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.1 * seed)).result()
        paths.append(trainer.save_state("same").result().path)
        losses.append(trainer.forward([datum], "cross_entropy").result().metrics["loss:sum"])
    assert len(set(paths)) == len(set(losses)) == 2
    for path, loss in zip(paths, losses, strict=True):
        again = client.create_training_client_from_state(path).result()
        assert again.forward([datum], "cross_entropy").result().metrics["loss:sum"] == loss
    client.close("success").result()
