"""Clients that stall, vanish or ask for too much: what they held goes back, and nobody else notices."""

import socket
import time

import httpx
import pytest
from tinker.proto import tinker_public_pb2 as pb

from paritygate import server
from paritygate.server.limits import Limits
from tests.server.raw_http import ask, backward, refused, retrieve, send


def test_a_seq_id_that_never_comes_is_an_error() -> None:
    running = server.start("tiny", limits=Limits(out_of_order_seconds=0.2, session_seconds=4))
    base = f"{running.base_url}/api/v1/"
    with httpx.Client(base_url=base, headers={"X-API-Key": running.api_key}, trust_env=False, timeout=30) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": running.model_name, "lora_config": {"rank": 2}}
        model = retrieve(http, http.post("create_model", json=body).json()["request_id"]).json()["model_id"]
        late = send(http, backward(model, 5, [1, 2, 3])).json()
        answer = retrieve(http, late["request_id"]).json()
        message = "seq_id 5 waited for seq_id 1, which never came; the next is 6"
        assert answer == {"error": message, "category": "user"}
    running.stop()


def test_a_seq_id_that_never_comes_does_not_wedge_the_model() -> None:
    """What waited for it fails together, whenever it came; the next request is served; the lost one is over."""
    running = server.start("tiny", limits=Limits(out_of_order_seconds=0.5, session_seconds=2))
    base = f"{running.base_url}/api/v1/"
    with httpx.Client(base_url=base, headers={"X-API-Key": running.api_key}, trust_env=False, timeout=30) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": running.model_name, "lora_config": {"rank": 2}}
        model = retrieve(http, http.post("create_model", json=body).json()["request_id"]).json()["model_id"]

        def loss(seq: int) -> float:
            promise = send(http, backward(model, seq, [1, 2, 3])).json()["request_id"]
            return pb.ForwardBackwardOutput.FromString(retrieve(http, promise).content).metrics["loss:sum"]

        before = loss(1)
        promises = [send(http, backward(model, 3, [1, 2, 3])).json()["request_id"]]
        time.sleep(0.4)  # younger than the one before it, and it would wait for ever
        promises.append(
            http.post("optim_step", json={"model_id": model, "seq_id": 4, "adam_params": {}}).json()["request_id"]
        )
        assert ["seq_id 2" in retrieve(http, promise).json()["error"] for promise in promises] == [True, True]
        assert loss(5) == before  # no step was taken on the way
        step = {"model_id": model, "seq_id": 6, "adam_params": {"learning_rate": 1e-2}}
        assert "metrics" in retrieve(http, http.post("optim_step", json=step).json()["request_id"]).json()
        assert loss(7) < before
        refused(send(http, backward(model, 2, [1, 2, 3])), "seq_id 2 is over")
        early = http.post("optim_step", json={"model_id": model, "seq_id": 9})  # refused before its turn, which passes
        assert early.status_code == 400
        assert loss(8) == loss(10)
    running.stop()


def test_a_finished_session_is_gone(http: httpx.Client) -> None:
    session = http.post("create_session", json={}).json()["session_id"]
    for _ in range(2):
        assert http.post(f"sessions/{session}/finish", json={}).status_code == 204
    refused(http.post("session_heartbeat", json={"session_id": session}), "finished", status=(410,))
    refused(http.post("session_heartbeat", json={"session_id": "x"}), status=(404,))


def test_a_body_that_does_not_come_is_given_up() -> None:
    running = server.start("tiny", limits=Limits(body_seconds=0.3))
    host, port = running.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as half:
        half.sendall(b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nX-API-Key: ")
        half.sendall(running.api_key.encode() + b"\r\n\r\n{")
        assert b"408" in half.recv(1000).splitlines()[0]
    running.stop()


def test_limits_on_models_and_sessions() -> None:
    running = server.start("tiny", limits=Limits(adapters=2, sessions=2))
    base = f"{running.base_url}/api/v1/"
    with httpx.Client(base_url=base, headers={"X-API-Key": running.api_key}, trust_env=False) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "base_model": running.model_name, "lora_config": {"rank": 1}}
        for number in range(2):
            assert http.post("create_model", json={**body, "model_seq_id": number}).status_code == 200
        refused(http.post("create_model", json={**body, "model_seq_id": 2}), "limit")
        http.post("create_session", json={})
        refused(http.post("create_session", json={}), "limit")
    running.stop()


def test_a_client_that_vanishes_leaves_nothing() -> None:
    """It sends half a request, then whole ones for a long sample and a model, and is never heard of again."""
    running = server.start("tiny", limits=Limits(session_seconds=1.0))
    service, engine = running.service, running.service.engine
    host, port = running.base_url.removeprefix("http://").split(":")
    half = socket.create_connection((host, int(port)))
    half.sendall(b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nX-API-Key: ")
    half.sendall(running.api_key.encode() + b'\r\n\r\n{"sampling_session_id"')
    half.close()
    with httpx.Client(
        base_url=f"{running.base_url}/api/v1/", headers={"X-API-Key": running.api_key}, trust_env=False
    ) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": running.model_name}
        sampler = http.post("create_sampling_session", json=body).json()["sampling_session_id"]
        http.post("create_model", json={"session_id": session, "model_seq_id": 0, "base_model": running.model_name})
        http.post("asample", json=ask(sampler, [1, 2, 3], params={"max_tokens": 8000, "stop": []}, num_samples=8))
        deadline = time.monotonic() + 20
        while not engine.load()["rows"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    while engine.load()["rows"] or len(service.promises) or service.sessions.live or service.trainers.models:
        assert time.monotonic() < deadline, "the vanished client's work is still there"
        time.sleep(0.05)
    assert len(service.samplers) == 0
    running.stop()


def test_a_client_that_dies_gives_its_slots_to_others() -> None:
    """Long before its session ends: once it has missed its heartbeats and somebody else asks."""
    running = server.start("tiny", limits=Limits(adapters=1, sessions=2, silent_seconds=1.0))
    engine = running.service.engine
    with httpx.Client(
        base_url=f"{running.base_url}/api/v1/", headers={"X-API-Key": running.api_key}, trust_env=False, timeout=30
    ) as http:
        dead = http.post("create_session", json={}).json()["session_id"]
        base = {"base_model": running.model_name}
        sampler = http.post(
            "create_sampling_session", json={"session_id": dead, "sampling_session_seq_id": 0, **base}
        ).json()["sampling_session_id"]
        http.post("create_model", json={"session_id": dead, "model_seq_id": 0, **base})
        request = ask(sampler, [1, 2, 3], params={"max_tokens": 8000, "stop": []}, num_samples=8)
        lost = http.post("asample", json=request).json()["request_id"]
        living = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": living, "model_seq_id": 0, **base}
        refused(http.post("create_model", json=body), "limit")  # it may still be alive
        deadline = time.monotonic() + 20
        while engine.load()["rows"] or http.post("retrieve_future", json={"request_id": lost}).status_code != 410:
            assert time.monotonic() < deadline, "the dead client's samples are still computed"
            assert http.post("session_heartbeat", json={"session_id": living}).status_code == 200
            time.sleep(0.1)
        assert dead in running.service.sessions.live  # its models and answers wait for it while nobody needs the slot
        created = retrieve(http, http.post("create_model", json=body).json()["request_id"]).json()
        assert created["model_id"] == f"{living}:train:0"
        refused(http.post("session_heartbeat", json={"session_id": dead}), "finished", status=(410,))
    running.stop()


def test_stopping_fails_what_waits() -> None:
    running = server.start("tiny")
    with httpx.Client(
        base_url=f"{running.base_url}/api/v1/", headers={"X-API-Key": running.api_key}, trust_env=False
    ) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": running.model_name}
        sampler = http.post("create_sampling_session", json=body).json()["sampling_session_id"]
        http.post("asample", json=ask(sampler, [1, 2, 3], params={"max_tokens": 8000, "stop": []}))
    start = time.monotonic()
    running.stop()
    assert time.monotonic() - start < 10
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.base_url}/api/v1/healthz", trust_env=False)
