"""The obligation ledger: every comparison of the parity suite goes through `compare`, which counts and measures it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paritygate.harness.comparator import measure
from paritygate.spec.losses import device_class


@dataclass
class Cell:
    """Comparisons of one obligation in one dtype, regime and against one oracle."""

    comparisons: int = 0
    worst_margin: float = 0.0


@dataclass
class Ledger:
    """What a session has compared: `spec` is the content of spec/losses.json, `device` a torch device string.

    Where `wanted` is given, comparisons for other obligations are left out: a mutant is held to its own alone.
    """

    spec: dict[str, Any]
    device: str = "cpu"
    current: frozenset[str] = frozenset()
    cells: dict[tuple[str, str, str, str], Cell] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    wanted: frozenset[str] | None = None

    def __post_init__(self) -> None:
        """Index the obligations by name."""
        self.obligations: dict[str, dict[str, Any]] = {
            name: obligation
            for loss in self.spec["losses"].values()
            for name, obligation in loss["obligations"].items()
        }

    def tolerance(self, obligation: str, dtype: str, regime: str) -> dict[str, Any]:
        """The declared tolerance; a row for the device class goes before one for any device. Raises ValueError."""
        if obligation not in self.obligations:
            raise ValueError(f"spec/losses.json declares no obligation {obligation!r}.")
        kind = device_class(self.device)
        rows = [
            row
            for row in self.obligations[obligation]["tolerances"]
            if (row["dtype"], row["regime"]) == (dtype, regime) and row["device"] in (kind, "any")
        ]
        if not rows:
            raise ValueError(f"{obligation} declares no tolerance for {dtype} on {kind}, regime {regime!r}.")
        return sorted(rows, key=lambda row: row["device"] == "any")[0]

    def compare(
        self,
        obligation: str,
        actual: Any,
        expected: Any,
        *,
        dtype: str,
        regime: str = "ordinary",
        oracle: str = "reference",
        where: str = "",
    ) -> None:
        """Hold `actual` to `expected` within its declared tolerance, and count it; AssertionError says where not."""
        if self.wanted is not None and obligation not in self.wanted:
            return
        if obligation not in self.current:
            raise ValueError(f"the running test is not marked @pytest.mark.obligation({obligation!r}).")
        dtype = str(dtype).removeprefix("torch.")
        tolerance = self.tolerance(obligation, dtype, regime)
        result = measure(actual, expected, tolerance)
        if result.elements:
            cell = self.cells.setdefault((obligation, dtype, regime, oracle), Cell())
            cell.comparisons += 1
            cell.worst_margin = max(cell.worst_margin, result.margin)
        if result.complaint:
            place = f" at {where}" if where else ""
            message = f"{obligation} ({dtype}, {self.device}, {regime}, against {oracle}){place}: {result.complaint}"
            self.failures.append(message)
            raise AssertionError(message)

    def results(self) -> dict[str, dict[str, Any]]:
        """For each obligation compared: comparisons, worst_margin, and the same by dtype, regime and oracle."""
        summary: dict[str, dict[str, Any]] = {}
        for (obligation, dtype, regime, oracle), cell in sorted(self.cells.items()):
            entry = summary.setdefault(obligation, {"comparisons": 0, "worst_margin": 0.0, "cells": []})
            entry["comparisons"] += cell.comparisons
            entry["worst_margin"] = max(entry["worst_margin"], cell.worst_margin)
            entry["cells"].append(
                {
                    "dtype": dtype,
                    "regime": regime,
                    "oracle": oracle,
                    "comparisons": cell.comparisons,
                    "worst_margin": cell.worst_margin,
                }
            )
        return summary


LEDGER: Ledger | None = None
"""The session's ledger, opened by the pytest plugin."""


def compare(
    obligation: str,
    actual: Any,
    expected: Any,
    *,
    dtype: str,
    regime: str = "ordinary",
    oracle: str = "reference",
    where: str = "",
) -> None:
    """`Ledger.compare` on the session's ledger."""
    if LEDGER is None:
        raise RuntimeError(
            "compare() works inside a pytest session of a repository with [tool.paritygate]: the plugin opens a ledger."
        )
    LEDGER.compare(obligation, actual, expected, dtype=dtype, regime=regime, oracle=oracle, where=where)
