"""A conversation as plain data: messages, what of them is visible, and how they read as text."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]  # role and content; tool_calls of an assistant; tool_call_id and name of a tool

_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)
_THINKING_END = re.compile(r"\A.*</think>", re.DOTALL | re.IGNORECASE)


def visible(text: str) -> str:
    """The text without any thinking: closed blocks, an unclosed one to the end, and all before a stray end tag."""
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
    """A conversation as text, one block a message: for the judge and a teacher's context."""
    return "\n\n".join(_block(message) for message in messages)


def _block(message: Mapping[str, Any]) -> str:
    role, content = message["role"], message["content"]
    if role == "tool":
        return f"Result of {message.get('name') or 'the tool call'}: {content}"
    if role != "assistant":
        return f"{role.capitalize()}: {content}"
    parts = [f"Assistant: {content}"] if content or not message.get("tool_calls") else []
    for name, arguments in calls_of(message):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f"Tool call: {name} {text}" if name else f"Malformed tool call: {text}")
    return "\n".join(parts)
