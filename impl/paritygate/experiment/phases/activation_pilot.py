"""The activation pilot: does each arm act at all? Gates over two steps an arm, fallbacks in a fixed order, a cap."""

import dataclasses
from collections.abc import Sequence

from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.options import Settings
from paritygate.experiment.run.outcome import Decided, PhaseStopped
from paritygate.experiment.run.state import State
from paritygate.experiment.step.arm_run import ArmRun
from paritygate.experiment.step.collector import Collector
from paritygate.experiment.step.gates import GateResult, check_gates, failures
from paritygate.experiment.step.schedule import advance
from paritygate.spec.experiment import Arm

PHASE = "activation_pilot"
DIVERGENCE = "sdpo_mean_abs_token_adv"


class FallbacksTimedOut(Exception):  # noqa: N818 - an outcome, no error
    """The minutes that all fallbacks have together are spent: the one under way takes no further step."""


async def activation_pilot(state: State) -> Decided:
    """Pilot every arm; on a failing gate try the fallbacks; raise PhaseStopped when none passes. Gates never move."""
    settings = state.settings()
    first = await pilot(state, state.exp.arms, settings, "")
    failing = [arm for arm in state.exp.arms if failures(first[arm.name])]
    facts: Record = {"gates": {name: _table(results) for name, results in first.items()}, "fallbacks": []}
    if not failing:
        facts["settings"] = dataclasses.asdict(settings)
        return _decided(state, f"every gate passes in both pilots of {state.exp.protocol.pilot.steps} steps", facts)
    diverged = [(name, r) for name, results in first.items() for r in failures(results) if is_divergence(r, state)]
    if diverged:
        name, result = diverged[0]
        what = f"the activation pilot stopped the run: arm {name}, {result.sentence()}"
        state.deviation(PHASE, "divergence", what)
        why = "a mean |advantage| over its gate is divergence: stop and record; no fallback, no tuning"
        raise PhaseStopped(Decided(what, why, facts, state.journal.files(PHASE)))
    return await _fall_back(state, failing, settings, facts)


def is_divergence(result: GateResult, state: State) -> bool:
    """Whether a failed gate is that of the mean |teacher - student|, passed upwards (or by NaN), not from below."""
    if result.metric != DIVERGENCE or not isinstance(result.measured, int | float):
        return False
    bounds = [check.max for check in state.exp.activation_gate.checks if check.metric == result.metric]
    return any(bound is not None and not result.measured <= bound for bound in bounds)


async def pilot(state: State, arms: Sequence[Arm], settings: Settings, variant: str) -> dict[str, list[GateResult]]:
    """The gates of each arm over its pilot steps on the first training tasks; the clients are thrown away."""
    runs = [await ArmRun.open(state, PHASE, arm, settings, variant) for arm in arms]

    def within_the_cap() -> None:
        if variant and fallback_seconds(state) > 60 * state.exp.protocol.pilot.max_fallback_minutes:
            raise FallbacksTimedOut

    await advance(runs, state.exp.protocol.pilot.steps, await Collector.of(state, settings), before=within_the_cap)
    checks = state.exp.activation_gate.checks
    return {run.arm.name: check_gates(checks, run.measured()) for run in runs}


async def _fall_back(state: State, failing: list[Arm], settings: Settings, facts: Record) -> Decided:
    spec = state.exp.protocol.pilot
    spent_steps = 0
    for name in spec.fallbacks:
        attempt: Record = {"fallback": name, "arms": [arm.name for arm in failing]}
        facts["fallbacks"].append(attempt)
        changed = fallback_settings(name, settings, spec.fallback_max_turns)
        reason = _not_tried(state, name, failing, spent_steps)
        if reason is not None:
            attempt["outcome"] = reason
            continue
        try:
            results = await pilot(state, failing, changed, name)
        except FallbacksTimedOut:
            attempt["outcome"] = f"stopped between its steps: {_minutes(state)}"
            continue
        spent_steps += spec.steps * len(failing)
        attempt["gates"] = {arm: _table(result) for arm, result in results.items()}
        if any(failures(result) for result in results.values()):
            attempt["outcome"] = "a gate fails"
            continue
        attempt["outcome"] = "every gate passes"
        facts["settings"] = dataclasses.asdict(changed)
        what = f"fallback {name} adopted for both arms: max_turns {changed.max_turns}, teacher {changed.teacher}"
        state.deviation(PHASE, "fallback", what)
        return _decided(state, what, facts, why=_failed_sentence(state, facts))
    tried = "; ".join(f"{attempt['fallback']}: {attempt['outcome']}" for attempt in facts["fallbacks"])
    raise PhaseStopped(
        Decided(
            f"the activation pilot stopped the run: {_failed_sentence(state, facts)}; fallbacks in order: {tried}",
            "a gate failed in the pilot and under every fallback that the cap allows; gates are never relaxed",
            facts,
            state.journal.files(PHASE),
        )
    )


def fallback_settings(name: str, settings: Settings, max_turns: int) -> Settings:
    """The settings under one fallback: alternatives, not cumulative."""
    if name == "frozen_initial_teacher":
        return dataclasses.replace(settings, teacher="frozen_initial")
    return dataclasses.replace(settings, max_turns=max_turns)


def _not_tried(state: State, name: str, failing: list[Arm], spent_steps: int) -> str | None:
    """Why a fallback is not piloted: it cannot touch a failing arm, it is what already runs, or the cap is reached."""
    spec = state.exp.protocol.pilot
    without = [arm.name for arm in failing if not arm.needs_teacher]
    if name == "frozen_initial_teacher" and without:
        return f"not piloted: {', '.join(without)} has no teacher, so the gate would be measured again unchanged"
    if fallback_settings(name, state.settings(), spec.fallback_max_turns) == state.settings():
        return "not piloted: the spec already runs this way"
    if spent_steps + spec.steps * len(failing) > spec.max_fallback_steps:
        return f"not piloted: the fallbacks together get {spec.max_fallback_steps} steps"
    if fallback_seconds(state) > 60 * spec.max_fallback_minutes:
        return f"not piloted: {_minutes(state)}"
    return None


def _minutes(state: State) -> str:
    allowed = state.exp.protocol.pilot.max_fallback_minutes
    return f"the fallbacks together get {allowed:g} minutes, {fallback_seconds(state) / 60:.1f} are spent"


def fallback_seconds(state: State) -> float:
    """Wall time of the fallbacks' pilots so far, over kills and resumes."""
    return state.account.seconds(PHASE, fallbacks=True)


def _failed_sentence(state: State, facts: Record) -> str:
    rows = [(arm, row) for arm, table in facts["gates"].items() for row in table if not row["passed"]]
    return ", ".join(f"{row['sentence']} ({arm})" for arm, row in rows)


def _table(results: list[GateResult]) -> list[Record]:
    return [{**dataclasses.asdict(result), "sentence": result.sentence()} for result in results]


def _decided(
    state: State, what: str, facts: Record, why: str = "the gates of the spec, measured on train tasks"
) -> Decided:
    return Decided(what, why, facts, state.journal.files(PHASE))
