"""Specs: read, validate against the JSON Schema, check across fields, freeze.

>>> from paritygate.spec import load
>>> experiment = load("spec/sdpo.json")  # doctest: +SKIP
"""

from paritygate.spec.error import Finding, SpecError
from paritygate.spec.experiment import (
    ActivationGate,
    Arm,
    ArmKind,
    CorrectnessPath,
    Criterion,
    DecisionRule,
    Experiment,
    GateCheck,
    OptimizerConfig,
    Tolerance,
)
from paritygate.spec.loading import load
from paritygate.spec.protocol import (
    Advantage,
    Comparison,
    Context,
    Judge,
    Pilot,
    Protocol,
    RolloutOptions,
    Service,
    TaskSelection,
    User,
    WarmStart,
)
from paritygate.spec.synthetic import Synthetic

__all__ = [
    "ActivationGate",
    "Advantage",
    "Arm",
    "ArmKind",
    "Comparison",
    "Context",
    "CorrectnessPath",
    "Criterion",
    "DecisionRule",
    "Experiment",
    "Finding",
    "GateCheck",
    "Judge",
    "OptimizerConfig",
    "Pilot",
    "Protocol",
    "RolloutOptions",
    "Service",
    "SpecError",
    "Synthetic",
    "TaskSelection",
    "Tolerance",
    "User",
    "WarmStart",
    "load",
]
