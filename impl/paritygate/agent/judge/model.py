"""A served model as the judge: its prompt, the fence around what it grades, and its tries."""

import hashlib
from typing import Any

from renderers.base import Renderer

from paritygate.agent.conversation import transcript, visible
from paritygate.agent.judge.judgement import Judged, Judgement, parse_judgement
from paritygate.agent.seeds import derive
from paritygate.agent.trajectory import Trajectory
from paritygate.backend import BackendError, Sampler, ServiceDown


class ModelJudge:
    """Asks a frozen served model, strictly parsed; up to `tries` answers, each with another seed."""

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        *,
        prompt: str,
        temperature: float,
        max_tokens: int,
        seed: int,
        tries: int = 3,
        policy: str = "",
    ) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._prompt = prompt
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._seed = seed
        self._tries = tries
        self._policy = policy

    async def judge(self, trajectory: Trajectory, task: Any) -> Judged:
        """Judge one trajectory; raises ServiceDown when the service is gone, which is nobody's answer."""
        del task
        messages: Any = [
            {"role": "system", "content": self._prompt},
            {"role": "user", "content": question(trajectory, policy=self._policy)},
        ]
        prompt = self._renderer.render_ids(messages, add_generation_prompt=True)
        first = False
        for attempt in range(self._tries):
            key = (trajectory.split, trajectory.task_index, trajectory.rollout, trajectory.seed)
            judgement = await self._ask(prompt, derive(self._seed, "judge", *key, attempt))
            first = first or (attempt == 0 and judgement is not None)
            if judgement is not None:
                return Judged(judgement, attempt + 1, first)
        return Judged(None, self._tries, first_try_parsed=False)

    async def _ask(self, prompt: list[int], seed: int) -> Judgement | None:
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
            return None
        try:
            parsed = self._renderer.parse_response(list(sample.tokens), prompt_ids=prompt)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError, IndexError):
            return None
        # An answer that the limit cut, or that never left its thinking, is not an answer, whatever it looks like.
        if sample.stop_reason != "stop" or parsed.reasoning_complete is False or parsed.tool_calls:
            return None
        return parse_judgement(visible(parsed.content))


def question(trajectory: Trajectory, *, policy: str = "") -> str:
    """What the judge reads: the agent's policy where one is given, and the fenced transcript."""
    text = f"The policy that the agent was given:\n\n{policy}\n\n" if policy else ""
    return f"{text}The conversation:\n\n{fenced(transcript(trajectory.messages))}\n\nGrade it now."


def fenced(text: str) -> str:
    """`text` between two lines that it cannot contain: each carries a digest of all of it.

    To write the closing line inside, a text would have to hold its own SHA-256.
    """
    mark, salt = hashlib.sha256(text.encode(errors="replace")).hexdigest(), 0
    while mark in text:  # out of reach, but then said by the code and not by a probability
        salt += 1
        mark = hashlib.sha256(f"{salt}/{mark}".encode()).hexdigest()
    return f"<<<BEGIN TRANSCRIPT {mark}>>>\n{text}\n<<<END TRANSCRIPT {mark}>>>"
