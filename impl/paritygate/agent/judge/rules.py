"""A judge without a model, computed from the trajectory: free, deterministic, the yardstick for a model judge."""

import re
from collections.abc import Sequence
from typing import Any

from paritygate.agent.conversation import Message, calls_of
from paritygate.agent.judge.judgement import Judged, Judgement
from paritygate.agent.trajectory import Trajectory
from paritygate.retail.tools import WRITE_TOOLS
from paritygate.spec.protocol import DIMENSIONS

# What the retail data calls its records; prices have two decimals at most.
_CLAIMS = {
    "id": re.compile(r"#W\d{5,}|\b(?:credit_card|gift_card|paypal)_\d+\b|\b\d{10}\b|\b[a-z]+_[a-z]+_\d{4}\b"),
    "price": re.compile(r"\$\s?(\d[\d,]*(?:\.\d+)?)"),
    "status": re.compile(
        r"\b(pending|processed|delivered|cancelled|return(?:ed)? requested|exchange requested)\b", re.IGNORECASE
    ),
}
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# What a call that succeeded has done, whether or not its result was shown that far.
_STATUS_AFTER = {
    "cancel_pending_order": "cancelled",
    "return_delivered_order_items": "return requested",
    "exchange_delivered_order_items": "exchange requested",
    "modify_pending_order_address": "pending",
    "modify_pending_order_items": "pending",
    "modify_pending_order_payment": "pending",
}
SHOWN = 3  # offending claims or calls that a rationale quotes


class RuleJudge:
    """Scores from the conversation alone.

    invalid_tool_use: the share of tool calls whose result is no error (1.0 without calls). ungrounded_claims: the share
    of ids, prices and order statuses said to the user that the user or a tool had said before, or that a successful
    call has brought about (1.0 without claims).
    upfront_clarification: 1.0 if the agent asked the user something before its first call that changes anything, or,
    where nothing was changed, at all; else 0.0.
    """

    async def judge(self, trajectory: Trajectory, task: Any) -> Judged:
        """Judge one trajectory; always parsed, `task` is not looked at."""
        del task
        return Judged(judge_messages(trajectory.messages), tries=1, first_try_parsed=True)


def judge_messages(messages: Sequence[Message]) -> Judgement:
    """The rules applied to a conversation (its messages after the system message)."""
    results = [_tool_use(messages), _grounding(messages), _clarification(messages)]
    scores = [score for score, _ in results]
    rationale = {name: text for name, (_, text) in zip(DIMENSIONS, results, strict=True)}
    return Judgement(scores[0], scores[1], scores[2], rationale)


def is_error(observation: str) -> bool:
    """Whether a tool's result is an error of the environment or of the call's form."""
    return observation.startswith(("Error: ", "Unknown action "))


def _tool_use(messages: Sequence[Message]) -> tuple[float, str]:
    results = [m for m in messages if m["role"] == "tool"]
    failed = [m for m in results if is_error(m["content"])]
    if not results:
        return 1.0, "No tool was called, so none was called wrongly."
    if not failed:
        return 1.0, f"All {len(results)} tool calls succeeded."
    shown = "; ".join(f"{m['name'] or 'a malformed call'}: {m['content'][:120]}" for m in failed[:SHOWN])
    return (
        1 - len(failed) / len(results),
        f"{len(failed)} of {len(results)} tool calls failed ({shown}). Call tools with arguments that were given.",
    )


def _grounding(messages: Sequence[Message]) -> tuple[float, str]:
    seen: set[tuple[str, str]] = set()
    numbers: set[str] = set()
    claims = 0
    unfounded: list[str] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            for kind, value in _claims(content) if not calls_of(message) else ():
                claims += 1
                if (kind, value) not in seen and not (kind == "price" and value in numbers):
                    unfounded.append(value)
            continue
        seen.update(_claims(content))
        done = _STATUS_AFTER.get(message.get("name", ""))
        if message["role"] == "tool" and done and not is_error(content):
            seen.add(("status", done))
        numbers.update(_amount(n) for n in _NUMBER.findall(content))
    if not unfounded:
        return (
            1.0,
            f"All {claims} ids, prices and statuses stated were seen before." if claims else "Nothing was claimed.",
        )
    shown = ", ".join(dict.fromkeys(unfounded[:SHOWN]))
    return (
        1 - len(unfounded) / claims,
        f"{len(unfounded)} of {claims} stated facts were never seen ({shown}). Say only what the user or a tool said.",
    )


def _claims(text: str) -> list[tuple[str, str]]:
    return [
        (kind, _amount(match.group(1)) if kind == "price" else match.group().lower())
        for kind, pattern in _CLAIMS.items()
        for match in pattern.finditer(text)
    ]


def _amount(text: str) -> str:
    """A number in one spelling: no separators, no trailing zeros after the point."""
    plain = text.replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def _clarification(messages: Sequence[Message]) -> tuple[float, str]:
    asked = False
    for message in messages:
        if message["role"] != "assistant":
            continue
        wrote = [name for name, _ in calls_of(message) if name in WRITE_TOOLS]
        if wrote and not asked:
            return 0.0, f"{wrote[0]} was called without asking first. List the details and get a yes before any change."
        if wrote:
            return 1.0, f"The user was asked before {wrote[0]} was called."
        asked = asked or (not calls_of(message) and "?" in message["content"])
    if asked:
        return 1.0, "Nothing was changed, and the user was asked."
    return 0.0, "Nothing was changed and nothing was asked. Ask for what is missing, then act."
