"""Raw HTTP: whatever is malformed, truncated, oversized or replayed gets a 4xx with a reason, and harms nobody."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from paritygate import server
from paritygate.server.limits import Limits
from tests.counts import soak
from tests.server.raw_http import PROTOBUF, ask, backward, refused, retrieve, send


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    session = http.post("create_session", json={"tags": [], "user_metadata": None, "sdk_version": "0"}).json()
    yield session["session_id"]
    http.post(f"sessions/{session['session_id']}/finish", json={"reason": {"type": "success"}})


@pytest.fixture
def sampler(http: httpx.Client, session: str) -> str:
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "paritygate/tiny-qwen3"}
    return http.post("create_sampling_session", json=body).json()["sampling_session_id"]


@pytest.fixture
def model(http: httpx.Client, session: str) -> str:
    body = {"session_id": session, "model_seq_id": 0, "base_model": "paritygate/tiny-qwen3", "lora_config": {"rank": 2}}
    return retrieve(http, http.post("create_model", json=body).json()["request_id"]).json()["model_id"]


def test_a_key_is_required_on_every_route(running: server.Running) -> None:
    with httpx.Client(base_url=f"{running.base_url}/api/v1/", trust_env=False) as bare:
        for route in running.service.routes:
            method, path = route
            path = path.replace("{", "").replace("}", "")
            assert bare.request(method, path).status_code == 401, path
            assert bare.request(method, path, headers={"X-API-Key": running.api_key[:-1]}).status_code == 401
            assert bare.request(method, path, headers={"X-API-Key": running.api_key + "x"}).status_code == 401
        assert bare.get("healthz", headers={"Authorization": f"Bearer {running.api_key}"}).json() == {"status": "ok"}
        assert bare.get("healthz", headers={"X-API-Key": "é".encode()}).status_code == 401
        assert bare.get("healthz", headers={"X-API-Key": running.api_key}).status_code == 200
        assert bare.get("nothing", headers={"X-API-Key": running.api_key}).status_code == 404


def test_it_listens_on_this_machine_only(running: server.Running) -> None:
    assert running.base_url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_malformed_json(http: httpx.Client, body: bytes) -> None:
    paths = (
        "asample create_model optim_step retrieve_future save_weights save_weights_for_sampler load_weights get_info"
    )
    for path in [*paths.split(), "create_sampling_session", "session_heartbeat", "weights_info"]:
        refused(http.post(path, content=body))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": []}, "no tokens"),
        ({"tokens": [480]}, "vocabulary of 480"),
        ({"tokens": [-1]}, "vocabulary of 480"),
        ({"tokens": [1.5]}, "not a token id"),
        ({"tokens": [True]}, "not a token id"),
        ({"tokens": [10**30]}, "not a token id"),
        ({"tokens": ["a"]}, "not a token id"),
        ({"tokens": [1] * 8193}, "context is 8192"),
        ({"params": {"max_tokens": 9000}}, "over the model's context"),
        ({"params": {"max_tokens": 0}}, "max_tokens"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"params": {"top_p": 0}}, "top_p"),
        ({"params": {"top_p": 1.1}}, "top_p"),
        ({"params": {"top_k": "all"}}, "top_k"),
        ({"params": {"seed": 2**70}}, "seed"),
        ({"params": {"stop": {"a": 1}}}, "stop"),
        ({"params": {"stop": [1, "a"]}}, "stop"),
        ({"params": {"stop": [""]}}, "stop"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**6}, "num_samples"),
        ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
        ({"prompt_logprobs_last_n": 2}, "needs prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "over len(prompt) - 1"),
        ({"prompt_logprobs": "yes"}, "true or false"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, "shape [2, K]"),
        ({"target_prompt_logprobs": {"data": [-1, -1], "dtype": "int64", "shape": [2, 1]}}, "no token id"),
        ({"target_prompt_logprobs": {"data": [1, 480], "dtype": "int64", "shape": [2, 1]}}, "vocabulary"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1]}}, "do not fill"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1], "sparse_crow_indices": [0, 5, 1],
          "sparse_col_indices": [0]}}, "sparse indices"),
        ({"record_stability_info": True}, "stable_reinforce"),
        ({"sampling_session_id": "x:sample:9"}, "no sampling session"),
    ],
)  # fmt: skip
def test_sample_requests_that_cannot_be_served(
    http: httpx.Client, sampler: str, change: dict[str, Any], words: str
) -> None:
    change = dict(change)
    tokens = change.pop("tokens", [1, 2, 3])
    body = {**ask(sampler, tokens, params=change.pop("params", {})), **change}
    refused(http.post("asample", content=json.dumps(body)), words)


def test_images_are_refused(http: httpx.Client, sampler: str) -> None:
    body = ask(sampler, [1])
    body["prompt"]["chunks"].append({"type": "image", "data": "", "format": "png"})
    refused(http.post("asample", json=body), "encoded_text")


def test_a_full_context_is_served(http: httpx.Client, sampler: str) -> None:
    promise = http.post("asample", json=ask(sampler, [1] * 8192, params={"max_tokens": 1}, prompt_logprobs=True))
    answer = pb.SampleResponse.FromString(retrieve(http, promise.json()["request_id"]).content)
    assert len(answer.prompt_logprobs) == 8192 * 4


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: m.data.pop(), "0 datums"),
        (lambda m: setattr(m, "loss_fn", "nonsense"), "unknown loss"),
        (lambda m: m.data[0].loss_fn_inputs["weights"].__setattr__("dense", b"abc"), "whole number"),
        (lambda m: m.data[0].loss_fn_inputs["weights"].__setattr__("dense", b"abcd"), "do not fill"),
        (lambda m: m.data[0].loss_fn_inputs["weights"].shape.__setitem__(0, 2), "do not fill"),
        (lambda m: m.data[0].loss_fn_inputs["weights"].__setattr__("dense", b"\0\0\xc0\x7f" * 3), "finite"),
        (lambda m: m.data[0].loss_fn_inputs["weights"].__setattr__("dense", b"\0\0\x80\x7f" * 3), "finite"),
        (lambda m: m.data[0].loss_fn_inputs["target_tokens"].__setattr__("dtype", pb.DTYPE_FLOAT32), "int64"),
        (lambda m: m.data[0].loss_fn_inputs["target_tokens"].__setattr__("dense", b"\xff" * 24), "vocabulary"),
        (lambda m: m.data[0].loss_fn_inputs["target_tokens"].shape.extend([1, 1]), "neither a vector's"),
        (lambda m: m.data[0].loss_fn_inputs.__delitem__("target_tokens"), "target_tokens is missing"),
        (lambda m: m.data[0].model_input[0].encoded_text.__setattr__("tokens", b"\1\0\0\0"), "as long as model_input"),
        (lambda m: m.data[0].model_input[0].encoded_text.__setattr__("tokens", b"\xff\xff\xff\x7f" * 3), "vocabulary"),
        (lambda m: m.data[0].model_input[0].dmel.__setattr__("dmel", b"x"), "encoded_text"),
        (lambda m: setattr(m, "model_id", "nobody"), "no model"),
        (lambda m: setattr(m, "model_id", ""), "model_id is missing"),
    ],
)
def test_training_requests_that_cannot_be_served(http: httpx.Client, model: str, spoil: Any, words: str) -> None:
    message = backward(model, 1, [1, 2, 3])
    spoil(message)
    refused(send(http, message), words)
    seq = 2 if message.model_id == model else 1  # a refused request has had its turn
    answer = send(http, backward(model, seq, [1, 2, 3]))
    assert (
        pb.ForwardBackwardOutput.FromString(retrieve(http, answer.json()["request_id"]).content).metrics["loss:sum"] > 0
    )


def test_truncated_and_random_protobufs(http: httpx.Client, model: str) -> None:
    whole = backward(model, 1, [1, 2, 3]).SerializeToString()
    for cut in range(1, len(whole), soak(quick=7, full=1)):
        answer = http.post("forward_backward", content=whole[:cut], headers=PROTOBUF)
        assert 400 <= answer.status_code < 500 or answer.status_code == 200
        assert answer.status_code == 200 or answer.json()["detail"]

    @settings(max_examples=soak(quick=40, full=2000), deadline=None)
    @given(st.binary(max_size=200))
    def random_bytes(body: bytes) -> None:
        answer = http.post("forward_backward", content=body, headers=PROTOBUF)
        assert 400 <= answer.status_code < 500

    random_bytes()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_any_json_in_any_field_gets_a_reason(http: httpx.Client, sampler: str) -> None:
    good = ask(sampler, [1, 2, 3], prompt_logprobs=True)

    @settings(max_examples=soak(quick=60, full=3000), deadline=None)
    @given(
        st.sampled_from(sorted({*good, "num_samples", "target_prompt_logprobs", "topk_sample_logprobs"})), json_values
    )
    def spoil(name: str, value: Any) -> None:
        answer = http.post("asample", content=json.dumps({**good, name: value}))
        assert answer.status_code == 200 or (400 <= answer.status_code < 500 and answer.json()["detail"])

    spoil()


def test_oversized_and_badly_compressed_bodies() -> None:
    running = server.start("tiny", limits=Limits(request_bytes=10_000))
    base = f"{running.base_url}/api/v1/"
    with httpx.Client(base_url=base, headers={"X-API-Key": running.api_key}, trust_env=False) as http:
        refused(http.post("asample", content=b"x" * 10_001), "over 10000 bytes", status=(413,))
        bomb = zstandard.compress(b"\0" * 10_000_000)
        assert len(bomb) < 10_000
        packed = {**PROTOBUF, "Content-Encoding": "zstd"}
        refused(http.post("forward_backward", content=bomb, headers=packed), "decompresses", status=(413,))
        refused(http.post("forward_backward", content=b"not zstd", headers=packed), "not valid zstd")
        refused(http.post("forward_backward", content=bomb[:20], headers=packed))
        refused(http.post("asample", content=b"{}", headers={"Content-Encoding": "br"}), "br", status=(415,))
    running.stop()
    running.stop()


def test_replays_run_once(http: httpx.Client, model: str, sampler: str) -> None:
    message = backward(model, 1, [1, 2, 3])
    first, again = send(http, message).json(), send(http, message).json()
    assert first == again
    assert retrieve(http, first["request_id"]).content == retrieve(http, first["request_id"]).content
    refused(send(http, backward(model, 1, [3, 2, 1])), "used before", status=(422,))
    step = {"adam_params": {"learning_rate": 0.1}, "model_id": model, "seq_id": 2}
    assert len({http.post("optim_step", json=step).json()["request_id"] for _ in range(3)}) == 1
    one, two = (http.post("asample", json=ask(sampler, [1, 2], 7)).json() for _ in range(2))
    assert one == two
    assert len(one["sample_sequence_ids"]) == 1
    refused(http.post("asample", json=ask(sampler, [2, 1], 7)), "used before", status=(422,))


def test_requests_run_in_seq_id_order(http: httpx.Client, model: str) -> None:
    """A step that arrives before its gradients waits for them."""
    step = http.post("optim_step", json={"adam_params": {"learning_rate": 0.05}, "model_id": model, "seq_id": 2}).json()
    probe = send(http, backward(model, 3, [1, 2, 3])).json()
    before = send(http, backward(model, 1, [1, 2, 3])).json()
    losses = [
        pb.ForwardBackwardOutput.FromString(retrieve(http, p["request_id"]).content).metrics["loss:sum"]
        for p in (before, probe)
    ]
    assert retrieve(http, step["request_id"]).json()["metrics"].keys() == {"unclipped_grad_l2:mean"}
    assert losses[1] < losses[0]


@pytest.mark.parametrize("seq", [10_002, 2**31 - 1, 2**31, 2**53 - 1])
def test_a_seq_id_far_ahead_is_refused_and_nothing_waits(http: httpx.Client, model: str, seq: int) -> None:
    """Protobuf has seq_ids of 32 bits: were one beyond them awaited, no pass could ever be the next."""
    late = http.post("optim_step", json={"model_id": model, "seq_id": seq, "adam_params": {}})
    refused(late, f"seq_id {seq} is far ahead of the next one, 1")
    if seq < 2**31:
        refused(send(http, backward(model, seq, [1, 2, 3])), "is far ahead of the next one, 1")
    assert retrieve(http, send(http, backward(model, 1, [1, 2, 3])).json()["request_id"]).status_code == 200


def test_wrong_optimisers_and_values(http: httpx.Client, model: str) -> None:
    step = {"model_id": model, "seq_id": 1}
    refused(http.post("optim_step", json={**step, "optimizer_params": {"type": "dimuon"}}), "AdamW")
    for seq, (name, value) in enumerate([("beta1", 1.0), ("learning_rate", -1), ("eps", "small")], 2):
        refused(http.post("optim_step", json={**step, "seq_id": seq, "adam_params": {name: value}}), name)
    nan = json.dumps({**step, "seq_id": 5, "adam_params": {"learning_rate": float("nan")}})
    refused(http.post("optim_step", content=nan), "learning_rate")


def test_paths_cannot_leave_the_state_folder(http: httpx.Client, session: str, model: str) -> None:
    for path in ("tinker://../weights/x", "tinker://a/weights/..", "tinker://a/weights/../../x", "tinker:///weights/x",
                 "/etc/passwd", "tinker://a/secrets/x", "tinker://a/weights/.x", "file:///etc/passwd"):  # fmt: skip
        body = {"session_id": session, "sampling_session_seq_id": 5, "model_path": path}
        refused(http.post("create_sampling_session", json=body))
        refused(http.post("weights_info", json={"tinker_path": path}))
    refused(http.delete("training_runs/..%2f..%2fetc/checkpoints/weights/passwd"), status=(400, 404))


def test_unknown_and_forgotten_promises(http: httpx.Client, sampler: str) -> None:
    refused(http.post("retrieve_future", json={"request_id": "nobody"}), "no request", status=(404,))
    promise = http.post("asample", json=ask(sampler, [1], params={"max_tokens": 4000, "stop": []})).json()["request_id"]
    assert http.post("cancel_future", json={"request_id": promise}).status_code == 204
    refused(http.post("retrieve_future", json={"request_id": promise}), "gone", status=(410,))


def test_an_unloaded_model_frees_its_place_and_its_session_goes_on(http: httpx.Client, session: str) -> None:
    """SDKs before 0.26 cannot finish a session: more models than the server holds, one after another."""
    lora = {"base_model": "paritygate/tiny-qwen3", "lora_config": {"rank": 2}}
    for number in range(Limits().adapters + 2):
        body = {"session_id": session, "model_seq_id": number, **lora}
        model = retrieve(http, http.post("create_model", json=body).json()["request_id"]).json()["model_id"]
        promise = http.post("unload_model", json={"model_id": model, "type": "unload_model"}).json()["request_id"]
        assert retrieve(http, promise).json() == {"model_id": model, "type": "unload_model"}
        refused(http.post("get_info", json={"model_id": model}), "no model", status=(404,))


def test_training_is_not_cancelled_by_name(http: httpx.Client, model: str) -> None:
    promise = send(http, backward(model, 1, [1, 2, 3])).json()["request_id"]
    assert http.post("cancel_future", json={"request_id": promise}).status_code == 204
    assert retrieve(http, promise).headers["content-type"] == "application/x-protobuf"


def test_other_clients_see_nothing(http: httpx.Client, sampler: str, model: str) -> None:
    """The same request gives the same bytes before, amid and after a storm of bad ones."""

    def good() -> bytes:
        promise = http.post("asample", json=ask(sampler, [7, 8, 9], params={"max_tokens": 16})).json()
        return retrieve(http, promise["request_id"]).content

    before = pb.SampleResponse.FromString(good())
    for _ in range(soak(quick=10, full=200)):
        promise = http.post("asample", json=ask(sampler, [7, 8, 9], params={"max_tokens": 16})).json()
        http.post("asample", content=b"{")
        http.post("forward_backward", content=b"\xff" * 50, headers=PROTOBUF)
        http.post("asample", json=ask(sampler, [480]))
        amid = pb.SampleResponse.FromString(retrieve(http, promise["request_id"]).content)
        assert amid.sequences == before.sequences
    assert http.get("healthz").json() == {"status": "ok"}
