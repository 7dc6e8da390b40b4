"""A right service is never said to depart, however noisy: 5 runs at each of four levels in a soak."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.counts import SOAK, soak

SCRIPT = Path(__file__).with_name("noise_runs.py")
LEVELS = ("1e-6", "1e-5", "1e-4", "1e-3")  # nats, and relative
FEW = ("value/ppo", "gradient/ppo", "gradient/zero", "optimiser/betas", "sampling/three_ways")


def proved(*services: str, only: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What the script says of each service, in a process without the threads of this one."""
    command = [sys.executable, str(SCRIPT), *services, *(part for name in only for part in ("--only", name))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=7200, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("sigma", LEVELS if SOAK else LEVELS[-1:])
def test_nothing_that_is_right_departs(sigma: str) -> None:
    runs = proved(*(f"{sigma}:{seed}" for seed in range(1, 1 + soak(quick=1, full=5))), only=() if SOAK else FEW)
    assert len(runs) == soak(quick=1, full=5)
    assert [run["departs"] for run in runs if run["departs"]] == []
    for run in runs:
        assert run["outcomes"]["value/ppo"] == "holds"
        assert run["outcomes"]["gradient/ppo"] == "holds"


@pytest.mark.skipif(not SOAK, reason="all obligations of another service: PARITYGATE_SOAK=1")
def test_without_seeds_nothing_but_what_says_so_departs() -> None:
    (run,) = proved("without-seeds")
    assert set(run["departs"]) == {"sampling/seed_repeats", "state/seed"}
