"""What the agent is told first: the whole policy and every schema, or a compact form by a stated rule."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from paritygate.retail.tools import WRITE_TOOLS

COMPACT_RULE = (
    "Compact context: of the policy, what the agent does and the rules on identity and invention, in short; of the "
    "tools those that change something and the transfer, one line each, name and argument names, without descriptions "
    "(the others still work when called); tool results are cut after 160 characters. The same text for all tasks."
)
COMPACT_OBSERVATION = 160
COMPACT_TOOLS = (*WRITE_TOOLS, "transfer_to_human_agents")
COMPACT_POLICY = (
    "You are a retail agent. You cancel or modify pending orders, and return or exchange delivered orders. "
    "Act only for the customer who wrote, only on what was asked. Do not make up facts. Call one tool at a time, as "
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call>. When it is done, tell the customer.'
)


@dataclasses.dataclass(frozen=True)
class Context:
    """The agent's prompt: system text, the tool schemas, whether the renderer writes them, and how results are cut.

    tools: OpenAI function schemas. rendered_tools: those that the renderer writes (None: they are in `system` already).
    observation_limit: characters kept of a tool's result, None for all of it. rule: what was abridged, for the report.
    """

    kind: Literal["full", "compact"]
    system: str
    tools: tuple[dict[str, Any], ...]
    observation_limit: int | None = None
    rule: str = ""

    @property
    def rendered_tools(self) -> list[dict[str, Any]] | None:
        """The schemas for the renderer's own tools block, or None when the system text lists the tools."""
        return list(self.tools) if self.kind == "full" else None

    def observed(self, observation: str) -> str:
        """A tool's result as the agent gets to see it."""
        limit = self.observation_limit
        return observation if limit is None or len(observation) <= limit else observation[:limit] + " ..."


def full(wiki: str, tools: Sequence[dict[str, Any]]) -> Context:
    """The policy word for word and every schema, as the benchmark gives them."""
    return Context("full", wiki, tuple(tools))


def compact(tools: Sequence[dict[str, Any]]) -> Context:
    """About 260 tokens for SmolLM2 before the conversation, calls in ChatML's form; `COMPACT_RULE` is what was cut."""
    lines = [signature(tool) for tool in tools if tool_name(tool) in COMPACT_TOOLS]
    system = COMPACT_POLICY + "\nTools:\n" + "\n".join(lines)
    return Context("compact", system, tuple(tools), COMPACT_OBSERVATION, COMPACT_RULE)


def context(kind: Literal["full", "compact"], wiki: str, tools: Sequence[dict[str, Any]]) -> Context:
    """`full` or `compact`."""
    return full(wiki, tools) if kind == "full" else compact(tools)


def tool_name(tool: dict[str, Any]) -> str:
    """The name of a tool in either of the two schema forms."""
    return tool.get("function", tool)["name"]


def signature(tool: dict[str, Any]) -> str:
    """A tool as one line: its name and its argument names in the schema's order, optional ones with a question mark."""
    function = tool.get("function", tool)
    parameters = function.get("parameters", {})
    required = set(parameters.get("required", ()))
    names = [name if name in required else f"{name}?" for name in parameters.get("properties", {})]
    return f"{function['name']}({', '.join(names)})"
