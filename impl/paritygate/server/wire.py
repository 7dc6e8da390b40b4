"""The wire format of tinker 0.38.0: protobuf and JSON bodies to checked values, and results to protobuf."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from paritygate.server.engine import SampleResult
from paritygate.server.limits import Limits, RequestError, Shape
from paritygate.server.losses import LossInputs, find_loss
from paritygate.server.sampling import SamplingParams
from paritygate.server.scoring import Scoring
from paritygate.server.training import AdamParams, Datum, Outcome

EMPTY_TOKEN, EMPTY_LOGPROB = 0, -99999.0  # the SDK's marks of an empty top-k cell (types/topk_logprobs.py)
_FLOATS = {pb.DTYPE_FLOAT32: np.float32}
_INTEGERS = {pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


class Fields:
    """A JSON object read field by field; every complaint names the field."""

    def __init__(self, data: object, where: str = "body") -> None:
        if not isinstance(data, dict):
            raise RequestError(f"{where} must be a JSON object, found {type(data).__name__}", 422)
        self.data = cast(dict[str, object], data)
        self.where = where

    def text(self, name: str) -> str:
        value = self.data.get(name)
        if not isinstance(value, str) or not value:
            raise RequestError(f"{self.where}.{name} must be a non-empty string, found {value!r}", 422)
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self.data.get(name) is None else self.text(name)

    def integer(self, name: str, default: int | None = None, *, low: int, high: int = 2**63 - 1) -> int:
        value = self.data.get(name, default)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{self.where}.{name} must be an integer in [{low}, {high}], found {value!r}", 422)
        return value

    def optional_integer(self, name: str, *, low: int, high: int = 2**63 - 1) -> int | None:
        return None if self.data.get(name) is None else self.integer(name, low=low, high=high)

    def number(self, name: str, default: float, *, low: float, high: float = float("inf")) -> float:
        value = self.data.get(name, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise RequestError(f"{self.where}.{name} must be a number in [{low}, {high}], found {value!r}", 422)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise RequestError(f"{self.where}.{name} must be true or false, found {value!r}", 422)
        return value

    def object(self, name: str) -> "Fields":
        return Fields(self.data.get(name), f"{self.where}.{name}")

    def items(self, name: str) -> list[object]:
        value = self.data.get(name)
        if not isinstance(value, list):
            raise RequestError(f"{self.where}.{name} must be a list, found {type(value).__name__}", 422)
        return cast(list[object], value)


def check_tokens(tokens: np.ndarray, shape: Shape, where: str) -> list[int]:
    """Ids inside the vocabulary, at most a context of them; returns them as a list."""
    if tokens.size == 0:
        raise RequestError(f"{where}: no tokens")
    if tokens.size > shape.context:
        raise RequestError(f"{where}: {tokens.size} tokens, but the model's context is {shape.context}")
    bad = np.flatnonzero((tokens < 0) | (tokens >= shape.vocabulary))
    if bad.size:
        raise RequestError(
            f"{where}: token {int(tokens[bad[0]])} at position {int(bad[0])} is outside the vocabulary of {shape.vocabulary}"
        )
    return cast(list[int], tokens.tolist())


# ---------------------------------------------------------------------- forward_backward


def decode_forward_backward(
    body: bytes, shape: Shape, limits: Limits
) -> "tuple[pb.ForwardBackwardRequest, list[Datum]]":
    """Parse and check a ForwardBackwardRequest; RequestError names the datum and field at fault."""
    message = parse_forward_backward(body)
    if not 1 <= len(message.data) <= limits.datums_per_request:
        raise RequestError(f"data: {len(message.data)} datums; a request takes 1 to {limits.datums_per_request}")
    _, needed = find_loss(message.loss_fn, loss_config(message))
    return message, [_datum(d, needed, shape, f"data[{i}]") for i, d in enumerate(message.data)]


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
        raise RequestError(f"{where}: shape {list(shape)} is not one of a vector or a matrix")
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        values = _array(csr.values, dtype, where)
        rows = _array(csr.crow_indices, np.int64, f"{where}.crow_indices")
        columns = _array(csr.col_indices, np.int64, f"{where}.col_indices")
        return dense_rows(values, rows, columns, shape, 0, where).astype(np.int64 if integers else np.float32)
    values = _array(message.dense, dtype, where)
    shape = shape or (values.size,)
    if int(np.prod(shape)) != values.size:
        raise RequestError(f"{where}: {values.size} values do not fill shape {list(shape)}")
    return values.reshape(shape).astype(np.int64 if integers else np.float32)


def dense_rows(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, ...], fill: int, where: str
) -> np.ndarray:
    """Lay out a CSR matrix; RequestError where its indices do not describe one of that shape."""
    if len(shape) != 2 or shape[0] * shape[1] > 2**28:
        raise RequestError(f"{where}: sparse values need a two-axis shape of at most 2^28 cells, found {list(shape)}")
    good = (
        rows.size == shape[0] + 1
        and (rows.size == 0 or (rows[0] == 0 and rows[-1] == values.size))
        and bool((np.diff(rows) >= 0).all())
        and columns.size == values.size
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not good:
        raise RequestError(f"{where}: the sparse indices do not describe a matrix of shape {list(shape)}")
    out = np.full(shape, fill, values.dtype)
    out[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return out


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
    adam = fields.object("adam_params")
    huge = 1e30
    return AdamParams(
        learning_rate=adam.number("learning_rate", 1e-4, low=0, high=huge),
        beta1=adam.number("beta1", 0.9, low=0, high=1 - 1e-9),
        beta2=adam.number("beta2", 0.95, low=0, high=1 - 1e-9),
        eps=adam.number("eps", 1e-12, low=0, high=huge),
        weight_decay=adam.number("weight_decay", 0.0, low=0, high=huge),
        grad_clip_norm=adam.number("grad_clip_norm", 0.0, low=-huge, high=huge),
    )


# ---------------------------------------------------------------------- sampling


def decode_prompt(fields: Fields, shape: Shape) -> list[int]:
    """The prompt's ids from its encoded_text chunks."""
    tokens: list[object] = []
    for index, chunk in enumerate(fields.object("prompt").items("chunks")):
        part = Fields(chunk, f"body.prompt.chunks[{index}]")
        if part.data.get("type", "encoded_text") != "encoded_text":
            raise RequestError(f"{part.where}: only encoded_text chunks are served, found {part.data.get('type')!r}")
        tokens.extend(part.items("tokens"))
    bad = next((i for i, t in enumerate(tokens) if type(t) is not int or not -(2**31) <= t < 2**31), None)
    if bad is not None:
        raise RequestError(f"body.prompt: token {bad} is {tokens[bad]!r}, not a token id", 422)
    return check_tokens(np.asarray(tokens, dtype=np.int64), shape, "prompt")


def decode_sampling_params(fields: Fields, prompt: list[int], shape: Shape, seed: int) -> SamplingParams:
    """Sampling parameters with defaults filled in; `seed` is used where the request names none."""
    params = fields.object("sampling_params")
    room = shape.context - len(prompt)
    asked = params.optional_integer("max_tokens", low=1)
    # A scoring request is one token past its prompt, and a prompt may fill the context.
    if asked is not None and asked > max(room, 1):
        raise RequestError(
            f"prompt of {len(prompt)} tokens + max_tokens {asked} is over the model's context of {shape.context}"
        )
    chosen = params.optional_integer("seed", low=-(2**63), high=2**64 - 1)
    stop_tokens, stop_strings = _stops(params, shape)
    return SamplingParams(
        max_tokens=asked if asked is not None else max(room, 1),
        seed=seed if chosen is None else chosen,
        temperature=params.number("temperature", 1.0, low=0, high=1e6),
        top_k=params.integer("top_k", -1, low=-1),
        top_p=params.number("top_p", 1.0, low=1e-9, high=1.0),
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
    )


def _stops(params: Fields, shape: Shape) -> tuple[frozenset[int], tuple[str, ...]]:
    """None keeps the model's end tokens; ids replace them; strings come on top of them; [] stops at nothing."""
    stop = params.data.get("stop")
    if stop is None:
        return shape.end_tokens, ()
    items = [stop] if isinstance(stop, str) else stop
    if not isinstance(items, list):
        raise RequestError("body.sampling_params.stop must be null, a string, or a list of strings or of ids", 422)
    values = cast(list[object], items)
    if all(type(item) is int for item in values):
        return frozenset(cast(list[int], values)), ()
    if all(isinstance(item, str) and item for item in values):
        return shape.end_tokens, tuple(cast(list[str], values))
    raise RequestError("body.sampling_params.stop must be null, a string, or a list of strings or of ids", 422)


def decode_scoring(fields: Fields, prompt: list[int], params: SamplingParams, limits: Limits) -> Scoring | None:
    """What the request wants scored, None for nothing."""
    own = fields.flag("prompt_logprobs", False)
    top_k = fields.integer("topk_prompt_logprobs", 0, low=0, high=limits.top_logprobs)
    alternatives = fields.integer("prompt_alt_tokens_k", 0, low=0, high=limits.top_logprobs)
    last_n = fields.optional_integer("prompt_logprobs_last_n", low=1)
    if last_n is not None and not own:
        raise RequestError("prompt_logprobs_last_n needs prompt_logprobs")
    if last_n is not None and last_n > len(prompt) - 1:
        raise RequestError(f"prompt_logprobs_last_n {last_n} is over len(prompt) - 1 = {len(prompt) - 1}")
    targets = _targets(fields, prompt, limits)
    if not (own or top_k or alternatives or targets is not None):
        return None
    return Scoring(
        own=own,
        first=1 if last_n is None else len(prompt) - last_n,
        top_k=top_k,
        targets=targets,
        alternatives=alternatives,
        temperature=params.temperature,
        seed=params.seed,
    )


def _targets(fields: Fields, prompt: list[int], limits: Limits) -> tuple[tuple[int, ...], ...] | None:
    if fields.data.get("target_prompt_logprobs") is None:
        return None
    matrix = decode_targets(fields.object("target_prompt_logprobs"), len(prompt) - 1)
    if matrix.size > limits.scored_cells:
        raise RequestError(f"target_prompt_logprobs has {matrix.size} cells; at most {limits.scored_cells} are scored")
    if not bool((matrix >= 0).any()):
        raise RequestError("target_prompt_logprobs names no token id (every cell is -1)")
    return tuple(tuple(int(t) for t in row if t >= 0) for row in matrix)


def decode_targets(tensor: Fields, rows: int) -> np.ndarray:
    """The [len(prompt) - 1, K] ids of target_prompt_logprobs, -1 where nothing is asked."""
    values = tensor.items("data")
    shape = tuple(cast(list[int], tensor.items("shape")))
    if len(shape) != 2 or any(type(n) is not int or n < 0 for n in shape) or shape[0] != rows:
        raise RequestError(f"target_prompt_logprobs must have shape [{rows}, K], found {list(shape)}")
    if any(type(v) is not int or not -1 <= v < 2**31 for v in values):
        raise RequestError("target_prompt_logprobs must hold token ids, and -1 where nothing is asked")
    ids = np.asarray(values, dtype=np.int64)
    if tensor.data.get("sparse_crow_indices") is not None:
        rows_, columns = (np.asarray(tensor.items(f"sparse_{n}_indices"), dtype=np.int64) for n in ("crow", "col"))
        return dense_rows(ids, rows_, columns, shape, -1, "target_prompt_logprobs")
    if ids.size != shape[0] * shape[1]:
        raise RequestError(f"target_prompt_logprobs: {ids.size} values do not fill shape {list(shape)}")
    return ids.reshape(shape)


def check_targets(scoring: Scoring | None, shape: Shape) -> None:
    """RequestError if an id asked for is outside the vocabulary."""
    for row, ids in enumerate((scoring.targets if scoring else None) or ()):
        for token in ids:
            if token >= shape.vocabulary:
                raise RequestError(
                    f"target_prompt_logprobs[{row}]: token {token} is outside the vocabulary of {shape.vocabulary}"
                )


def encode_sample(result: SampleResult, prompt: list[int], body: Fields) -> bytes:
    """The protobuf SampleResponse: little-endian int32 and float32, NaN where a prompt token has no logprob."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=min(result.cached_tokens, len(prompt)))
    for sample in result.samples:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.stopped else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sample.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(sample.logprobs, dtype="<f4").tobytes(),
        )
        if sample.top:
            sequence.topk_sampled_logprobs.CopyFrom(_topk(list(sample.top)))
    scores = result.scores
    if scores is None:
        return message.SerializeToString()
    if body.data.get("prompt_logprobs"):
        own = [np.nan if value is None else value for value in scores.own]
        message.prompt_logprobs = np.asarray(own, dtype="<f4").tobytes()
    if body.data.get("topk_prompt_logprobs"):
        message.topk_prompt_logprobs.CopyFrom(_topk(scores.top))
    if body.data.get("target_prompt_logprobs") is not None:
        message.target_prompt_logprobs.CopyFrom(_scored(scores.targets, body.object("target_prompt_logprobs"), prompt))
    if body.data.get("prompt_alt_tokens_k"):
        shape = [len(prompt) - 1, len(scores.alternatives[0][0])] if scores.alternatives else [0, 0]
        ids = np.asarray([ids for ids, _ in scores.alternatives], dtype="<i4")
        values = np.asarray([values for _, values in scores.alternatives], dtype="<f4")
        message.prompt_alt_tokens.tokens.CopyFrom(pb.Tensor(dense=ids.tobytes(), dtype=pb.DTYPE_INT32, shape=shape))
        message.prompt_alt_tokens.logprobs.CopyFrom(
            pb.Tensor(dense=values.tobytes(), dtype=pb.DTYPE_FLOAT32, shape=shape)
        )
    return message.SerializeToString()


def _topk(rows: list[tuple[list[int], list[float]] | None]) -> "pb.TopkLogprobs":
    k = max((len(row[0]) for row in rows if row), default=0)
    ids = np.full((len(rows), k), EMPTY_TOKEN, "<i4")
    values = np.full((len(rows), k), EMPTY_LOGPROB, "<f4")
    for index, row in enumerate(rows):
        if row:
            ids[index, : len(row[0])], values[index, : len(row[1])] = row
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=k, length=len(rows))


def _scored(targets: list[list[float]], asked: Fields, prompt: list[int]) -> "pb.Tensor":
    """Scores in the request's own shape and layout, 0.0 where it had -1."""
    ids = decode_targets(asked, len(prompt) - 1)
    out = np.zeros(ids.shape, "<f4")
    for row, values in enumerate(targets):
        if values:
            out[row, ids[row] >= 0] = values
    message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=list(ids.shape))
    if asked.data.get("sparse_crow_indices") is None:
        message.dense = out.tobytes()
        return message
    crow = np.asarray(asked.items("sparse_crow_indices"), dtype="<i8")
    col = np.asarray(asked.items("sparse_col_indices"), dtype="<i8")
    rows = np.repeat(np.arange(ids.shape[0]), np.diff(crow))
    message.sparse_csr.values = out[rows, col].tobytes()
    message.sparse_csr.crow_indices = crow.tobytes()
    message.sparse_csr.col_indices = col.tobytes()
    return message
