"""What a sampled turn asks for: text for the user, or tool calls, each well formed or with the reason why it is not."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from renderers.base import ParsedToolCall, Renderer, ToolCallParseStatus

from paritygate.agent.conversation import visible
from paritygate.agent.renderer import read_completion

MALFORMED = "Error: the tool call"  # how the answer to a call that is none begins
MAX_DEPTH = 64  # of arguments; tools take two levels, and whoever writes a deep value needs a stack as deep
_REASONS = {
    ToolCallParseStatus.INVALID_JSON: "it is not valid JSON",
    ToolCallParseStatus.UNCLOSED_BLOCK: "it is not closed",
    ToolCallParseStatus.MISSING_NAME: "it names no tool",
    ToolCallParseStatus.MALFORMED_STRUCTURE: "it does not have the form of a call",
}


@dataclass(frozen=True)
class Call:
    """One attempt at a tool call: name and arguments, or `error`, what is told to the model instead of a result."""

    name: str
    arguments: Any
    error: str | None = None


@dataclass(frozen=True)
class Turn:
    """A sampled turn: its visible text, and its tool calls in order; with calls, the text is kept and not sent."""

    text: str
    calls: tuple[Call, ...]


def read_turn(renderer: Renderer, tokens: Sequence[int], prompt: Sequence[int], tools: Any) -> Turn:
    """Parse sampled tokens; whatever they are, there is no exception: what cannot be parsed is a malformed call."""
    completion = read_completion(renderer, tokens, prompt, tools)
    if completion.error is not None:
        return Turn("", (Call("", "", f"{MALFORMED} cannot be read ({completion.error})."),))
    return Turn(visible(completion.content), tuple(_call(call) for call in completion.calls))


def _call(parsed: ParsedToolCall) -> Call:
    name = parsed.name if isinstance(parsed.name, str) else ""
    reason = _REASONS.get(parsed.status)
    arguments: Any = {} if parsed.arguments is None else parsed.arguments
    if reason is None and not name:
        reason = _REASONS[ToolCallParseStatus.MISSING_NAME]
    if reason is None and not isinstance(arguments, dict):
        reason = "its arguments are no JSON object"
    if reason is None and not _is_json(arguments):
        reason = "its arguments are not valid JSON"
    if reason is not None:
        return Call(name, parsed.raw, f"{MALFORMED} was not run, since {reason}.")
    return Call(name, arguments)


def _is_json(value: Any) -> bool:
    """Whether a parsed value is JSON text again, wherever it is written: finite, no lone surrogates, MAX_DEPTH kept."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for part in level if isinstance(part, dict | list) for item in children(part)]
    if level:
        return False
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError, TypeError):
        return False
    return True


def children(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    """The values of an object, the items of a list."""
    return value.values() if isinstance(value, dict) else value
