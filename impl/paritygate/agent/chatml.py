"""ChatML with tool calls as text, for models whose template has none: SmolLM2 and the tiny model."""

import json
import re
from collections.abc import Sequence
from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus

Message = dict[str, Any]

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_THINKING = re.compile(r"\A\s*<think>(.*?)(</think>|\Z)", re.DOTALL)


class ChatMLRenderer:
    """A renderer of the `renderers` interface: `<|im_start|>role\\n...<|im_end|>\\n`, calls in `<tool_call>` JSON.

    A header, a body and an end are encoded apart, so the tokens of a prefix never depend on what follows and bridging
    is exact by construction. `tools` are written as JSON lines after the system message's text.
    """

    is_prefix_stable = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = (int(tokenizer.convert_tokens_to_ids(t)) for t in ("<|im_start|>", "<|im_end|>"))
        self._newline: list[int] = tokenizer.encode("\n", add_special_tokens=False)
        self._stops = [self._end]
        eos = tokenizer.eos_token_id
        if eos is not None and eos not in self._stops:
            self._stops.append(int(eos))

    def render(
        self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Tokens of a whole conversation, each with its message and whether a model would have sampled it."""
        out = RenderedTokens(message_roles=[m["role"] for m in messages])
        if tools:
            first = messages[0] if messages and messages[0]["role"] == "system" else None
            system = {"role": "system", "content": _with_tools(first["content"] if first else "", tools)}
            self._emit(out, 0 if first else -1, system)
        for index, message in enumerate(messages):
            if not (tools and index == 0 and message["role"] == "system"):
                self._emit(out, index, message)
        if add_generation_prompt:
            self._add(out, self._header("assistant"), -1, sampled=False)
        return out

    def render_ids(
        self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """`render` without the attribution."""
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Any = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        """Text, thinking and tool calls of sampled tokens; a call that is no call keeps its place with its status."""
        del tools, prompt_ids
        ids = list(token_ids)
        stop = next((i for i, token in enumerate(ids) if token in self._stops), len(ids))
        text = self._tokenizer.decode(ids[:stop], skip_special_tokens=False)
        reasoning = None
        thinking = _THINKING.match(text)
        if thinking is not None:
            reasoning, text = thinking.group(1), text[thinking.end() :]
        calls = [_parsed(match.group(1), closed=bool(match.group(2))) for match in _CALL.finditer(text)]
        content = text[: text.find("<tool_call>")] if calls else text
        complete = thinking is None or bool(thinking.group(2))
        return ParsedResponse(content.strip(), reasoning, calls, complete)

    def get_stop_token_ids(self) -> list[int]:
        """The end of a message, and the tokenizer's own end token where that is another."""
        return list(self._stops)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Any = None,
    ) -> RenderedTokens | None:
        """The previous tokens verbatim, closed if they were cut, then the new messages and the next turn's header."""
        del tools
        if not previous_prompt_ids or not new_messages or any(m["role"] == "assistant" for m in new_messages):
            return None
        out = RenderedTokens(message_roles=[m["role"] for m in new_messages])
        self._add(out, [*previous_prompt_ids, *previous_completion_ids], -1, sampled=False)
        if not previous_completion_ids or previous_completion_ids[-1] not in self._stops:
            self._add(out, [self._end], -1, sampled=False)
        self._add(out, self._newline, -1, sampled=False)
        for index, message in enumerate(new_messages):
            self._emit(out, index, message)
        self._add(out, self._header("assistant"), -1, sampled=False)
        return out

    def _emit(self, out: RenderedTokens, index: int, message: Message) -> None:
        sampled = message["role"] == "assistant"
        self._add(out, self._header(message["role"]), index, sampled=False)
        body = _body(message)
        self._add(out, self._tokenizer.encode(body, add_special_tokens=False) if body else [], index, sampled=sampled)
        self._add(out, [self._end], index, sampled=sampled)
        self._add(out, self._newline, index, sampled=False)

    def _header(self, role: str) -> list[int]:
        return [self._start, *self._tokenizer.encode(role, add_special_tokens=False), *self._newline]

    @staticmethod
    def _add(out: RenderedTokens, ids: list[int], index: int, *, sampled: bool) -> None:
        out.token_ids.extend(ids)
        out.message_indices.extend([index] * len(ids))
        out.sampled_mask.extend([sampled] * len(ids))


def _with_tools(content: str, tools: Any) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = '<tool_call>{"name": <name>, "arguments": <object>}</tool_call>'
    return f"{content}\n\nTools, called as {form}:\n{lines}".lstrip()


def _body(message: Message) -> str:
    calls = [
        "<tool_call>"
        + json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        + "</tool_call>"
        for call in message.get("tool_calls") or []
    ]
    return "\n".join(filter(None, [message["content"], *calls]))


def _parsed(raw: str, *, closed: bool) -> ParsedToolCall:
    if not closed:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        call: Any = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MISSING_NAME)
    if not isinstance(call.get("arguments", {}), dict):
        return ParsedToolCall(raw=raw, name=call["name"], status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    return ParsedToolCall(raw=raw, name=call["name"], arguments=call.get("arguments", {}))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
