"""What an experiment will ask of the service, and what fits into its context: counted before any money is spent."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paritygate.errors import BadInputError
from paritygate.experiment.plan.service_obligations import stands_on
from paritygate.spec import Experiment

if TYPE_CHECKING:
    from renderers.base import Renderer

    from paritygate.agent.prompt import Context
    from paritygate.retail import Source


@dataclass(frozen=True, slots=True)
class Asked:
    """How often each thing is asked of the service by a run that no gate stops; `at_most` values are upper bounds."""

    what: str
    model: str
    times: int
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class GoldFit:
    """How many tasks of a selection fit as their own gold actions, after the one question that the policy demands.

    in_tokens: those of at most max_seq_len tokens; in_turns: those of at most max_turns agent turns; longest: tokens of
    the longest. A rollout takes more of both: it looks records up, and asks.
    """

    purpose: str
    tasks: int
    in_tokens: int
    in_turns: int
    longest: int


@dataclass(frozen=True, slots=True)
class EpisodeBudget:
    """Tokens of the prompt before an episode, what is left of `max_seq_len`, and what an episode could need.

    `prompt` is None where the tokenizer of the policy is known to the service only.
    """

    max_seq_len: int
    prompt: int | None
    left: int | None
    sampled_at_most: int
    renderer: str

    @property
    def fits(self) -> bool | None:
        """Whether even the longest turns fit, tool outputs and user messages not counted; None where unknown."""
        return None if self.left is None else self.sampled_at_most <= self.left


def episodes(exp: Experiment) -> dict[str, int]:
    """Episodes a phase: training and evaluation exactly, pilots at most (fallbacks included)."""
    arms, pilot = len(exp.arms), exp.protocol.pilot
    return {
        "probe": 1,
        "forced checks": exp.protocol.rollout.rollouts_per_task,
        "timing pilot": exp.batch_size,
        "activation pilot": arms * pilot.steps * exp.batch_size,
        "fallbacks": pilot.max_fallback_steps * exp.batch_size if pilot.fallbacks else 0,
        "train": arms * exp.steps * exp.batch_size,
        "evaluate": arms * exp.eval.n_examples * exp.eval.rollouts_per_task,
    }


def scorings(exp: Experiment) -> dict[str, int]:
    """Episodes that a teacher scores, by phase: training exactly, pilots at most (fallbacks included).

    The forced checks score each of theirs twice, whether an arm has a teacher or not.
    """
    taught, by_phase = sum(arm.needs_teacher for arm in exp.arms), episodes(exp)
    pilots = ("probe", "timing pilot", "fallbacks")
    return {
        "forced checks": 2 * by_phase["forced checks"],
        **{phase: by_phase[phase] if taught else 0 for phase in pilots},
        **{phase: by_phase[phase] // len(exp.arms) * taught for phase in ("activation pilot", "train")},
    }


def asked(exp: Experiment) -> tuple[Asked, ...]:
    """Every kind of request, whom it goes to, and how often."""
    rows: list[Asked] = []
    rollout, protocol = exp.protocol.rollout, exp.protocol
    by_phase = episodes(exp)
    total, steps = sum(by_phase.values()), exp.steps
    calls, tokens = stands_on(exp).price
    rows.append(Asked("calls of the service proof, about", exp.base_model, calls))
    rows.append(Asked("tokens of the service proof, about", exp.base_model, tokens))
    if protocol.warm_start is not None:
        warm = protocol.warm_start
        batches = -(-warm.tasks.count // warm.batch_size) * warm.epochs
        rows.append(Asked(f"warm-start updates on {warm.tasks.count} gold episodes", exp.base_model, batches))
    for arm in exp.arms:
        rows.append(Asked(f"{arm.name}: training episodes", exp.base_model, steps * exp.batch_size))
        rows.append(Asked(f"{arm.name}: saved samplers", exp.base_model, steps + 1))
        if arm.needs_teacher:
            rows.append(Asked(f"{arm.name}: teacher scorings", exp.base_model, steps * exp.batch_size))
        rows.append(Asked(f"{arm.name}: forward_backward and optim_step", exp.base_model, steps))
        held_out = exp.eval.n_examples * exp.eval.rollouts_per_task
        rows.append(Asked(f"{arm.name}: evaluation episodes", exp.base_model, held_out))
    rest = total - by_phase["train"] - by_phase["evaluate"]
    rows.append(Asked("episodes of probe, checks, pilots and fallbacks", exp.base_model, rest, at_most=True))
    scored = sum(scorings(exp).values()) - scorings(exp)["train"]
    rows.append(Asked("teacher scorings of the same", exp.base_model, scored, at_most=True))
    rows.append(Asked("agent turns", exp.base_model, total * rollout.max_turns, at_most=True))
    tokens = total * rollout.max_turns * rollout.max_tokens_per_turn
    rows.append(Asked("sampled agent tokens", exp.base_model, tokens, at_most=True))
    if protocol.user.kind == "model":
        turns = total * (rollout.max_turns + 1)
        rows.append(Asked("user turns", protocol.user.model or "", turns, at_most=True))
    if protocol.judge.kind == "model":
        rows.append(Asked("judge calls, one an episode when every answer is parsed", protocol.judge.model or "", total))
        retries = total * (protocol.judge.tries - 1)
        rows.append(Asked("judge calls asked again", protocol.judge.model or "", retries, at_most=True))
    return tuple(rows)


def episode_budget(exp: Experiment, source: "Source | None") -> EpisodeBudget:
    """The room for an episode, counted with the policy's own renderer where its vocabulary ships with a package."""
    rollout = exp.protocol.rollout
    sampled = rollout.max_turns * rollout.max_tokens_per_turn
    counted = _prompt_tokens(exp, source) if source is not None else None
    prompt, name = counted if counted is not None else (None, exp.protocol.renderer)
    left = None if prompt is None else exp.max_seq_len - prompt
    return EpisodeBudget(exp.max_seq_len, prompt, left, sampled, name)


def gold_fits(exp: Experiment, source: "Source") -> tuple[GoldFit, ...]:
    """How many evaluation and training tasks fit as gold; nothing where the policy's vocabulary is the service's."""
    from dataclasses import replace

    from paritygate.agent import prompt
    from paritygate.agent.gold import gold_size

    counted, rendering = _prompt_tokens(exp, source), _policy_renderer(exp)
    if counted is None or rendering is None:
        return ()
    context = prompt.context(exp.protocol.context.kind, source.wiki, source.tools)
    # The system text stands before every episode unchanged: it is counted once, and the episodes without it.
    short = replace(context, kind="compact", system="x")
    saved = counted[0] - _rendered(rendering[0], short)
    fits: list[GoldFit] = []
    for purpose, selection in (("evaluation", exp.protocol.evaluation), ("training", exp.protocol.train)):
        indices = selection.indices(len(source.tasks(selection.split)))
        sizes = [gold_size(source, selection.split, index, rendering[0], short, confirm=True) for index in indices]
        lengths = [tokens + saved for tokens, _ in sizes]
        fits.append(
            GoldFit(
                purpose,
                len(indices),
                sum(length <= exp.max_seq_len for length in lengths),
                sum(turns <= exp.protocol.rollout.max_turns for _, turns in sizes),
                max(lengths),
            )
        )
    return tuple(fits)


def _prompt_tokens(exp: Experiment, source: "Source") -> tuple[int, str] | None:
    from paritygate.agent import prompt

    rendering = _policy_renderer(exp)
    if rendering is None:
        return None  # the service will give the tokenizer
    context = prompt.context(exp.protocol.context.kind, source.wiki, source.tools)
    return _rendered(rendering[0], context), rendering[1]


def _policy_renderer(exp: Experiment) -> "tuple[Renderer, str] | None":
    """The policy's renderer and its name; None where its vocabulary ships with no package."""
    from paritygate.agent import renderer
    from paritygate.backend import vocabulary

    try:
        tokenizer = vocabulary.offline(exp.base_model)
        name = renderer.resolve(exp.protocol.renderer, exp.base_model)
        return renderer.load(name, tokenizer, model=exp.base_model), name
    except BadInputError:
        return None


def _rendered(rendering: "Renderer", context: "Context") -> int:
    """The tokens of the system message alone, with the header of the first turn."""
    messages: Any = [{"role": "system", "content": context.system}]
    tools: Any = context.rendered_tools
    return len(rendering.render_ids(messages, tools=tools, add_generation_prompt=True))
