"""OpenAI's completions and chat completions: JSON bodies in, sample requests out, and results back as JSON."""

import time
import uuid
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from paritygate.server.engine.jobs import Sampled, SampleResult
from paritygate.server.engine.sampling import SamplingParams
from paritygate.server.engine.scoring import Scoring
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model.shape import Shape
from paritygate.server.wire.fields import Fields, check_tokens

SAMPLING = {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop"}
SERVED = SAMPLING | {"model", "prompt", "messages", "logprobs", "top_logprobs", "echo"}
WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "stream_options",
}
# What a client may send as long as it asks for nothing by it.
DEFAULTS: dict[str, tuple[object, ...]] = {
    "stream": (False,), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "suffix": ("",),
    "response_format": ({"type": "text"},), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
    "repetition_penalty": (1,), "min_p": (0,), "best_of": (1,), "parallel_tool_calls": (True, False),
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One prompt's sample request. `top_k` likeliest tokens come with each logprob; `echo` returns the prompt too."""

    prompt: list[int]
    params: SamplingParams
    number: int
    logprobs: bool
    top_k: int
    echo: bool
    generated: bool = True

    @property
    def scoring(self) -> Scoring | None:
        """What of the prompt is scored: everything where it is echoed with logprobs."""
        scored = self.echo and self.logprobs and len(self.prompt) > 1
        return Scoring(prompt_logprobs=True, first=1, top_k=self.top_k) if scored else None


def check_parameters(body: Fields) -> None:
    """RequestError for a parameter that is unknown, or that asks for what is not served."""
    for name, value in body.data.items():
        if value is None or name in SERVED or name in WITHOUT_EFFECT or value in DEFAULTS.get(name, ()):
            continue
        what = f"{name}={str(value)[:60]!r} is not served" if name in DEFAULTS else f"there is no parameter {name!r}"
        raise RequestError(f"{what}; this server takes {', '.join(sorted(SERVED))}")


def decode_completion(body: Fields, tokenizer: Any, shape: Shape, limits: Limits, seed: int) -> list[Request]:
    """The requests of /completions: a prompt is text or token ids, or a list of either."""
    check_parameters(body)
    prompts = _prompts(body.data.get("prompt"), tokenizer)
    logprobs = body.optional_integer("logprobs", low=0, high=limits.top_logprobs)
    echo = body.flag("echo", False)
    max_tokens = body.integer("max_tokens", 16, low=0 if echo else 1)
    return _requests(
        body, prompts, tokenizer, shape, limits, seed, logprobs is not None, logprobs or 0, echo, max_tokens
    )


def decode_chat(body: Fields, tokenizer: Any, shape: Shape, limits: Limits, seed: int) -> list[Request]:
    """The request of /chat/completions, its messages rendered by the tokenizer's chat template."""
    check_parameters(body)
    messages = body.items("messages")
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("this model has no chat template; send token ids or text to /completions")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # the template is a program of the model's, and the messages are anybody's
        raise RequestError(f"messages cannot be rendered by the model's chat template ({error})") from error
    prompt = tokenizer.encode(text, add_special_tokens=False)
    logprobs = body.flag("logprobs", False)
    top_k = body.integer("top_logprobs", 0, low=0, high=limits.top_logprobs)
    if top_k and not logprobs:
        raise RequestError("top_logprobs needs logprobs=true")
    name = "max_tokens" if body.data.get("max_completion_tokens") is None else "max_completion_tokens"
    max_tokens = body.optional_integer(name, low=1)
    return _requests(body, [prompt], tokenizer, shape, limits, seed, logprobs, top_k, False, max_tokens)


def _prompts(value: object, tokenizer: Any) -> list[list[int]]:
    items = cast(list[object], value) if isinstance(value, list) and value else [value or None]
    if all(type(item) is int for item in items):
        items = [items]
    prompts: list[list[int]] = []
    for item in items:
        if isinstance(item, str) and tokenizer is not None:
            prompts.append(tokenizer.encode(item))
        elif isinstance(item, list) and all(type(token) is int for token in cast(list[object], item)):
            prompts.append(cast(list[int], item))
        else:
            raise RequestError(
                "prompt must be text or a list of token ids, or a list of either; text needs a tokenizer"
            )
    return prompts


def _requests(
    body: Fields, prompts: list[list[int]], tokenizer: Any, shape: Shape, limits: Limits, seed: int,
    logprobs: bool, top_k: int, echo: bool, max_tokens: int | None,
) -> list[Request]:  # fmt: skip
    number = body.integer("n", 1, low=1, high=limits.samples_per_request)
    if not 1 <= len(prompts) * number <= limits.samples_per_request:
        raise RequestError(
            f"{len(prompts)} prompts, {number} samples each; a request takes 1 to {limits.samples_per_request}"
        )
    stop_tokens, stop_strings = _stops(body, tokenizer, shape)
    asked = body.optional_integer("seed", low=-(2**63), high=2**64 - 1)
    requests: list[Request] = []
    for index, ids in enumerate(prompts):
        prompt = check_tokens(np.asarray(ids, dtype=np.int64), shape, f"prompt {index}")
        available = max(shape.context - len(prompt), 1)
        if max_tokens is not None and max_tokens > available:
            raise RequestError(
                f"prompt of {len(prompt)} tokens + max_tokens {max_tokens} is over the context of {shape.context}"
            )
        params = SamplingParams(
            max_tokens=max(1, available if max_tokens is None else max_tokens),
            seed=(seed if asked is None else asked) + index,
            temperature=body.number("temperature", 1.0, low=0, high=1e6),
            top_k=body.integer("top_k", -1, low=-1),
            top_p=body.number("top_p", 1.0, low=1e-9, high=1.0),
            stop_tokens=stop_tokens,
            stop_strings=stop_strings,
        )
        requests.append(Request(prompt, params, number, logprobs, top_k, echo, max_tokens != 0))
    return requests


def _stops(body: Fields, tokenizer: Any, shape: Shape) -> tuple[frozenset[int], tuple[str, ...]]:
    stop = body.data.get("stop")
    items = cast(list[object], stop) if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(isinstance(item, str) and item for item in items):
        raise RequestError("stop must be a string or a list of strings", 422)
    if items and tokenizer is None:
        raise RequestError("this model has no tokenizer, so there is no text to stop at")
    return shape.end_tokens, tuple(cast(list[str], items))


def encode(
    model: str, requests: Seq[Request], results: Seq[SampleResult], tokenizer: Any, *, chat: bool
) -> dict[str, Any]:
    """The answer: a choice for each sample, token ids beside its text."""
    choices: list[dict[str, Any]] = []
    generated = 0
    for request, result in zip(requests, results, strict=True):
        for sample in result.samples:
            tokens, text = _generated(request, sample, tokenizer) if request.generated else ([], "")
            generated += len(tokens)
            choice: dict[str, Any] = {
                "index": len(choices),
                "finish_reason": "stop" if sample.stopped and request.generated else "length",
                "token_ids": tokens,
                "logprobs": None,
            }
            rows = _rows(request, result, sample, len(tokens), tokenizer)
            if chat:
                choice["message"] = {"role": "assistant", "content": text}
                if request.logprobs:
                    choice["logprobs"] = {"content": [_chat_row(*row) for row in rows]}
            else:
                choice["text"] = (_decode(tokenizer, request.prompt) if request.echo else "") + text
                if request.logprobs:
                    choice["logprobs"] = _completion_rows(rows, bool(request.top_k))
            choices.append(choice)
    prompts = sum(len(request.prompt) for request in requests)
    usage = {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}
    kind, name = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
    answer = {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
    return {**answer, "choices": choices, "usage": usage}


Row = tuple[str, float | None, list[tuple[str, float]]]  # a token's text, its logprob, the likeliest ones


def _generated(request: Request, sample: Sampled, tokenizer: Any) -> tuple[list[int], str]:
    """Tokens and text before the stop, as OpenAI has it: the end token, or the stop string, is left out."""
    tokens = list(sample.tokens)
    if sample.stopped and tokens and tokens[-1] in request.params.stop_tokens:
        tokens.pop()
    text = _decode(tokenizer, tokens)
    ends = [place for stop in request.params.stop_strings if (place := text.find(stop)) >= 0]
    return tokens, text[: min(ends)] if ends else text


def _rows(request: Request, result: SampleResult, sample: Sampled, count: int, tokenizer: Any) -> list[Row]:
    rows: list[Row] = []
    if request.echo:
        scores = result.scores
        for index, token in enumerate(request.prompt):
            logprob = None if scores is None else scores.prompt_logprobs[index]
            top = None if scores is None else scores.top[index]
            rows.append((_token(tokenizer, token), logprob, [] if top is None else _named(tokenizer, *top)))
    for index in range(count):
        top = sample.top[index] if sample.top else ([], [])
        rows.append((_token(tokenizer, sample.tokens[index]), sample.logprobs[index], _named(tokenizer, *top)))
    return rows


def _completion_rows(rows: list[Row], top: bool) -> dict[str, Any]:
    offsets, length = [], 0
    for text, _, _ in rows:
        offsets.append(length)
        length += len(text)
    return {
        "tokens": [text for text, _, _ in rows],
        "token_logprobs": [logprob for _, logprob, _ in rows],
        "top_logprobs": [dict(likeliest) if logprob is not None else None for _, logprob, likeliest in rows]
        if top
        else None,
        "text_offset": offsets,
    }


def _chat_row(text: str, logprob: float | None, likeliest: list[tuple[str, float]]) -> dict[str, Any]:
    def entry(text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {**entry(text, logprob), "top_logprobs": [entry(*item) for item in likeliest]}


def _named(tokenizer: Any, ids: list[int], logprobs: list[float]) -> list[tuple[str, float]]:
    return [(_token(tokenizer, token), logprob) for token, logprob in zip(ids, logprobs, strict=True)]


def _token(tokenizer: Any, token: int) -> str:
    """A token's text; where it is part of a character, or there is no tokenizer, its id."""
    text = "" if tokenizer is None else tokenizer.decode([token])
    return f"token_id:{token}" if not text or "\ufffd" in text else text


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
