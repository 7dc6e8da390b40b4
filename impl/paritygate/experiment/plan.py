"""`--check`: the whole plan of an experiment from its spec and the benchmark's data; no service, no GPU, no refusal."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritygate.errors import BadInputError
from paritygate.experiment import forecast
from paritygate.experiment.phases import PHASES
from paritygate.spec import Experiment, TaskSelection
from paritygate.spec.findings import SPLIT_SIZES
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


def plan(exp: Experiment, *, device: str = "cpu", tau_bench: str | Path | None = None) -> Plan:
    """Everything that can be said of a run without a service; what is missing is said, not refused."""
    from paritygate.retail import load

    source, absent = None, ""
    try:
        source = load(tau_bench)
    except BadInputError as error:
        absent = str(error)
    checks = design_checks(exp)
    data = benchmark_facts(exp, source) if source is not None else {}
    abridged = context_lines(exp, source) if source is not None else ()
    space = forecast.room(exp, source)
    sections = (
        Section(exp.title, _overview(exp, device)),
        Section("Phases and gates", _phases(exp)),
        Section("Design check", design_lines(exp, checks)),
        Section("The benchmark", benchmark_lines(exp, data) if source is not None else (f"not looked at: {absent}",)),
        Section("Room for an episode", (*abridged, *room_lines(exp, space))),
        Section("Asked of the service", _asked(exp)),
        Section("Before it may start", _conditions(exp)),
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


def benchmark_facts(exp: Experiment, source: "Source") -> dict[str, Any]:
    """What is known of the tasks that this experiment trains and evaluates on, computed from the data."""
    from paritygate.retail import facts

    evaluation, train = exp.protocol.evaluation, exp.protocol.train
    held_out, trained = _indices(evaluation), _indices(train)
    other = "train" if evaluation.split != "train" else None
    return {
        "provenance": source.place,
        "evaluation_split": evaluation.split,
        "train_split": train.split,
        "do_nothing_evaluated": _among(facts.do_nothing(source, evaluation.split), held_out),
        "do_nothing_split": facts.do_nothing(source, evaluation.split),
        "do_nothing_trained": _among(facts.do_nothing(source, train.split), trained),
        "failing_gold_evaluated": _among(facts.failing_gold(source, evaluation.split, writes_only=True), held_out),
        "failing_gold_trained": _among(facts.failing_gold(source, train.split), trained),
        "same_gold_evaluated": [list(pair) for pair in facts.same_gold(source, evaluation.split, held_out)],
        "same_gold_split": [list(pair) for pair in facts.same_gold(source, evaluation.split)] if other else [],
        "split_tasks": len(source.tasks(evaluation.split)),
        "train_split_writes_only": facts.writes_only(source, train.split),
        "users_evaluated": len(facts.users(source, evaluation.split, held_out)),
        "split_overlap": dataclasses.asdict(facts.overlap(source, evaluation.split, other)) if other else None,
        "users_shared_with_training": len(
            set(facts.users(source, evaluation.split, held_out)) & set(facts.users(source, train.split, trained))
        ),
    }


def benchmark_lines(exp: Experiment, data: dict[str, Any]) -> tuple[str, ...]:
    """What an honest report must say of the tasks, in sentences."""
    n, split = exp.eval.n_examples, data["evaluation_split"]
    idle, pairs, whole = data["do_nothing_evaluated"], data["same_gold_evaluated"], data["do_nothing_split"]
    elsewhere = [pair for pair in data["same_gold_split"] if pair not in pairs]
    lines = [
        f"Doing nothing scores 1.0 on {len(idle)} of the {n} evaluated tasks ({len(idle) / n:.1%})"
        + (f": {_listed(idle)}" if idle else "")
        + f", and on {len(whole)} of the {data['split_tasks']} {split} tasks ({len(whole) / data['split_tasks']:.1%}).",
        f"The evaluated tasks hold {data['users_evaluated']} users; pairs with the same gold: "
        f"{_pairs(pairs)}"
        + (f" (elsewhere in the split: {_pairs(elsewhere)})" if elsewhere else "")
        + ". They are not independent draws.",
        f"Gold writes that themselves fail: {_listed(data['failing_gold_evaluated'])} evaluated, "
        f"{_listed(data['failing_gold_trained'])} trained on (flagged, not dropped).",
    ]
    shared = data["split_overlap"]
    if shared is not None:
        lines.append(
            f"{shared['orders_shared']} of {shared['orders']} {split} write-orders and {shared['users_shared']} of "
            f"{shared['users']} {split} users also occur in the train tasks: the splits share customers and orders."
        )
    else:
        lines.append(
            f"Evaluation and training both use the {split} split, on disjoint tasks; "
            f"{data['users_shared_with_training']} users occur in both."
        )
    if data["train_split_writes_only"]:
        lines.append(
            f"The gold of every {data['train_split']} task is writes only: no reads, no expected outputs, no transfers."
        )
    if data["do_nothing_trained"]:
        lines.append(f"Doing nothing also scores 1.0 on training tasks {_listed(data['do_nothing_trained'])}.")
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


def _conditions(exp: Experiment) -> tuple[str, ...]:
    lines = ["a green parity receipt for exactly this tree, for the losses " + ", ".join(exp.losses)]
    if os.environ.get("TINKER_BASE_URL") or exp.protocol.service.embedded_model is None:
        lines.append("a full run: parity is shown again in a clean worktree (or --trust-receipt with a signed receipt)")
    if exp.unresolved:
        lines.insert(0, f"UNRESOLVED: no revision is pinned at {', '.join(exp.unresolved)}; a full run is refused")
    return tuple(lines)


def _indices(selection: TaskSelection) -> tuple[int, ...]:
    return selection.indices(SPLIT_SIZES[selection.split])


def _among(found: Sequence[int], chosen: Sequence[int]) -> list[int]:
    return sorted(set(found) & set(chosen))


def _pairs(pairs: Sequence[Sequence[int]]) -> str:
    return ", ".join("/".join(map(str, pair)) for pair in pairs) or "none"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
