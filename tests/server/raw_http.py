"""Requests as bytes and JSON, without the SDK: what asks, what trains, what is refused."""

from typing import Any

import httpx
from tinker.proto import tinker_public_pb2 as pb

PROTOBUF = {"Content-Type": "application/x-protobuf"}


def retrieve(http: httpx.Client, request_id: str) -> httpx.Response:
    while (answer := http.post("retrieve_future", json={"request_id": request_id})).status_code == 408:
        assert answer.json()["type"] == "try_again"
    return answer


def ask(sampler: str, tokens: list[Any], seq: int | None = None, **options: Any) -> dict[str, Any]:
    params = {"max_tokens": 4, "seed": 1, **options.pop("params", {})}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    return {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": params, **options}


def backward(model: str, seq: int, tokens: list[int], **changes: Any) -> "pb.ForwardBackwardRequest":
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=changes.get("loss", "cross_entropy"))
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"".join(t.to_bytes(4, "little", signed=True) for t in tokens)
    n = len(tokens)
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        pb.Tensor(dense=b"".join(t.to_bytes(8, "little", signed=True) for t in tokens), dtype=pb.DTYPE_INT64, shape=[n])
    )
    import struct

    weights = changes.get("weights", [1.0] * n)
    datum.loss_fn_inputs["weights"].CopyFrom(
        pb.Tensor(dense=struct.pack(f"<{len(weights)}f", *weights), dtype=pb.DTYPE_FLOAT32, shape=[len(weights)])
    )
    return message


def send(http: httpx.Client, message: "pb.ForwardBackwardRequest") -> httpx.Response:
    return http.post("forward_backward", content=message.SerializeToString(), headers=PROTOBUF)


def refused(answer: httpx.Response, *words: str, status: tuple[int, ...] = (400, 404, 413, 415, 422)) -> None:
    assert answer.status_code in status, (answer.status_code, answer.text)
    for word in words:
        assert word in answer.json()["detail"]
