"""The spec has no contradictions, every revision is pinned, and what it asks for beyond the experiment is recorded."""

from paritygate.experiment.run.outcome import Decided
from paritygate.experiment.run.state import State
from paritygate.spec import Experiment


async def spec_preflight(state: State) -> Decided:
    """Always passes here: a spec with findings never loads (exit 2), an unresolved one never starts (exit 3)."""
    exp = state.exp
    for key, what in deviations(exp):
        state.deviation("spec_preflight", key, what)
    return Decided(
        f"the spec has no findings: {exp.steps} steps x {exp.protocol.rollout.tasks_per_step} tasks = "
        f"{exp.dataset.n_examples}, batches of {exp.batch_size}, {len(exp.arms)} arms that differ in the advantage",
        "schema and cross-field checks passed and every revision is pinned",
        {"pinned": _revisions(state), "losses": list(exp.losses), "environment": state.options.environment},
        ["spec.json"],
    )


def deviations(exp: Experiment) -> list[tuple[str, str]]:
    """(kind, sentence) of everything in the spec that departs from the paper's method or from what was asked for."""
    advantage, temperature = exp.protocol.advantage, exp.protocol.rollout.temperature
    departures: list[tuple[str, str]] = []
    if any(arm.needs_teacher for arm in exp.arms):
        departures.append(("no_ema", "the teacher is no moving average of the policy, as the paper's is"))
    if advantage.success_wording:
        departures.append(
            ("success_wording", "a trajectory of reward 1 is not called unsuccessful in its teacher's context")
        )
    if advantage.student == "recomputed":
        departures.append(
            ("recomputed_student", "the advantage is teacher minus recomputed, not sampled, student logprobs")
        )
    if advantage.teacher != "current":
        departures.append(("teacher", "the teacher is the frozen initial policy, not the current one"))
    if temperature != 1.0:
        departures.append(
            ("temperature", f"episodes are sampled at temperature {temperature:g}; losses and logprobs are those of 1")
        )
    return departures


def _revisions(state: State) -> dict[str, str]:
    paths = state.exp.correctness_preflight.paths
    return {"dataset": state.exp.dataset.name} | {
        f"{path.id}.{key}": getattr(path, f"{key}_revision") for path in paths for key in ("baseline", "reference")
    }
