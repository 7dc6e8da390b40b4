"""`--check`: the whole plan of an experiment from its spec and the benchmark's data; no service, no GPU, no refusal."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritygate.errors import BadInputError, ParityGateError
from paritygate.experiment import benchmark, forecast
from paritygate.experiment.phases import PHASES
from paritygate.receipts import require_parity
from paritygate.spec import Experiment
from paritygate.statistics import DesignCheck, design_check

if TYPE_CHECKING:
    from paritygate.retail import Source

DESIGN_POWER, DESIGN_SD = 0.8, 0.6
DESIGN_EFFECTS = (0.05, 0.10, 0.15)


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the plan: a title and sentences."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do, for a person (`text`) and for a machine (`to_json`)."""

    sections: tuple[Section, ...]
    facts: dict[str, Any]

    def text(self) -> str:
        """The plan in plain words."""
        return "\n\n".join("\n  ".join([section.title, *section.lines]) for section in self.sections)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return {"plan": [dataclasses.asdict(section) for section in self.sections], **self.facts}


def plan(
    exp: Experiment, *, root: Path | None = None, device: str = "cpu", tau_bench: str | Path | None = None
) -> Plan:
    """Everything that can be said of a run without a service; what is missing is said, not refused.

    root: the checkout whose parity receipts are looked at (None: they are not).
    """
    from paritygate.retail import load

    source, absent = None, ""
    try:
        source = load(tau_bench)
    except BadInputError as error:
        absent = str(error)
    checks = design_checks(exp)
    data = benchmark.facts_of(exp, source) if source is not None else {}
    abridged = context_lines(exp, source) if source is not None else ()
    space = forecast.room(exp, source)
    sections = (
        Section(exp.title, _overview(exp, device)),
        Section("Phases and gates", _phases(exp)),
        Section("Design check", design_lines(exp, checks)),
        Section(
            "The benchmark", benchmark.lines_of(exp, data) if source is not None else (f"not looked at: {absent}",)
        ),
        Section("Room for an episode", (*abridged, *room_lines(exp, space))),
        Section("Asked of the service", _asked(exp)),
        Section("Before it may start", _conditions(exp, root, device)),
    )
    facts = {
        "spec": str(exp.path),
        "unresolved": list(exp.unresolved),
        "design_check": {name: check.to_json() for name, check in checks.items()},
        "benchmark": data,
        "room": dataclasses.asdict(space),
        "episodes": forecast.episodes(exp),
        "asked": [dataclasses.asdict(row) for row in forecast.asked(exp)],
        "frozen_spec": dict(exp.frozen),
    }
    return Plan(sections, facts)


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


def room_lines(exp: Experiment, space: forecast.Room) -> tuple[str, ...]:
    """Whether an episode fits, in sentences."""
    rollout = exp.protocol.rollout
    worst = (
        f"{rollout.max_turns} turns of up to {rollout.max_tokens_per_turn} tokens can sample "
        f"{space.sampled_at_most:,}, tool outputs and user messages not counted"
    )
    if space.prompt is None or space.left is None:
        return (
            f"The tokenizer of {exp.base_model} comes with the service: the service preflight counts the prompt "
            f"({exp.protocol.context.kind} context) against max_seq_len {space.max_seq_len:,}.",
            worst[0].upper() + worst[1:] + ".",
        )
    fits = "they fit" if space.fits else "more than there is room for, so an episode can end at the sequence limit"
    return (
        f"The {exp.protocol.context.kind} policy with its tools, rendered for {space.renderer}, takes {space.prompt:,} "
        f"tokens; max_seq_len {space.max_seq_len:,} leaves {space.left:,} for an episode.",
        f"{worst}: {fits}.",
        "A teacher context holds the policy and the feedback block before the episode: over the limit the block is "
        "shortened (sibling first, from its start), never the episode. Both shares are metrics of every step.",
    )


def _overview(exp: Experiment, device: str) -> tuple[str, ...]:
    protocol = exp.protocol
    user = protocol.user.model if protocol.user.kind == "model" else "scripted"
    judge = protocol.judge.model if protocol.judge.kind == "model" else "rule-based"
    arms = ", ".join(f"{arm.name} ({arm.kind})" for arm in exp.arms)
    return (
        f"spec: {exp.path}",
        f"policy: {exp.base_model}, LoRA rank {exp.lora_rank}, Adam lr {exp.optimizer.lr:g}",
        f"user: {user}; judge: {judge}",
        f"arms: {arms}; decided: {exp.comparison.treatment} against {exp.comparison.baseline}",
        f"{exp.steps} steps an arm x {protocol.rollout.tasks_per_step} tasks x {protocol.rollout.rollouts_per_task} "
        f"rollouts; evaluation: {exp.eval.n_examples} {protocol.evaluation.split} tasks, greedy",
        f"service: {_service(exp)}",
        f"losses run on {device}; budget: {exp.budget.gpu_hours:g} GPU hours, {exp.budget.max_wall_minutes:g} minutes",
    )


def _service(exp: Experiment) -> str:
    address, embedded = os.environ.get("TINKER_BASE_URL"), exp.protocol.service.embedded_model
    if address:
        return f"{address} (TINKER_BASE_URL; not asked for this plan)"
    return f"the embedded server with {embedded}" if embedded else "set TINKER_BASE_URL; no embedded model stands in"


SAYS = {
    "spec_preflight": "schema and cross-field findings: passed",
    "design_check": "what the decision can show; printed below",
    "correctness_preflight": "parity green for this tree; both loss paths through a real model (exit 3)",
    "service_preflight": "reachable, capabilities, model names as reported; one trajectory through everything (exit 5)",
    "warm_start": "supervised steps on gold episodes, the same weights for every arm",
    "restoration_preflight": "the arms start from one state, before and after an identical update (exit 4)",
    "forced_checks": "a sibling changes advantages, an empty block leaves the noise floor, gradients on the mask only",
    "timing_pilot": "one step timed; projected cost against the budget (exit 4)",
    "activation_pilot": "the gates; fallbacks in their fixed order; never relaxed (exit 4)",
    "train": "every arm on the same tasks in the same order (exit 4 on NaN or a diverging advantage)",
    "evaluate": "the held-out tasks, greedy, the same judge; nothing imputed",
    "decide": "paired Hoeffding, simultaneous over the criteria",
    "report": "report.html and receipt.json",
}


def _phases(exp: Experiment) -> tuple[str, ...]:
    names = [phase.name for phase in PHASES if phase.applies(exp)]
    lines = [f"{position:2}. {name}: {SAYS[name]}" for position, name in enumerate(names, start=1)]
    for check in exp.activation_gate.checks:
        bounds = [f">= {check.min:g}"] if check.min is not None else []
        bounds += [f"<= {check.max:g}"] if check.max is not None else []
        wanted = " and ".join(bounds) if check.one_of is None else "one of " + ", ".join(check.one_of)
        lines.append(f"    gate: {check.metric} {wanted}")
    return tuple(lines)


def _asked(exp: Experiment) -> tuple[str, ...]:
    return tuple(
        f"{'at most ' if row.at_most else ''}{row.times:,} x {row.what} ({row.model})" for row in forecast.asked(exp)
    )


def _conditions(exp: Experiment, root: Path | None, device: str) -> tuple[str, ...]:
    needed = f"a green parity receipt for exactly this tree, for the losses {', '.join(exp.losses)} on {device}"
    lines = [needed if root is None else f"{needed}: {_parity(exp, root, device)}"]
    if os.environ.get("TINKER_BASE_URL") or exp.protocol.service.embedded_model is None:
        lines.append("a full run: parity is shown again in a clean worktree (or --trust-receipt with a signed receipt)")
    if exp.unresolved:
        places = ", ".join(exp.unresolved)
        lines.insert(0, f"UNRESOLVED: the spec is unresolved, no revision is pinned at {places}; a run is refused")
    return tuple(lines)


def _parity(exp: Experiment, root: Path, device: str) -> str:
    try:
        return f"there is one, {require_parity(root, exp.losses, device).path.name}"
    except ParityGateError as refusal:
        return f"not now ({refusal})"
