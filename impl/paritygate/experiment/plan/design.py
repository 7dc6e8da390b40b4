"""What the decision can show at this n, and whether an episode fits: sentences from spec and data."""

from typing import TYPE_CHECKING

from paritygate.experiment.plan import forecast
from paritygate.spec import Experiment
from paritygate.statistics import DesignCheck, design_check

if TYPE_CHECKING:
    from paritygate.retail import Source

DESIGN_POWER, DESIGN_SD = 0.8, 0.6
DESIGN_EFFECTS = (0.05, 0.10, 0.15)


def design_checks(exp: Experiment) -> dict[str, DesignCheck]:
    """The design check of every criterion of the decision rule."""
    rule = exp.decision_rule
    return {
        criterion.id: design_check(
            exp.eval.n_examples,
            margin=criterion.margin,
            alpha=rule.alpha,
            criteria=len(rule.criteria),
            bounds=criterion.bounds,
            power=DESIGN_POWER,
            sd=DESIGN_SD,
            effects=DESIGN_EFFECTS,
        )
        for criterion in rule.criteria
    }


def design_lines(exp: Experiment, checks: dict[str, DesignCheck]) -> tuple[str, ...]:
    """What the decision can show at this n, in sentences."""
    rule, n = exp.decision_rule, exp.eval.n_examples
    primary = checks["primary"]
    margin = next(criterion.margin for criterion in rule.criteria if criterion.id == "primary")
    needed = "; ".join(
        f"{effect:.2f}: {n_needed:,} tasks" if n_needed is not None else f"{effect:.2f}: no number of tasks"
        for effect, n_needed in primary.n_required.items()
    )
    lines = [
        f"The unit is the task: n = {n}. Paired Hoeffding intervals at {1 - rule.alpha:.0%}, simultaneous over "
        f"{len(rule.criteria)} criteria, have a half-width of {primary.half_width:.3f}.",
        f"The smallest observed difference that certifies the margin {margin:+.2f} is {primary.smallest:+.3f}"
        + ("." if primary.smallest < 1 else ", more than any difference can be."),
        f"For {DESIGN_POWER:.0%} power (standard deviation {DESIGN_SD} of a difference) a true difference of {needed}.",
    ]
    if not primary.feasible:
        lines.append(
            f"INFEASIBLE at {n}: not even a true difference of {max(DESIGN_EFFECTS):.2f} is certified above "
            f"{margin:+.2f} with {DESIGN_POWER:.0%} power, so 'inconclusive' is the likely outcome. The run may start."
        )
    for criterion in rule.criteria:
        if criterion.id != "primary":
            lines.append(
                f"{criterion.id} ({criterion.metric}): an observed difference above "
                f"{checks[criterion.id].smallest:+.3f} lies entirely above its margin {criterion.margin:+.2f}."
            )
    return tuple(lines)


def context_lines(exp: Experiment, source: "Source") -> tuple[str, ...]:
    """What of the policy and the tools the agent is not shown; nothing where it is shown all."""
    from paritygate.agent import prompt

    rule = prompt.context(exp.protocol.context.kind, source.wiki, source.tools).rule
    return (rule,) if rule else ()


def gold_lines(exp: Experiment, fits: tuple[forecast.GoldFit, ...]) -> tuple[str, ...]:
    """How many tasks fit as their own gold actions, in sentences."""
    rollout = exp.protocol.rollout
    return tuple(
        f"{fit.purpose}: as their own gold actions, confirmed once, {fit.in_tokens} of {fit.tasks} tasks fit into "
        f"{exp.max_seq_len:,} tokens and {fit.in_turns} into {rollout.max_turns} turns; the longest takes "
        f"{fit.longest:,} tokens."
        + (
            " Evaluation is bounded by the context that the service reports, not by max_seq_len."
            if fit.purpose == "evaluation"
            else " A longer training episode ends at max_seq_len and is counted (ended_by sequence_limit)."
        )
        for fit in fits
    )


def episode_budget_lines(exp: Experiment, budget: forecast.EpisodeBudget) -> tuple[str, ...]:
    """Whether an episode fits, in sentences."""
    rollout = exp.protocol.rollout
    worst = (
        f"{rollout.max_turns} turns of up to {rollout.max_tokens_per_turn} tokens can sample "
        f"{budget.sampled_at_most:,}, tool outputs and user messages not counted"
    )
    if budget.prompt is None or budget.left is None:
        return (
            f"The tokenizer of {exp.base_model} comes with the service: the service preflight counts the prompt "
            f"({exp.protocol.context.kind} context) against max_seq_len {budget.max_seq_len:,}.",
            worst[0].upper() + worst[1:] + ".",
        )
    fits = "they fit" if budget.fits else "more than there is room for, so an episode can end at the sequence limit"
    return (
        f"The {exp.protocol.context.kind} policy with its tools, rendered for {budget.renderer}, takes "
        f"{budget.prompt:,} tokens; max_seq_len {budget.max_seq_len:,} leaves {budget.left:,} for an episode.",
        f"{worst}: {fits}.",
        "A teacher context holds the policy and the feedback block before the episode: over the limit the block is "
        "shortened (sibling first, from its start), never the episode. Both shares are metrics of every step.",
    )
