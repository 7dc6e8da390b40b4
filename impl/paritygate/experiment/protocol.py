"""The protocol: one table, a row a phase, in the order in which a run takes them.

A row is the phase's name, its function (`phases/` holds a file a row, named as the row), and one sentence that
`--check` prints. The function is named by its import path and imported when the phase begins: a plan needs no torch.
"""

import dataclasses
import pkgutil
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from paritygate.experiment.run.outcome import Decided
from paritygate.experiment.run.state import State
from paritygate.spec.experiment import Experiment

PhaseFunction = Callable[[State], Awaitable[Decided]]
EarlyFunction = Callable[[State], Coroutine[Any, Any, object]]
PACKAGE = "paritygate.experiment.phases"


@dataclasses.dataclass(frozen=True)
class Phase:
    """One row of the protocol. `function`: path below `phases/`; `applies`: whether this experiment has the phase.

    early: path of what may be computed for the phase while the one before it goes on, where that costs nothing; it
    decides and writes nothing, and counts where the phase takes it. Empty where there is nothing of that kind.
    """

    name: str
    function: str
    sentence: str
    applies: Callable[[Experiment], bool] = lambda _: True
    early: str = ""

    def load(self) -> PhaseFunction:
        """The phase's function: the run's state in, what was decided out; raises PhaseStopped (exit 4) at a gate."""
        return cast(PhaseFunction, pkgutil.resolve_name(f"{PACKAGE}.{self.function}"))

    def load_early(self) -> EarlyFunction | None:
        """What may be computed early, for `State.begin_early`; None where the phase has nothing."""
        return cast(EarlyFunction, pkgutil.resolve_name(f"{PACKAGE}.{self.early}")) if self.early else None


def _has_warm_start(exp: Experiment) -> bool:
    return exp.protocol.warm_start is not None


PHASES: tuple[Phase, ...] = (
    Phase(
        "spec_preflight",
        "preflight.spec_preflight:spec_preflight",
        "schema and cross-field findings: passed",
    ),
    Phase(
        "design_check",
        "preflight.design_check:design_check",
        "what the decision can show; printed below",
    ),
    Phase(
        "correctness_preflight",
        "preflight.correctness_preflight:correctness_preflight",
        "parity green for this tree; both advantage paths against recorded numbers (exit 3)",
    ),
    Phase(
        "service_preflight",
        "preflight.service_preflight:service_preflight",
        "reachable, capabilities, model names as reported; one trajectory through everything (exit 5)",
    ),
    Phase(
        "service_proof",
        "preflight.service_proof:service_proof",
        "losses, gradients, optimiser, states and sampling of the service against their definitions (exit 3)",
    ),
    Phase(
        "warm_start",
        "warm_start:warm_start",
        "supervised steps on gold episodes, the same weights for every arm",
        applies=_has_warm_start,
        early="warm_start:begin",
    ),
    Phase(
        "restoration_preflight",
        "preflight.restoration_preflight:restoration_preflight",
        "the arms start from one state, before and after an identical update (exit 4)",
    ),
    Phase(
        "forced_checks",
        "preflight.forced_checks:forced_checks",
        "a sibling changes advantages, an empty block leaves the noise floor",
    ),
    Phase(
        "timing_pilot",
        "timing_pilot:timing_pilot",
        "one step timed; projected cost against the budget (exit 4)",
    ),
    Phase(
        "activation_pilot",
        "activation_pilot:activation_pilot",
        "the gates; fallbacks in their fixed order; never relaxed (exit 4)",
    ),
    Phase(
        "train",
        "train:train",
        "every arm on the same tasks in the same order (exit 4 on NaN or a diverging advantage)",
    ),
    Phase(
        "evaluate",
        "evaluate:evaluate",
        "the held-out tasks, greedy, the same judge; nothing imputed",
    ),
    Phase(
        "decide",
        "decide:decide",
        "paired Hoeffding, simultaneous over the criteria",
    ),
    Phase(
        "report",
        "report:report",
        "report.html and receipt.json",
    ),
)
