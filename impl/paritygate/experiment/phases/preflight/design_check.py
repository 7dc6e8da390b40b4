"""What the decision can show at this n, said before anything is spent."""

import dataclasses

from paritygate.experiment.plan import benchmark, forecast
from paritygate.experiment.plan.design import context_lines, design_checks, design_lines, episode_budget_lines
from paritygate.experiment.run.outcome import Decided
from paritygate.experiment.run.state import State


async def design_check(state: State) -> Decided:
    """What the decision can show at this n, the benchmark's defects and the room for an episode; never stops a run."""
    exp, source = state.exp, state.source
    checks = design_checks(exp)
    data, budget = benchmark.facts_of(exp, source), forecast.episode_budget(exp, source)
    primary, n = checks["primary"], exp.eval.n_examples
    lines = design_lines(exp, checks)
    notes = (*benchmark.lines_of(exp, data), *context_lines(exp, source), *episode_budget_lines(exp, budget))
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
            "room": dataclasses.asdict(budget),
            "asked": [dataclasses.asdict(row) for row in forecast.asked(exp)],
        },
    )
