"""The user simulator: a script or a served model; what stops a conversation, and what is a fault."""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from renderers.base import Renderer

from paritygate.agent.conversation import Message, visible
from paritygate.agent.conversation import assistant as agent_says
from paritygate.agent.conversation import user as user_says
from paritygate.agent.seeds import derive
from paritygate.backend import BackendError, Sampler, ServiceDown

STOP = "###STOP###"

_ACT = "(?:cancel|return|exchange|modify|change|update|process)"
_GO = "(?:go ahead|proceed|continue)"
_ALL = "(?:this|that|these|it|everything|all of this|all this|the above)"
_ASKS_TO_CONFIRM = re.compile(
    r"\(\s*yes\s*/\s*no\s*\)|\bplease confirm\b|\b(?:once|if|when) you confirm\b|\bare you sure\b"
    r"|\b(?:reply|respond|answer|say|type|write)\b[^.?!]{0,20}\byes\b"
    r"|\b(?:need|await|awaiting|waiting for|require)\b[^.?!]{0,20}\bconfirmation\b"
    r"|\b(?:do you|can you|could you|would you|will you)\b[^.?!]*\bconfirm\b"
    rf"|\b(?:shall|should|may|can) i (?:{_GO}|{_ACT})\b"
    rf"|\b(?:would you like|do you want) (?:me to {_ACT}|(?:me )?to {_GO})\b"
    rf"|\bif you(?:'d| would) like (?:me )?to {_GO}\b|\blet me know if {_ALL} (?:is|are|looks?|sounds?)\b"
    rf"|\b(?:is|are|does|do) {_ALL}[^.?!]{{0,40}}\b(?:correct|right|good|ok|okay)\b[^.?!]*\?"
    rf"|\b(?:confirm|{_GO})\b[^.?!]*\?",
    re.IGNORECASE,
)


class SimulatorFault(Exception):  # noqa: N818 - the protocol's word for it
    """The user simulator gave no usable reply in all its tries: the episode says nothing of the agent."""


class User(Protocol):
    """One user in one episode. `retries` counts replies that had to be asked for again."""

    retries: int

    async def reply(self, agent_text: str | None) -> tuple[str, bool]:
        """The user's next words and whether they end the conversation; None asks for the opening.

        Raises SimulatorFault.
        """
        ...


def asks_to_confirm(agent_text: str) -> bool:
    """Whether the agent waits for a yes: it asks to confirm or whether to go ahead (not merely "anything else?")."""
    return _ASKS_TO_CONFIRM.search(agent_text) is not None


def read_reply(text: str, agent_text: str | None) -> tuple[str, bool]:
    """What of a simulator's text the agent gets, and whether it stops the conversation.

    Thinking is removed first, so a stop marker inside it means nothing. While the agent waits for a confirmation the
    conversation cannot stop: the marker is then removed and the rest is said; an empty rest is no reply (""), and the
    caller asks again. Otherwise the marker stops, whatever stands beside it.
    """
    said = visible(text)
    if STOP not in said:
        return said, False
    rest = said.replace(STOP, "").strip()
    if agent_text is not None and asks_to_confirm(agent_text):
        return rest, False
    return said, True


class ScriptedUser:
    """A deterministic user: opens with identity, wish and the ids that it needs, says yes when asked, then stops.

    It answers "Yes." to every request for confirmation; to any other first question it repeats its wish once;
    everything else ends the conversation. The opening is the task's instruction in the first person
    without its sentence on personality, and the item ids of the wanted writes, which a task's text leaves to look up.
    """

    def __init__(self, task: Any) -> None:
        self.retries = 0
        self._opening = opening(task)
        self._repeated = False

    async def reply(self, agent_text: str | None) -> tuple[str, bool]:
        """See `User.reply`; never a fault."""
        if agent_text is None:
            return self._opening, False
        if asks_to_confirm(agent_text):
            return "Yes.", False
        if not self._repeated and (not agent_text.strip() or _asks_for_details(agent_text)):
            self._repeated = True
            return self._opening, False
        return STOP, True


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


def _asks_for_details(agent_text: str) -> bool:
    return "?" in agent_text and re.search(r"\b(?:anything|something) else\b", agent_text, re.IGNORECASE) is None


class ModelUser:
    """A served model that plays the customer: its own system prompt (`{instruction}` filled in), roles turned around.

    An empty or failing reply is asked for again with another seed, `tries` times in all, then it is a SimulatorFault.
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
            said, stop = read_reply(await self._sample(derive(self._seed, "user", turn, attempt)), agent_text)
            if said:
                self._messages.append(agent_says(said))
                return said, stop
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
        parsed = self._renderer.parse_response(list(sample.tokens), prompt_ids=prompt)
        return parsed.content if parsed.reasoning_complete is not False else ""
