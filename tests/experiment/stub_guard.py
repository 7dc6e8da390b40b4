"""Stands in for the guard in tests of the protocol: the tree counts as proven, so that no parity session is needed.

The proof of the service is stood in for as well (stub_proof.py).
The guard itself is tested in tests/guard, and the real order of things in the end-to-end test.
"""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from paritygate import receipts
from paritygate.receipts import canonical, provenance, write_atomic
from paritygate.receipts.parity import ParityReceipt, read_parity_receipt, statement_of
from tests.experiment import stub_proof

ROOT = Path(__file__).resolve().parents[2]
CELL = {"dtype": "none", "regime": "none", "oracle": "none", "comparisons": 1, "worst_margin": 0.0}
STAND_IN: dict[str, Any] = {"comparisons": 1, "worst_margin": 0.0, "cells": [CELL]}
HYPOTHESIS = {"derandomized": True, "seed": None, "version": "none"}
SESSION: dict[str, Any] = {"arguments": [], "tests": 1, "dtypes": []}


def receipt(folder: Path) -> ParityReceipt:
    """A well-formed receipt that says of itself that it covers nothing but a stand-in."""
    statement = statement_of(
        ROOT,
        device="cpu",
        files={"stand-in": "0" * 64},
        results={"stand-in/none": STAND_IN},
        hypothesis=HYPOTHESIS,
        session=SESSION,
    )
    data = canonical(statement)
    path = folder / f"parity-{hashlib.sha256(data).hexdigest()}.json"
    write_atomic(path, data)
    return read_parity_receipt(path)


def install(folder: Path | None = None, monkeypatch: Any = None) -> None:
    """Make the guard answer with the stand-in in this process, or for one test with its `monkeypatch`."""
    from paritygate.experiment.correctness import parity
    from paritygate.experiment.phases.preflight import service_proof

    made = receipt(folder or Path(tempfile.mkdtemp()))

    def stand_in(*_: Any, **__: Any) -> ParityReceipt:
        return made

    replace = setattr if monkeypatch is None else monkeypatch.setattr
    replace(receipts, "require_parity", stand_in)
    replace(parity, "guard", stand_in)
    replace(service_proof, "prove_at", stub_proof.prove_at)
    replace(provenance, "refuse_other_code", lambda *_: None)
