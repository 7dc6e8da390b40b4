"""The teacher: the same weights, told how to do better, scoring the very tokens that the student sampled."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from renderers.base import Renderer

from paritygate.agent.conversation import transcript
from paritygate.agent.episode import first_prompt
from paritygate.agent.prompt import Context
from paritygate.agent.trajectory import Trajectory
from paritygate.backend import Sampler
from paritygate.spec.protocol import DIMENSIONS

# The wording of the reprompt is that of arXiv 2601.20802, Table 2.
SOLUTION = "Correct solution:"
FEEDBACK = "The following is feedback from your unsuccessful earlier attempt:"
FEEDBACK_SUCCESS = "The following is feedback from your earlier attempt:"
AGAIN = "Correctly solve the original question."
CUT = " ... "


@dataclass(frozen=True)
class TeacherContext:
    """The tokens that take the place of a trajectory's first `prompt_length` tokens, and what they hold.

    has_feedback, has_sibling: whether anything of either is left in the context. shortened_tokens: how many tokens of
    sibling and feedback were left out to fit the limit (0: nothing was shortened).
    """

    tokens: tuple[int, ...]
    has_feedback: bool
    has_sibling: bool
    shortened_tokens: int


def teacher_context(
    renderer: Renderer,
    context: Context,
    trajectory: Trajectory,
    *,
    feedback: Mapping[str, str] | None,
    sibling: Trajectory | None,
    limit: int,
    success_wording: bool = False,
) -> TeacherContext:
    """The original system prompt preceded by the block: solution, feedback, the request to solve it correctly.

    feedback: the judge's rationales, None or empty for none. sibling: the solution, never the trajectory itself. With
    neither, the context is the student's own. success_wording: an episode with reward 1 is not called unsuccessful.
    Where context and trajectory exceed `limit` tokens, the sibling is cut from its start, whole tokens at a time, until
    it fits or is gone; then the feedback is cut from its end; the system prompt and the trajectory never are.
    Raises ValueError when `sibling` is the trajectory itself or of another task.
    """
    if sibling is not None:
        _check_sibling(trajectory, sibling)
    block = _Block(
        solution=transcript(sibling.messages) if sibling is not None else "",
        feedback=_feedback_text(feedback or {}),
        heading=FEEDBACK_SUCCESS if success_wording and trajectory.reward == 1.0 else FEEDBACK,
    )
    opening = str(trajectory.messages[0]["content"])
    max_length = limit - (len(trajectory.tokens) - trajectory.prompt_length)

    def render(kept: _Block) -> list[int]:
        return first_prompt(renderer, context, opening, before_system=kept.text())

    whole = render(block)
    kept = block if len(whole) <= max_length else _shortened(block, lambda b: len(render(b)) <= max_length)
    tokens = whole if kept is block else render(kept)
    return TeacherContext(
        tokens=tuple(tokens),
        has_feedback=bool(kept.feedback),
        has_sibling=bool(kept.solution),
        shortened_tokens=len(whole) - len(tokens),
    )


async def teacher_logprobs(sampler: Sampler, context: TeacherContext, trajectory: Trajectory) -> list[float | None]:
    """The teacher's logprob (nats) of each token of `trajectory`, None where its mask is 0: length L, its positions.

    One scoring call over the context and the trajectory's own tokens after its prompt, which alone are asked for.
    Position t of the trajectory is position t + len(context.tokens) - prompt_length of what is scored.
    """
    rest = trajectory.tokens[trajectory.prompt_length :]
    scored = await sampler.score([*context.tokens, *rest], len(rest))
    shift = len(context.tokens) - trajectory.prompt_length
    return [scored[t + shift] if mask else None for t, mask in enumerate(trajectory.mask)]


@dataclass(frozen=True)
class _Block:
    solution: str
    feedback: str
    heading: str

    def text(self) -> str:
        parts = [f"{SOLUTION}\n\n{self.solution}"] if self.solution else []
        parts += [f"{self.heading}\n\n{self.feedback}"] if self.feedback else []
        return "".join(f"{part}\n\n" for part in [*parts, AGAIN]) if parts else ""


def _shortened(block: _Block, fits: Callable[[_Block], bool]) -> _Block:
    """The block with the end of its solution that fits, or without one and with the start of its feedback that fits."""
    starts = [match.start() for match in re.finditer(r"\S+", block.solution)]

    def from_word(index: int) -> _Block:
        return replace(block, solution=CUT + block.solution[starts[index] :])

    dropped = _first(1, len(starts), lambda index: fits(from_word(index)))
    if dropped < len(starts):
        return from_word(dropped)
    block = replace(block, solution="")
    if fits(block):
        return block
    ends = [match.end() for match in re.finditer(r"\S+", block.feedback)]

    def without(count: int) -> _Block:
        return replace(block, feedback=block.feedback[: ends[len(ends) - 1 - count]] + CUT)

    dropped = _first(1, len(ends), lambda count: fits(without(count)))
    return without(dropped) if dropped < len(ends) else replace(block, feedback="")


def _first(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The smallest number in [low, high) that fits, `high` if none does; one that was tried, so it does fit."""
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _feedback_text(feedback: Mapping[str, str]) -> str:
    """The rationales in the order of the dimensions, then any others, one a line."""
    names = [*DIMENSIONS, *(name for name in feedback if name not in DIMENSIONS)]
    lines = [(name, feedback.get(name, "").strip()) for name in names]
    return "\n".join(f"{name.replace('_', ' ')}: {text}" for name, text in lines if text)


def _check_sibling(trajectory: Trajectory, sibling: Trajectory) -> None:
    this = (trajectory.split, trajectory.task_index, trajectory.rollout)
    other = (sibling.split, sibling.task_index, sibling.rollout)
    if this == other:
        raise ValueError(f"Rollout {this[2]} of task {this[1]} was given itself as its correct solution.")
    if this[:2] != other[:2]:
        raise ValueError(f"A solution of {other[0]} task {other[1]} was given for {this[0]} task {this[1]}.")
