"""An experiment as frozen data; field names are the keys of the spec file (spec/schema/experiment.schema.json)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paritygate.spec.protocol import Comparison, Protocol

ArmKind = Literal["grpo", "sdpo_token", "sdpo_sequence", "sdpo_logit", "hybrid", "entry_point"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One training arm: nothing but `kind` (and what belongs to it) may differ between arms.

    `hybrid_weight` is lambda of lambda A_grpo + (1 - lambda) A_sdpo; `top_k` is the teacher's top-k of `sdpo_logit`.
    `loss` is the PACKAGE:LOSS of an `entry_point`, proven in its own repository; `teacher`: whether it reads a teacher.
    """

    name: str
    advantage: str
    kind: ArmKind
    lr: float
    seed: int
    hybrid_weight: float
    top_k: int
    loss: str | None = None
    teacher: bool = False

    @property
    def needs_teacher(self) -> bool:
        """Whether the arm's advantage scores trajectories under the feedback-conditioned teacher."""
        return self.teacher if self.kind == "entry_point" else self.kind != "grpo"

    @property
    def losses(self) -> tuple[str, ...]:
        """Names in this repository's spec/losses.json that this arm stands on."""
        names = {"grpo": ("grpo",), "hybrid": ("grpo", "sdpo"), "entry_point": ()}.get(self.kind, ("sdpo",))
        return (*names[:1], "policy_gradient", *names[1:])


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One bound on a metric of the activation pilot: `min` and `max` are inclusive, `one_of` lists allowed names."""

    metric: str
    measures: str
    min: float | None
    max: float | None
    one_of: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ActivationGate:
    """The gates of the activation pilot; `applicable` false skips them, which the spec must give a reason for."""

    applicable: bool
    checks: tuple[GateCheck, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|actual - expected| <= atol + rtol |expected|, and cosine >= min_cosine where one is given."""

    rtol: float
    atol: float
    min_cosine: float | None


@dataclass(frozen=True, slots=True)
class CorrectnessPath:
    """One path of the correctness preflight, its two revisions and its four tolerances."""

    id: str
    kind: str
    baseline_revision: str
    reference_revision: str
    tolerances: Mapping[str, Tolerance]


@dataclass(frozen=True, slots=True)
class CorrectnessPreflight:
    """What must be shown right before a full run."""

    paths: tuple[CorrectnessPath, ...]
    required: bool
    status: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """What is trained on; its name carries the pinned commit."""

    name: str
    split: str
    n_examples: int


@dataclass(frozen=True, slots=True)
class Eval:
    """The held-out evaluation; tasks stay the unit of the decision whatever `rollouts_per_task` is."""

    benchmark: str
    metric: str
    n_examples: int
    rollouts_per_task: int


@dataclass(frozen=True, slots=True)
class Criterion:
    """One criterion of the decision: treatment minus baseline of `metric`, against `margin`."""

    id: str
    metric: str
    margin: float
    bounds: tuple[float, ...]
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DecisionRule:
    """The pre-declared decision: simultaneous paired Hoeffding intervals at `alpha` over the criteria."""

    alpha: float
    criteria: tuple[Criterion, ...]
    estimand: str
    method: str
    unit: str
    seeds: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What the run may cost in time; prices: the name of the table that says what it costs in money, None without."""

    gpu_hours: float
    max_wall_minutes: float
    prices: str | None = None


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Adam as both arms pass it, explicitly."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    lora_rank: int


@dataclass(frozen=True, slots=True)
class RestorationArm:
    """One arm's optimizer in the restoration preflight."""

    name: str
    optimizer: str
    optimizer_config: OptimizerConfig


@dataclass(frozen=True, slots=True)
class RestorationGroup:
    """Arms that must start from the same state."""

    arms: tuple[RestorationArm, ...]


@dataclass(frozen=True, slots=True)
class RestorationPreflight:
    """Whether the arms are checked to start from the same state."""

    applicable: bool
    fixed_batch_required: bool
    groups: tuple[RestorationGroup, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The one optimizer of all arms."""

    name: str
    lr: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """A validated experiment; `frozen` is the whole file with every default written out (JSON data)."""

    path: Path
    frozen: Mapping[str, Any]
    unresolved: tuple[str, ...]  # JSON pointers of revisions that are not pinned
    title: str
    base_model: str
    lora_rank: int
    max_seq_len: int
    steps: int
    batch_size: int
    optimizer: Optimizer
    arms: tuple[Arm, ...]
    dataset: Dataset
    eval: Eval
    activation_gate: ActivationGate
    correctness_preflight: CorrectnessPreflight
    restoration_preflight: RestorationPreflight
    decision_rule: DecisionRule
    budget: Budget
    feasibility_required: bool
    experiment_features: Mapping[str, bool]
    protocol: Protocol

    @property
    def comparison(self) -> Comparison:
        """Which arm is treatment and which baseline."""
        return self.protocol.comparison

    @property
    def adam(self) -> OptimizerConfig:
        """Adam's numbers, the same for every arm (a finding of the spec preflight otherwise)."""
        return self.restoration_preflight.groups[0].arms[0].optimizer_config

    @property
    def losses(self) -> tuple[str, ...]:
        """Names in spec/losses.json that the arms stand on."""
        return tuple(sorted({loss for arm in self.arms for loss in arm.losses}))

    @property
    def entry_points(self) -> tuple[str, ...]:
        """PACKAGE:LOSS of the arms whose loss another repository has."""
        return tuple(sorted({arm.loss for arm in self.arms if arm.loss is not None}))
