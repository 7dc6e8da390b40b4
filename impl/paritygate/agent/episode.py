"""One multi-turn episode, tokens in and tokens out: what was sampled is extended, and never rendered again."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from renderers.base import Renderer

from paritygate.agent.conversation import Message, assistant, tool
from paritygate.agent.conversation import user as user_says
from paritygate.agent.prompt import Context
from paritygate.agent.renderer import quoted
from paritygate.agent.seeds import derive
from paritygate.agent.trajectory import GRADED, Ending, Trajectory
from paritygate.agent.turns import Turn, read_turn
from paritygate.agent.user import STOP, SimulatorFault, User
from paritygate.backend import Sampler


class Environment(Protocol):
    """What an episode acts on: `RetailEpisode`, or another of its interface."""

    split: str
    index: int

    @property
    def done(self) -> bool:
        """Whether a tool call has ended the episode."""
        ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run one tool; returns the observation, an error's text included."""
        ...

    def grade(self, agent_messages: Sequence[str]) -> Any:
        """End and grade the episode; the grade's `reward` is 0.0 or 1.0."""
        ...

    def cut(self) -> Any:
        """End the episode without grading it: reward 0.0."""
        ...


@dataclasses.dataclass(frozen=True)
class Limits:
    """What bounds an episode: agent turns, tokens a turn, tokens in all; temperature 0 is greedy."""

    max_turns: int = 12
    max_tokens_per_turn: int = 512
    max_seq_len: int = 8192
    temperature: float = 1.0


class _Record:
    """The growing token lists of an episode, and the messages that they stand for."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float | None] = []
        self.spans: list[tuple[int, int]] = []
        self.messages: list[Message] = []
        self.prompt_length = 0
        self.dropped = 0
        self.last_words = False  # whether the user has said its last

    def given(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.mask.extend([0] * len(tokens))
        self.logprobs.extend([None] * len(tokens))

    def sampled(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens.extend(tokens)
        self.mask.extend([1] * len(tokens))
        self.logprobs.extend(logprobs)

    @property
    def turns(self) -> int:
        return len(self.spans)


async def run_episode(
    env: Environment,
    renderer: Renderer,
    sampler: Sampler,
    user: User,
    *,
    context: Context,
    limits: Limits,
    seed: int,
    rollout: int = 0,
) -> Trajectory:
    """Play one episode to its end and return its trajectory; the same arguments and weights give the same trajectory.

    A turn's seed depends on `seed` and the turn alone. A turn that a limit cut is kept and trained on, not acted on.
    Raises BackendError when the sampler fails; the simulator's failure is an ending, not an exception.
    """
    record = _Record()
    ended = await _play(env, renderer, sampler, user, context, limits, seed, record)
    grade = env.grade(agent_messages(record.messages)) if ended in GRADED else env.cut()
    return Trajectory(
        split=env.split,
        task_index=env.index,
        rollout=rollout,
        seed=seed,
        tokens=tuple(record.tokens),
        mask=tuple(record.mask),
        sampler_logprobs=tuple(record.logprobs),
        prompt_length=record.prompt_length,
        spans=tuple(record.spans),
        messages=tuple(record.messages),
        ended_by=ended,
        turns=record.turns,
        reward=float(grade.reward),
        grade=_plain(grade),
        user_retries=user.retries,
        dropped_tokens=record.dropped,
        user_cut_replies=user.cut_replies,
    )


async def _play(
    env: Environment,
    renderer: Renderer,
    sampler: Sampler,
    user: User,
    context: Context,
    limits: Limits,
    seed: int,
    record: _Record,
) -> Ending:
    try:
        opening, _ = await user.reply(None)
    except SimulatorFault:
        return "user_fault"
    record.messages.append(user_says(opening))
    prompt = first_prompt(renderer, context, opening)
    while True:
        if len(prompt) >= limits.max_seq_len:
            return "sequence_limit"
        record.given(prompt[len(record.tokens) :])
        record.prompt_length = record.prompt_length or len(prompt)
        cut = await _sample_turn(renderer, sampler, limits, seed, record)
        turn = read_turn(renderer, record.tokens[record.spans[-1][0] :], prompt, list(context.tools))
        new, ended = await _act(env, user, context, record, turn, cut)
        if ended is not None:
            return ended
        if record.turns >= limits.max_turns:
            return "turn_limit"
        bridged = _bridge(renderer, record, new, context)
        if bridged is None:
            return "unbridgeable"
        prompt = bridged


async def _sample_turn(
    renderer: Renderer, sampler: Sampler, limits: Limits, seed: int, record: _Record
) -> Ending | None:
    """Sample one turn onto the record; the limit that cut it, None when the model ended it."""
    stops = renderer.get_stop_token_ids()
    space_left = limits.max_seq_len - len(record.tokens)
    [sample] = await sampler.sample(
        record.tokens,
        max_tokens=min(limits.max_tokens_per_turn, space_left),
        temperature=limits.temperature,
        seed=derive(seed, "agent", record.turns),
        stop=stops,
    )
    end = next((i + 1 for i, token in enumerate(sample.tokens) if token in stops), None)
    record.sampled(sample.tokens[:end], sample.logprobs[:end])
    record.dropped += len(sample.tokens) - len(sample.tokens[:end])
    if end is not None:
        return None
    return "sequence_limit" if space_left < limits.max_tokens_per_turn else "token_limit"


async def _act(
    env: Environment, user: User, context: Context, record: _Record, turn: Turn, cut: Ending | None
) -> tuple[list[Message], Ending | None]:
    """Do what a turn asks for: the messages that answer it, and how the episode ended if it did."""
    index = record.turns - 1
    record.messages.append(assistant(turn.text, [(call.name, call.arguments) for call in turn.calls], turn=index))
    if cut is not None:
        return [], cut
    new: list[Message] = []
    for number, call in enumerate(turn.calls):
        result = call.error if call.error is not None else env.call(call.name, call.arguments)
        new.append(tool(call.name, context.observed(result), turn=index, index=number))
        if env.done:
            record.messages.extend(new)
            return new, "transfer"
    if not turn.calls and record.last_words:
        return [], "user_stop"
    if not turn.calls:
        try:
            reply, record.last_words = await user.reply(turn.text)
        except SimulatorFault:
            return [], "user_fault"
        new.append(user_says(reply))
        if reply == STOP:
            record.messages.extend(new)
            return new, "user_stop"
    record.messages.extend(new)
    return new, None


def first_prompt(renderer: Renderer, context: Context, opening: str, *, before_system: str = "") -> list[int]:
    """The tokens before the first turn; `before_system` is put in front of the system text (a teacher's context).

    What stands in it was said by somebody, or written by a judge: its tags are text.
    """
    messages: Any = [{"role": "system", "content": quoted(before_system) + context.system}, user_says(opening)]
    tools: Any = context.rendered_tools
    return renderer.render_ids(messages, tools=tools, add_generation_prompt=True)


def _bridge(renderer: Renderer, record: _Record, new: list[Message], context: Context) -> list[int] | None:
    """The next prompt, which begins with every token so far, or None when the renderer would rewrite one."""
    start = record.spans[-1][0]
    tools: Any = context.rendered_tools
    bridged = renderer.bridge_to_next_turn(record.tokens[:start], record.tokens[start:], new, tools=tools)  # pyright: ignore[reportArgumentType]
    if bridged is None or bridged.token_ids[: len(record.tokens)] != record.tokens:
        return None
    return bridged.token_ids


def agent_messages(messages: Sequence[Message]) -> list[str]:
    """What the agent said to the user: its messages without tool calls, in order."""
    return [m["content"] for m in messages if m["role"] == "assistant" and not m.get("tool_calls")]


def _plain(grade: Any) -> dict[str, Any]:
    """A grade as JSON values."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(grade).items()}
