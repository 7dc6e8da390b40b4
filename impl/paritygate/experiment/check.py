"""`--check`: the whole plan of an experiment from its spec and the benchmark's data; no service, no GPU, no refusal."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paritygate.address import checked_url
from paritygate.errors import BadInputError, ParityGateError
from paritygate.experiment.plan import benchmark, forecast
from paritygate.experiment.plan.design import (
    context_lines,
    design_checks,
    design_lines,
    episode_budget_lines,
    gold_lines,
)
from paritygate.experiment.plan.price import cost_at_most, price_lines
from paritygate.experiment.protocol import PHASES
from paritygate.experiment.run.entry_points import require
from paritygate.experiment.step.gates import wanted
from paritygate.receipts import require_parity
from paritygate.spec import Experiment


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
    exp: Experiment,
    *,
    root: Path | None = None,
    device: str = "cpu",
    tau_bench: str | Path | None = None,
    prices: Path | None = None,
) -> Plan:
    """Everything that can be said of a run without a service; what is missing is said, not refused.

    root: the checkout whose parity receipts are looked at (None: they are not). prices: a price table other than the
    spec's; SpecError (exit 2) where the table is not there or wrong.
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
    budget = forecast.episode_budget(exp, source)
    gold = forecast.gold_fits(exp, source) if source is not None else ()
    cost = cost_at_most(exp, budget, gold, prices)
    sections = (
        Section(exp.title, _overview(exp, device)),
        Section("Phases and gates", _phases(exp)),
        Section("Design check", design_lines(exp, checks)),
        Section(
            "The benchmark", benchmark.lines_of(exp, data) if source is not None else (f"not looked at: {absent}",)
        ),
        Section("Room for an episode", (*abridged, *episode_budget_lines(exp, budget), *gold_lines(exp, gold))),
        Section("Asked of the service", _asked(exp)),
        Section("The price", price_lines(exp, cost)),
        Section("Before it may start", _conditions(exp, root, device)),
    )
    facts = {
        "spec": str(exp.path),
        "unresolved": list(exp.unresolved),
        "design_check": {name: check.to_json() for name, check in checks.items()},
        "benchmark": data,
        "room": dataclasses.asdict(budget),
        "gold_fits": [dataclasses.asdict(fit) for fit in gold],
        "episodes": forecast.episodes(exp),
        "asked": [dataclasses.asdict(row) for row in forecast.asked(exp)],
        "price": None if cost is None else cost.to_json(),
        "frozen_spec": dict(exp.frozen),
    }
    return Plan(sections, facts)


def _overview(exp: Experiment, device: str) -> tuple[str, ...]:
    protocol = exp.protocol
    user = protocol.user.model if protocol.user.kind == "model" else "scripted"
    judge = protocol.judge.model if protocol.judge.kind == "model" else "rule-based"
    arms = ", ".join(f"{arm.name} ({arm.loss or arm.kind})" for arm in exp.arms)
    several = exp.eval.rollouts_per_task
    drawn = "greedy" if several == 1 else f"{several} rollouts of each at temperature {protocol.rollout.temperature:g}"
    return (
        f"spec: {exp.path}",
        f"policy: {exp.base_model}, LoRA rank {exp.lora_rank}, Adam lr {exp.optimizer.lr:g}",
        f"user: {user}; judge: {judge}",
        f"arms: {arms}; decided: {exp.comparison.treatment} against {exp.comparison.baseline}",
        f"{exp.steps} steps an arm x {protocol.rollout.tasks_per_step} tasks x {protocol.rollout.rollouts_per_task} "
        f"rollouts; evaluation: {exp.eval.n_examples} {protocol.evaluation.split} tasks, {drawn}",
        f"service: {_service(exp)}",
        f"budget: {exp.budget.gpu_hours:g} GPU hours, {exp.budget.max_wall_minutes:g} minutes",
    )


def _service(exp: Experiment) -> str:
    address, embedded = os.environ.get("TINKER_BASE_URL"), exp.protocol.service.embedded_model
    if address:
        try:
            checked_url(address, "TINKER_BASE_URL")
        except BadInputError as error:
            return str(error)
        return f"{address} (TINKER_BASE_URL; not asked for this plan)"
    return f"the embedded server with {embedded}" if embedded else "set TINKER_BASE_URL; no embedded model stands in"


def _phases(exp: Experiment) -> tuple[str, ...]:
    phases = [phase for phase in PHASES if phase.applies(exp)]
    lines = [f"{position:2}. {phase.name}: {phase.sentence}" for position, phase in enumerate(phases, start=1)]
    for check in exp.activation_gate.checks:
        lines.append(f"    gate: {check.metric} {wanted(check)}")
    return tuple(lines)


def _asked(exp: Experiment) -> tuple[str, ...]:
    return tuple(
        f"{'at most ' if row.at_most else ''}{row.times:,} x {row.what} ({row.model})" for row in forecast.asked(exp)
    )


def _conditions(exp: Experiment, root: Path | None, device: str) -> tuple[str, ...]:
    needed = f"a green parity receipt for exactly this tree, for the losses {', '.join(exp.losses)} on {device}"
    lines = [needed if root is None else f"{needed}: {_parity(exp, root, device)}"]
    for name in exp.entry_points:
        lines.append(f"a green parity receipt of its own repository for the loss {name}: {_of_entry_point(name)}")
    if os.environ.get("TINKER_BASE_URL") or exp.protocol.service.embedded_model is None:
        lines.append("a full run: parity is shown again in a clean worktree (or --trust-receipt with a signed receipt)")
    if exp.unresolved:
        places = ", ".join(exp.unresolved)
        lines.insert(0, f"UNRESOLVED: the spec is unresolved, no revision is pinned at {places}; a run is refused")
    return tuple(lines)


def _of_entry_point(name: str) -> str:
    try:
        return f"there is one, {require(name).path.name}"
    except ParityGateError as refusal:
        return f"not now ({refusal})"


def _parity(exp: Experiment, root: Path, device: str) -> str:
    try:
        return f"there is one, {require_parity(root, exp.losses, device).path.name}"
    except ParityGateError as refusal:
        return f"not now ({refusal})"
