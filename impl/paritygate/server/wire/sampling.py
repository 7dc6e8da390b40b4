"""asample on the wire of tinker 0.38.0: a JSON body in, checked values out, and the protobuf SampleResponse."""

from typing import cast

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from paritygate.server.engine.jobs import SampleResult
from paritygate.server.engine.sampling import SamplingParams
from paritygate.server.engine.scoring import Scoring
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model.shape import Shape
from paritygate.server.wire.fields import Fields, check_tokens, dense_rows

EMPTY_TOKEN, EMPTY_LOGPROB = 0, -99999.0  # the SDK's marks of an empty top-k cell (types/topk_logprobs.py)


def decode_prompt(fields: Fields, shape: Shape) -> list[int]:
    """The prompt's ids from its encoded_text chunks."""
    tokens: list[object] = []
    for index, chunk in enumerate(fields.child("prompt").items("chunks")):
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
    params = fields.child("sampling_params")
    available = shape.context - len(prompt)
    max_tokens = params.optional_integer("max_tokens", low=1)
    # A scoring request is one token past its prompt, and a prompt may fill the context.
    if max_tokens is not None and max_tokens > max(available, 1):
        raise RequestError(
            f"prompt of {len(prompt)} tokens + max_tokens {max_tokens} is over the model's context of {shape.context}"
        )
    chosen = params.optional_integer("seed", low=-(2**63), high=2**64 - 1)
    stop_tokens, stop_strings = _stops(params, shape)
    return SamplingParams(
        max_tokens=max_tokens if max_tokens is not None else max(available, 1),
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
    prompt_logprobs = fields.flag("prompt_logprobs", False)
    top_k = fields.integer("topk_prompt_logprobs", 0, low=0, high=limits.top_logprobs)
    alternatives = fields.integer("prompt_alt_tokens_k", 0, low=0, high=limits.top_logprobs)
    last_n = fields.optional_integer("prompt_logprobs_last_n", low=1)
    if last_n is not None and not prompt_logprobs:
        raise RequestError("prompt_logprobs_last_n needs prompt_logprobs")
    if last_n is not None and last_n > len(prompt) - 1:
        raise RequestError(f"prompt_logprobs_last_n {last_n} is over len(prompt) - 1 = {len(prompt) - 1}")
    targets = _targets(fields, prompt, limits)
    if not (prompt_logprobs or top_k or alternatives or targets is not None):
        return None
    return Scoring(
        prompt_logprobs=prompt_logprobs,
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
    matrix = decode_targets(fields.child("target_prompt_logprobs"), len(prompt) - 1)
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
        prompt_logprobs = [np.nan if value is None else value for value in scores.prompt_logprobs]
        message.prompt_logprobs = np.asarray(prompt_logprobs, dtype="<f4").tobytes()
    if body.data.get("topk_prompt_logprobs"):
        message.topk_prompt_logprobs.CopyFrom(_topk(scores.top))
    if body.data.get("target_prompt_logprobs") is not None:
        message.target_prompt_logprobs.CopyFrom(_scored(scores.targets, body.child("target_prompt_logprobs"), prompt))
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


def _scored(targets: list[list[float]], request: Fields, prompt: list[int]) -> "pb.Tensor":
    """Scores in the request's own shape and layout, 0.0 where it had -1."""
    ids = decode_targets(request, len(prompt) - 1)
    out = np.zeros(ids.shape, "<f4")
    for row, values in enumerate(targets):
        if values:
            out[row, ids[row] >= 0] = values
    message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=list(ids.shape))
    if request.data.get("sparse_crow_indices") is None:
        message.dense = out.tobytes()
        return message
    crow = np.asarray(request.items("sparse_crow_indices"), dtype="<i8")
    col = np.asarray(request.items("sparse_col_indices"), dtype="<i8")
    rows = np.repeat(np.arange(ids.shape[0]), np.diff(crow))
    message.sparse_csr.values = out[rows, col].tobytes()
    message.sparse_csr.crow_indices = crow.tobytes()
    message.sparse_csr.col_indices = col.tobytes()
    return message
