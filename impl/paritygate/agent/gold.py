"""Gold episodes rendered as rollouts see them: what a warm start trains on."""

import json
from typing import Any

from renderers.base import Renderer

from paritygate.agent.conversation import Message, assistant, tool
from paritygate.agent.conversation import user as user_says
from paritygate.agent.episode import Environment, agent_messages, first_prompt
from paritygate.agent.prompt import Context
from paritygate.agent.trajectory import Ending, Trajectory
from paritygate.agent.user import STOP, opening
from paritygate.retail import RetailEpisode
from paritygate.retail.source import Source
from paritygate.retail.tools import WRITE_TOOLS

_DONE = {
    "cancel_pending_order": "Order {order_id} has been cancelled.",
    "return_delivered_order_items": "The return of order {order_id} has been requested.",
    "exchange_delivered_order_items": "The exchange for order {order_id} has been requested.",
    "modify_pending_order_items": "The items of order {order_id} have been changed.",
    "modify_pending_order_payment": "The payment of order {order_id} has been changed.",
    "modify_pending_order_address": "The address of order {order_id} has been changed.",
    "modify_user_address": "Your address has been changed.",
}


def gold_trajectory(
    source: Source, split: str, index: int, renderer: Renderer, context: Context, *, confirm: bool = False
) -> Trajectory:
    """A task's gold actions as an episode: the scripted user's opening, the calls, their results, a closing sentence.

    A gold transfer ends the episode, as it would a rollout, and then nothing is said.
    confirm: the agent first says what it will change and gets a yes. tokens and mask are exactly those of a rollout
    that samples these turns (first prompt, then bridged), so mask 1 is what cross-entropy trains; there are no sampler
    logprobs. The episode is played and graded. Raises ValueError when the renderer cannot bridge a turn.
    """
    env = RetailEpisode(source, split, index)
    task = env.task
    messages: list[Message] = [user_says(opening(task))]
    tokens = first_prompt(renderer, context, messages[0]["content"])
    prompt_length = len(tokens)
    mask = [0] * prompt_length
    spans: list[tuple[int, int]] = []
    turns = _turns(env, task, context, confirm=confirm)
    ended_by: Ending = "transfer" if env.done else "user_stop"
    for turn, (message, answers) in enumerate(turns):
        sampled = _sampled_tokens(renderer, context, [*messages, message], tokens)
        spans.append((len(tokens), len(tokens) + len(sampled)))
        messages += [message, *answers]
        mask += [1] * len(sampled)
        completion = list(sampled)
        if turn + 1 == len(turns):
            tokens = tokens + completion
            break
        tools: Any = context.rendered_tools
        bridged = renderer.bridge_to_next_turn(tokens, completion, answers, tools=tools)  # pyright: ignore[reportArgumentType]
        if bridged is None:
            raise ValueError(f"The renderer cannot extend turn {turn} of the gold episode of {split} task {index}.")
        tokens = bridged.token_ids
        mask += [0] * (len(tokens) - len(mask))
    grade = env.grade(agent_messages(messages))
    return Trajectory(
        split=split,
        task_index=index,
        rollout=-1,
        seed=0,
        tokens=tuple(tokens),
        mask=tuple(mask),
        sampler_logprobs=(None,) * len(tokens),
        prompt_length=prompt_length,
        spans=tuple(spans),
        messages=tuple(messages),
        ended_by=ended_by,
        turns=len(spans),
        reward=float(grade.reward),
        grade={},
    )


def gold_size(
    source: Source, split: str, index: int, renderer: Renderer, context: Context, *, confirm: bool = False
) -> tuple[int, int]:
    """(tokens, agent turns) of `gold_trajectory` with the same arguments, rendered once: it is the faster to count."""
    env = RetailEpisode(source, split, index)
    turns = _turns(env, env.task, context, confirm=confirm)
    messages: list[Any] = [{"role": "system", "content": context.system}, user_says(opening(env.task))]
    for message, answers in turns:
        messages += [message, *answers]
    last = len(messages) - 1 - len(turns[-1][1])
    tools: Any = context.rendered_tools
    rendered = renderer.render(messages[: last + 1], tools=tools)
    owners = zip(rendered.message_indices, rendered.sampled_mask, strict=True)
    end = max(place for place, (owner, sampled) in enumerate(owners) if owner == last and sampled)
    return end + 1, len(turns)


def _turns(env: Environment, task: Any, context: Context, *, confirm: bool) -> list[tuple[Message, list[Message]]]:
    """Each agent turn with the messages that answer it; the last is answered by the end of the conversation."""
    turns: list[tuple[Message, list[Message]]] = []
    writes = [action for action in task.actions if action.name in WRITE_TOOLS]
    if confirm and writes:
        turns.append((assistant(_question(writes)), [user_says("Yes.")]))
    for action in task.actions:
        arguments = dict(action.arguments)
        message = assistant("", [(action.name, arguments)], turn=len(turns))
        observation = context.observed(env.call(action.name, arguments))
        turns.append((message, [tool(action.name, observation, turn=len(turns))]))
        if env.done:
            return turns
    closing = " ".join(_DONE[a.name].format(**{"order_id": "", **a.arguments}) for a in writes)
    outputs = f" The answer is {', '.join(map(str, task.outputs))}." if task.outputs else ""
    turns.append((assistant((closing or "Done.") + outputs), [user_says(STOP)]))
    return turns


def _question(writes: list[Any]) -> str:
    plans = [f"{action.name} {json.dumps(dict(action.arguments), ensure_ascii=False)}" for action in writes]
    return f"I would call {'; '.join(plans)}. Do you confirm (yes/no)?"


def _sampled_tokens(renderer: Renderer, context: Context, messages: list[Message], prompt: list[int]) -> list[int]:
    """The tokens that a model samples to say the last of `messages` after `prompt`."""
    tools: Any = context.rendered_tools
    system: Any = {"role": "system", "content": context.system}
    rendered = renderer.render([system, *messages], tools=tools)  # pyright: ignore[reportArgumentType]
    last = len(messages)
    ids = [
        token
        for token, index, sampled in zip(
            rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True
        )
        if index == last and sampled
    ]
    # A non-thinking prompt ends with an empty thinking block, which a rendered turn repeats.
    overlap = next((n for n in range(min(len(ids), 16), 0, -1) if prompt[-n:] == ids[:n]), 0)
    return ids[overlap:]
