"""The user simulator: a script or a served model; what stops a conversation, and what is a fault."""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from renderers.base import Renderer

from paritygate.agent.conversation import Message, visible
from paritygate.agent.conversation import assistant as agent_says
from paritygate.agent.conversation import user as user_says
from paritygate.agent.renderer import read_completion
from paritygate.agent.seeds import derive
from paritygate.backend import BackendError, Sampler, ServiceDown

STOP = "###STOP###"


class SimulatorFault(Exception):  # noqa: N818 - the protocol's word for it
    """The user simulator gave no usable reply in all its tries: the episode says nothing of the agent."""


class User(Protocol):
    """One user in one episode. retries: replies that were asked for again; cut_replies: those of them cut short."""

    retries: int
    cut_replies: int

    async def reply(self, agent_text: str | None) -> tuple[str, bool]:
        """The user's next words and whether they are the last; None asks for the opening.

        `STOP` alone ends the conversation at once. Last words are said: the agent acts on them, and the conversation
        ends when it next speaks. Raises SimulatorFault.
        """
        ...


def read_reply(text: str) -> tuple[str, bool]:
    """What of a simulator's text the agent gets, and whether the simulator has said its last: see `User.reply`.

    Thinking is removed first, so a stop marker inside it means nothing. A marker beside words is not said; quotes,
    stars, underscores or a full stop around it are no words.
    """
    reply = visible(text)
    if STOP not in reply:
        return reply, False
    rest = reply.replace(STOP, "").strip()
    return (rest if re.search(r"[^\W_]", rest) else STOP), True


class ScriptedUser:
    """A deterministic user: opens with identity, wish and the ids that it needs, says yes when asked, then stops.

    To a question that speaks of "yes" or of confirming it answers "Yes."; to the first other question it repeats its
    wish; to a later one, and to a sentence on confirming that asks nothing, "Yes." are its last words; everything else,
    a question for anything else included, ends the conversation. The opening is the task's instruction in the first
    person without its sentence on personality, and the item ids of the wanted writes, which a task leaves to look up.
    """

    def __init__(self, task: Any) -> None:
        self.retries = 0
        self.cut_replies = 0
        self._opening = opening(task)
        self._repeated = False

    async def reply(self, agent_text: str | None) -> tuple[str, bool]:
        """See `User.reply`; never a fault."""
        if agent_text is None:
            return self._opening, False
        asks = "?" in agent_text and _ANYTHING_ELSE.search(agent_text) is None
        if _CONFIRM.search(agent_text) is not None:
            return "Yes.", not asks
        if not self._repeated and (asks or not agent_text.strip()):
            self._repeated = True
            return self._opening, False
        return ("Yes.", True) if asks else (STOP, True)


_CONFIRM = re.compile(r"\b(?:yes|confirm)\b", re.IGNORECASE)
_ANYTHING_ELSE = re.compile(r"\b(?:anything|something) else\b", re.IGNORECASE)


def opening(task: Any) -> str:
    """The scripted user's first message: see `ScriptedUser`."""
    text = " ".join(str(task.instruction).split())
    text = re.sub(r" You are [a-z][a-z, -]*\.(?= |$)", "", text)
    for pattern, replacement in _FIRST_PERSON:
        text = pattern.sub(replacement, text)
    return f"Hi. {text.rstrip(' ;')}{'' if text.rstrip().endswith(('.', '!', '?')) else '.'}{_item_ids(task)}"


_FIRST_PERSON = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\bYou are\b", "I am"),
        (r"\byou are\b", "I am"),
        (r"\bYou were\b|\byou were\b", "I was"),
        (r"\bYourself\b|\byourself\b", "myself"),
        (r"\bYours\b|\byours\b", "mine"),
        (r"\bYour\b", "My"),
        (r"\byour\b", "my"),
        (r"\bYou\b|\byou\b", "I"),
    )
]


def _item_ids(task: Any) -> str:
    parts: list[str] = []
    for action in task.actions:
        arguments: Mapping[str, Any] = action.arguments
        if "item_ids" not in arguments:
            continue
        text = f" In {arguments['order_id']} I mean items {', '.join(arguments['item_ids'])}"
        if "new_item_ids" in arguments:
            text += f", to become {', '.join(arguments['new_item_ids'])}"
        parts.append(text + ".")
    return "".join(parts)


class ModelUser:
    """A served model that plays the customer: its own system prompt (`{instruction}` filled in), roles turned around.

    An empty, cut, unreadable or failing reply is asked for again with another seed, `tries` times in all, then it is a
    SimulatorFault.
    """

    def __init__(
        self,
        task: Any,
        sampler: Sampler,
        renderer: Renderer,
        *,
        prompt: str,
        temperature: float,
        max_tokens: int,
        seed: int,
        tries: int = 3,
    ) -> None:
        self.retries = 0
        self.cut_replies = 0
        self._sampler = sampler
        self._renderer = renderer
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._seed = seed
        self._tries = tries
        system = prompt.replace("{instruction}", str(task.instruction))
        # The customer's model sees the agent as its user; it opens after a greeting that the agent never said.
        self._messages: list[Message] = [{"role": "system", "content": system}]

    async def reply(self, agent_text: str | None) -> tuple[str, bool]:
        """See `User.reply`; raises ServiceDown when the service is gone, which is nobody's reply."""
        heard = "Hi! How can I help you today?" if agent_text is None else visible(agent_text)
        self._messages.append(user_says(heard or "(The agent said nothing.)"))
        turn = len(self._messages)
        for attempt in range(self._tries):
            reply, stop = read_reply(await self._sample(derive(self._seed, "user", turn, attempt)))
            if reply:
                self._messages.append(agent_says(reply))
                return reply, stop
            self.retries += 1
        raise SimulatorFault(f"The user simulator gave no reply in {self._tries} tries.")

    async def _sample(self, seed: int) -> str:
        prompt = self._renderer.render_ids(self._messages, add_generation_prompt=True)  # pyright: ignore[reportArgumentType]
        try:
            [sample] = await self._sampler.sample(
                prompt,
                max_tokens=self._max_tokens,
                temperature=self._temperature,
                seed=seed,
                stop=self._renderer.get_stop_token_ids(),
            )
        except ServiceDown:
            raise
        except BackendError:
            return ""
        if sample.stop_reason != "stop":  # half a sentence is not what the customer says
            self.cut_replies += 1
            return ""
        return read_completion(self._renderer, sample.tokens, prompt).content
