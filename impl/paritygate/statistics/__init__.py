"""Paired intervals, the design check and the pre-declared decision; no torch, no scipy."""

from paritygate.statistics.betting import BettingInterval, betting_bounds, betting_interval
from paritygate.statistics.frozen import decide_frozen
from paritygate.statistics.hoeffding import DesignCheck, PairedInterval, design_check, half_width, paired_hoeffding
from paritygate.statistics.verdict import CriterionResult, DimensionResult, Verdict, decide

__all__ = [
    "BettingInterval",
    "CriterionResult",
    "DesignCheck",
    "DimensionResult",
    "PairedInterval",
    "Verdict",
    "betting_bounds",
    "betting_interval",
    "decide",
    "decide_frozen",
    "design_check",
    "half_width",
    "paired_hoeffding",
]
