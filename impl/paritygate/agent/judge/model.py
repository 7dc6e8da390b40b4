"""A served model as the judge: its prompt, the fence around what it grades, and its tries."""

import hashlib
from typing import Any

from renderers.base import Renderer

from paritygate.agent.conversation import transcript, visible
from paritygate.agent.judge.judgement import Answer, Judged, Judgement, parse_judgement
from paritygate.agent.renderer import read_completion
from paritygate.agent.seeds import derive
from paritygate.agent.trajectory import Trajectory
from paritygate.backend import BackendError, Sampler, ServiceDown


class ModelJudge:
    """Asks a frozen served model, strictly parsed; up to `tries` answers, each with another seed.

    max_tokens: of the first answer, thoughts included; retry_max_tokens: of every further one, for a judge that thinks
    for long. context_length: the model's context in tokens, which prompt and answer share; None where it is not known.
    """

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
        retry_max_tokens: int | None = None,
        context_length: int | None = None,
    ) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._prompt = prompt
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._retry_max_tokens = retry_max_tokens or max_tokens
        self._context_length = context_length
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
        answers: list[Answer] = []
        for attempt in range(self._tries):
            key = (trajectory.split, trajectory.task_index, trajectory.rollout, trajectory.seed)
            limit = self._retry_max_tokens if attempt else self._max_tokens
            judgement, answer = await self._ask(prompt, limit, derive(self._seed, "judge", *key, attempt))
            answers.append(answer)
            if judgement is not None:
                return Judged(judgement, attempt + 1, attempt == 0, tuple(answers))
        return Judged(None, self._tries, first_try_parsed=False, answers=tuple(answers))

    async def _ask(self, prompt: list[int], limit: int, seed: int) -> tuple[Judgement | None, Answer]:
        if self._context_length is not None:
            limit = min(limit, self._context_length - len(prompt))
        if limit < 1:
            error = f"the prompt of {len(prompt)} tokens fills the judge's context of {self._context_length}"
            return None, Answer("", "error", 0, error)
        try:
            [sample] = await self._sampler.sample(
                prompt,
                max_tokens=limit,
                temperature=self._temperature,
                seed=seed,
                stop=self._renderer.get_stop_token_ids(),
            )
        except ServiceDown:
            raise
        except BackendError as error:
            return None, Answer("", "error", 0, str(error))
        completion = read_completion(self._renderer, sample.tokens, prompt)
        judgement = parse_judgement(completion.text)
        if judgement is None and not completion.calls:
            judgement = parse_judgement(visible(completion.content))
        # An answer that the limit cut, or that never left its thinking, is not an answer, whatever it looks like.
        if sample.stop_reason != "stop":
            error = f"cut at {len(sample.tokens)} tokens" + (", still thinking" if completion.thinking else "")
        elif completion.thinking:
            error = "it never left its thoughts"
        else:
            error = "" if judgement is not None else "it is no judgement" if completion.text.strip() else "it is empty"
        return None if error else judgement, Answer(completion.raw, sample.stop_reason, len(sample.tokens), error)


def question(trajectory: Trajectory, *, policy: str = "") -> str:
    """What the judge reads: the agent's policy where one is given, and the fenced transcript."""
    text = f"The policy that the agent was given:\n\n{policy}\n\n" if policy else ""
    form = "Each message begins at the left margin with who speaks; its further lines are indented."
    return f"{text}The conversation. {form}\n\n{fenced(transcript(trajectory.messages))}\n\nGrade it now."


def fenced(text: str) -> str:
    """`text` between two lines that it cannot contain: each carries a digest of all of it.

    To write the closing line inside, a text would have to hold its own SHA-256.
    """
    mark, salt = hashlib.sha256(text.encode(errors="replace")).hexdigest(), 0
    while mark in text:  # out of reach, but then said by the code and not by a probability
        salt += 1
        mark = hashlib.sha256(f"{salt}/{mark}".encode()).hexdigest()
    return f"<<<BEGIN TRANSCRIPT {mark}>>>\n{text}\n<<<END TRANSCRIPT {mark}>>>"
