"""The two phases that cost nothing: the spec has no contradictions, and what its decision can show is said first."""

import dataclasses

from paritygate.experiment import benchmark, forecast, plan
from paritygate.experiment.state import Decided, State
from paritygate.spec import Advantage


async def spec_preflight(state: State) -> Decided:
    """Always passes here: a spec with findings never loads (exit 2), an unresolved one never starts (exit 3)."""
    exp = state.exp
    for key, what in deviations(exp.protocol.advantage):
        state.deviation("spec_preflight", key, what)
    return Decided(
        f"the spec has no findings: {exp.steps} steps x {exp.protocol.rollout.tasks_per_step} tasks = "
        f"{exp.dataset.n_examples}, batches of {exp.batch_size}, {len(exp.arms)} arms that differ in the advantage",
        "schema and cross-field checks passed and every revision is pinned",
        {"pinned": _revisions(state), "losses": list(exp.losses)},
        ["spec.json"],
    )


async def design_check(state: State) -> Decided:
    """What the decision can show at this n, the benchmark's defects and the room for an episode; never stops a run."""
    from paritygate.experiment.data import load_source

    exp, source = state.exp, load_source(state.options)
    checks = plan.design_checks(exp)
    data, space = benchmark.facts_of(exp, source), forecast.room(exp, source)
    primary, n = checks["primary"], exp.eval.n_examples
    lines = plan.design_lines(exp, checks)
    notes = (*benchmark.lines_of(exp, data), *plan.context_lines(exp, source), *plan.room_lines(exp, space))
    for line in (*lines, *notes):
        state.progress.line(f"      {line}")
    return Decided(
        f"half-width {primary.half_width:.3f} at n = {n}; "
        + ("the margin can be certified" if primary.feasible else f"INFEASIBLE at {n}, so 'inconclusive' is likely"),
        "computed from the spec and the benchmark before anything is spent; it never stops a run",
        {
            "lines": list(lines),
            "notes": list(notes),
            "criteria": {name: check.to_json() for name, check in checks.items()},
            "benchmark": data,
            "room": dataclasses.asdict(space),
            "asked": [dataclasses.asdict(row) for row in forecast.asked(exp)],
        },
    )


def deviations(advantage: Advantage) -> list[tuple[str, str]]:
    """(key, sentence) of every option of the advantage that departs from the experiment as it was asked for."""
    found: list[tuple[str, str]] = []
    if advantage.success_wording:
        found.append(
            ("success_wording", "a trajectory of reward 1 is not called unsuccessful in its teacher's context")
        )
    if advantage.student == "recomputed":
        found.append(("recomputed_student", "the advantage is teacher minus recomputed, not sampled, student logprobs"))
    if advantage.teacher != "current":
        found.append(("teacher", "the teacher is the frozen initial policy, not the current one"))
    return found


def _revisions(state: State) -> dict[str, str]:
    paths = state.exp.correctness_preflight.paths
    return {"dataset": state.exp.dataset.name} | {
        f"{path.id}.{key}": getattr(path, f"{key}_revision") for path in paths for key in ("baseline", "reference")
    }
