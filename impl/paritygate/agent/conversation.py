"""A conversation as plain data: messages, what of them is visible, and how they read as text."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]  # role and content; tool_calls of an assistant; tool_call_id and name of a tool

_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)
_THINKING_END = re.compile(r"\A.*</think>", re.DOTALL | re.IGNORECASE)


def visible(text: str) -> str:
    """What is said of a text: without closed thoughts, an unclosed one to the end, and all before a stray end tag.

    For words that somebody will hear, where a thought too many does harm. Not for JSON, in whose strings a tag is text:
    `renderer.read_completion` tells a thought from it.
    """
    return _THINKING_END.sub("", _THINKING.sub("", text)).strip()


def assistant(content: str, calls: Sequence[tuple[str, Any]] = (), *, turn: int = 0) -> Message:
    """An assistant message; `calls` are (tool name, arguments), arguments as parsed, or raw text."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": call_id(turn, index), "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def tool(name: str, observation: str, *, turn: int = 0, index: int = 0) -> Message:
    """The message that carries the result of a tool call."""
    return {"role": "tool", "tool_call_id": call_id(turn, index), "name": name, "content": observation}


def user(content: str) -> Message:
    """What the user said."""
    return {"role": "user", "content": content}


def call_id(turn: int, index: int) -> str:
    """The id that ties a tool call to its result."""
    return f"call_{turn}_{index}"


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The (name, arguments) of an assistant message's tool calls, in order."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


def transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as text, one block a message: for the judge and a teacher's context.

    Each block begins at the left margin with who speaks; every further line of what was said is indented. So nothing
    that a message holds, whatever line breaks it uses, reads like the beginning of another message.
    """
    return "\n\n".join(_block(message) for message in messages)


# Every character that str.splitlines, and so a reader, may take for the end of a line.
_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")


def _indented(text: str) -> str:
    return _LINE_END.sub(lambda end: end.group() + "  ", text)


def _block(message: Mapping[str, Any]) -> str:
    role, content = message["role"], message["content"]
    if role == "tool":
        return _indented(f"Result of {message.get('name') or 'the tool call'}: {content}")
    if role != "assistant":
        return _indented(f"{role.capitalize()}: {content}")
    parts = [f"Assistant: {content}"] if content or not message.get("tool_calls") else []
    for name, arguments in calls_of(message):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f"Tool call: {name} {text}" if name else f"Malformed tool call: {text}")
    return "\n".join(_indented(part) for part in parts)
