"""forward_backward and optim_step on the wire of tinker 0.38.0: protobuf and JSON in, checked values out, and back."""

import math
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from paritygate.server.engine.losses import LossInputs, find_loss
from paritygate.server.engine.training import AdamParams, Datum, Outcome
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model.lora import LoraSpec
from paritygate.server.model.shape import Shape
from paritygate.server.wire.fields import Fields, check_tokens, dense_rows

_FLOATS = {pb.DTYPE_FLOAT32: np.float32}
_INTEGERS = {pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


def decode_data(message: "pb.ForwardBackwardRequest", shape: Shape, limits: Limits) -> list[Datum]:
    """Check the loss and every datum; RequestError names the datum and field at fault."""
    if not 1 <= len(message.data) <= limits.datums_per_request:
        raise RequestError(f"data: {len(message.data)} datums; a request takes 1 to {limits.datums_per_request}")
    _, needed = find_loss(message.loss_fn, loss_config(message))
    return [_datum(datum, needed, shape, f"data[{index}]") for index, datum in enumerate(message.data)]


def parse_forward_backward(body: bytes) -> "pb.ForwardBackwardRequest":
    """The bare message; RequestError if the bytes are no such protobuf."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(f"body is not a ForwardBackwardRequest protobuf ({error})") from error
    if not message.model_id:
        raise RequestError("model_id is missing")
    return message


def loss_config(message: "pb.ForwardBackwardRequest") -> dict[str, float | str]:
    """loss_fn_config_v2 where it is set, else the older map of numbers."""
    if message.loss_fn_config_v2:
        return {
            k: v.text if v.WhichOneof("value") == "text" else v.number for k, v in message.loss_fn_config_v2.items()
        }
    return dict(message.loss_fn_config)


def _datum(message: "pb.Datum", needed: tuple[str, ...], shape: Shape, where: str) -> Datum:
    tokens = check_tokens(_model_input(message, where), shape, f"{where}.model_input")
    inputs = message.loss_fn_inputs
    if "target_tokens" not in inputs:
        raise RequestError(f"{where}.loss_fn_inputs: target_tokens is missing")
    targets = _tensor(inputs["target_tokens"], f"{where}.target_tokens", integers=True)
    if targets.ndim not in (1, 2) or targets.shape[0] != len(tokens) or 0 in targets.shape:
        raise RequestError(
            f"{where}.target_tokens has shape {list(targets.shape)}; it must be [{len(tokens)}] or [{len(tokens)}, K], "
            "as long as model_input"
        )
    if targets.ndim == 2 and needed != ("weights",):
        raise RequestError(f"{where}.target_tokens has two axes; only cross_entropy takes (N, K)")
    if targets.ndim == 2 and targets.shape[1] > shape.vocabulary:
        raise RequestError(
            f"{where}.target_tokens has {targets.shape[1]} columns; the vocabulary has {shape.vocabulary}"
        )
    bad = np.argwhere((targets < 0) | (targets >= shape.vocabulary))
    if bad.size:
        place = tuple(int(i) for i in bad[0])
        raise RequestError(
            f"{where}.target_tokens{list(place)} is {int(targets[place])}, outside the vocabulary of {shape.vocabulary}"
        )
    unknown = sorted(set(inputs) - {"target_tokens", *needed})
    if unknown:
        raise RequestError(
            f"{where}.loss_fn_inputs: {unknown[0]!r} is not an input of this loss: it takes {list(needed)}"
        )
    tensors = {name: _loss_input(inputs, name, targets.shape, where) for name in needed}
    return Datum(tokens, LossInputs(torch.from_numpy(targets), tensors))


def _loss_input(inputs: "Mapping[str, pb.Tensor]", name: str, shape: tuple[int, ...], where: str) -> Tensor:
    if name not in inputs:
        raise RequestError(f"{where}.loss_fn_inputs: {name} is missing")
    integers = inputs[name].dtype in _INTEGERS
    value = _tensor(inputs[name], f"{where}.{name}", integers=integers).astype(np.float32)
    if value.shape != shape:
        raise RequestError(f"{where}.{name} has shape {list(value.shape)}, target_tokens has {list(shape)}")
    bad = np.argwhere(~np.isfinite(value))
    if bad.size:
        place = tuple(int(i) for i in bad[0])
        raise RequestError(f"{where}.{name}{list(place)} is {value[place]}: every value must be finite")
    return torch.from_numpy(value)


def _model_input(message: "pb.Datum", where: str) -> np.ndarray:
    parts: list[np.ndarray] = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise RequestError(f"{where}.model_input: only encoded_text chunks are served, no images or audio")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, f"{where}.model_input"))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _array(data: bytes, dtype: Any, where: str) -> np.ndarray:
    item = np.dtype(dtype).itemsize
    if len(data) % item:
        raise RequestError(f"{where}: {len(data)} bytes are no whole number of {item}-byte values")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)


def _tensor(message: "pb.Tensor", where: str, *, integers: bool) -> np.ndarray:
    kinds = _INTEGERS if integers else _FLOATS
    if message.dtype not in kinds:
        raise RequestError(
            f"{where} must hold {'int64' if integers else 'float32'} values, found dtype {message.dtype}"
        )
    dtype = kinds[message.dtype]
    shape = tuple(message.shape)
    if any(n < 0 for n in shape) or len(shape) > 2:
        raise RequestError(f"{where}: shape {list(shape)} is neither a vector's nor a matrix's")
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        values = _array(csr.values, dtype, where)
        rows = _array(csr.crow_indices, np.int64, f"{where}.crow_indices")
        columns = _array(csr.col_indices, np.int64, f"{where}.col_indices")
        return dense_rows(values, rows, columns, shape, 0, where).astype(np.int64 if integers else np.float32)
    values = _array(message.dense, dtype, where)
    shape = shape or (values.size,)
    if math.prod(shape) != values.size:
        raise RequestError(f"{where}: {values.size} values do not fill shape {list(shape)}")
    return values.reshape(shape).astype(np.int64 if integers else np.float32)


def encode_forward_backward(outcome: Outcome) -> bytes:
    """Logprobs per datum, one record for each run of datums whose last axis agrees, and the summed loss."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = outcome.loss
    start = 0
    while start < len(outcome.logprobs):
        trailing = list(outcome.logprobs[start].shape[1:])
        stop = start
        while stop < len(outcome.logprobs) and list(outcome.logprobs[stop].shape[1:]) == trailing:
            stop += 1
        arrays = [t.numpy().astype("<f4").tobytes() for t in outcome.logprobs[start:stop]]
        offsets = np.cumsum([0, *map(len, arrays)]).astype("<i8").tobytes()
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=stop - start)
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(data=b"".join(arrays), offsets=offsets, dtype=pb.DTYPE_FLOAT32, trailing_shape=trailing)
        )
        start = stop
    return message.SerializeToString()


def decode_adam(fields: Fields) -> AdamParams:
    """The adam_params of an optim_step; RequestError for another optimiser or a value out of range."""
    if fields.data.get("adam_params") is None:
        raise RequestError("optim_step: only adam_params are served (AdamW); found " + ", ".join(sorted(fields.data)))
    adam = fields.child("adam_params")
    huge = 1e30
    return AdamParams(
        learning_rate=adam.number("learning_rate", 1e-4, low=0, high=huge),
        beta1=adam.number("beta1", 0.9, low=0, high=1 - 1e-9),
        beta2=adam.number("beta2", 0.95, low=0, high=1 - 1e-9),
        eps=adam.number("eps", 1e-12, low=0, high=huge),
        weight_decay=adam.number("weight_decay", 0.0, low=0, high=huge),
        grad_clip_norm=adam.number("grad_clip_norm", 0.0, low=-huge, high=huge),
    )


def decode_lora(body: Fields, limits: Limits) -> LoraSpec:
    """The lora_config of a create_model, defaults filled in; RequestError where nothing would be trained."""
    config = body.child("lora_config") if body.data.get("lora_config") is not None else Fields({}, "body.lora_config")
    seed = config.optional_integer("seed", low=-(2**63), high=2**64 - 1)
    spec = LoraSpec(
        rank=config.integer("rank", 32, low=1, high=limits.lora_rank),
        seed=secrets.randbits(53) if seed is None else seed,  # written into JSON, whose integers end at 2**53
        attn=config.flag("train_attn", True),
        mlp=config.flag("train_mlp", True),
        unembed=config.flag("train_unembed", True),
    )
    if not (spec.attn or spec.mlp or spec.unembed):
        raise RequestError("lora_config: at least one of train_attn, train_mlp and train_unembed must be true")
    return spec


def check_optimizer(body: Fields) -> None:
    """RequestError for an optimizer_config that is not AdamW."""
    config = body.data.get("optimizer_config")
    if isinstance(config, dict) and config.get("type", "adamw") != "adamw":
        raise RequestError(f"optimizer {config.get('type')!r} is not served: only adamw is")
