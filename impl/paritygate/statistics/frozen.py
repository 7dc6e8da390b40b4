"""The verdict of a run from its own files: the frozen spec and the per-item results."""

from collections.abc import Iterable, Mapping
from typing import Any

from paritygate.spec.experiment import DecisionRule
from paritygate.spec.findings import SPLIT_SIZES
from paritygate.spec.loading import build
from paritygate.spec.protocol import TaskSelection
from paritygate.statistics.verdict import Verdict, decide


def decide_frozen(frozen: Mapping[str, Any], items: Iterable[Mapping[str, Any]]) -> Verdict:
    """What `decide` says of a run directory's `spec.json` (frozen, already valid) and the rows of its `items.jsonl`."""
    selection = build(TaskSelection, frozen["protocol"]["evaluation"])
    return decide(
        build(DecisionRule, frozen["decision_rule"]),
        items,
        treatment=frozen["protocol"]["comparison"]["treatment"],
        baseline=frozen["protocol"]["comparison"]["baseline"],
        tasks=selection.indices(SPLIT_SIZES[selection.split]),
        rollouts_per_task=frozen["eval"]["rollouts_per_task"],
    )
