"""Killed at random moments and resumed: items, metrics and verdict are those of the undisturbed run, bit for bit."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import BackendError, Refused
from paritygate.experiment.run.journal import read_lines
from paritygate.receipts import PhaseChain, canonical
from paritygate.server import Running
from tests.counts import SOAK, soak
from tests.experiment.scaled_spec import brief
from tests.experiment.tiny_spec import small_at_a_service, small_spec, write_spec
from tests.scripted_service import Script, ScriptedService

RUN = Path(__file__).parent / "subprocess_run.py"
SAVED = ("train", 0, "save")
PILOT = "timing_pilot"
FINAL = ("metrics.jsonl", "items.jsonl", "verdict.json")
PATIENCE = 900.0  # seconds, of a busy machine


def start(spec: Path, output: Path, data: Path, *options: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(RUN), str(spec), str(output), str(data), *options]
    return subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE)


def finish(process: "subprocess.Popen[bytes]") -> None:
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr.decode()


def events(run: Path) -> int:
    """How many times were measured so far: a clock that runs over all phases."""
    path = run / "timings.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def kill_at(process: "subprocess.Popen[bytes]", run: Path, event: int, delay: float) -> bool:
    """SIGKILL `delay` seconds after the run has measured `event` times; False when it ended before."""
    until = time.monotonic() + PATIENCE
    while events(run) < event and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(delay)
    ended = process.poll() is not None
    process.send_signal(signal.SIGKILL) if not ended else None
    process.communicate(timeout=30)
    return not ended


def numbers_of(run: Path) -> dict[str, Any]:
    """What a run came to, file by file: items, verdict, metrics, and each trajectory with its sampler's logprobs.

    Metrics without their index, which is the order in which the arms, side by side, committed. Without the timing
    pilot, which takes fewer tasks where the service is the embedded one.
    """
    paths = [path.name for path in (run / "trajectories").iterdir() if not path.name.startswith(PILOT)]
    names = ["items.jsonl", "verdict.json", *(f"trajectories/{name}" for name in paths)]
    contents: dict[str, Any] = {name: (run / name).read_bytes() for name in names}
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["phase"] != PILOT]
    return contents | {"metrics.jsonl": sorted(canonical({**line, "index": None}) for line in lines)}


def moments(timings: list[dict[str, Any]], rng: random.Random) -> list[int]:
    """When to kill, as numbers of times measured: after the first step of both arms; at full counts anywhere."""
    if SOAK:
        return sorted(rng.randrange(len(timings)) for _ in range(20))
    saved = [n for n, line in enumerate(timings) if (line["phase"], line.get("step"), line["what"]) == SAVED]
    return [saved[-1] + 1]


@pytest.mark.usefixtures("lean")
def test_killed_and_resumed(
    run_spec: Any, at_tiny: Any, tiny_server: Running, tmp_path: Path, tau_bench_dir: Path, monkeypatch: Any
) -> None:
    """Processes with embedded servers that are killed come to the bits of an undisturbed run at one server."""
    at_tiny(tiny_server.base_url)
    run_spec(small_at_a_service(), output=tmp_path / "undisturbed")
    undisturbed = numbers_of(tmp_path / "undisturbed")
    timings = read_lines(tmp_path / "undisturbed" / "timings.jsonl")
    monkeypatch.delenv("TINKER_BASE_URL")
    spec, run = write_spec(tmp_path, small_spec()), tmp_path / "run"
    rng = random.Random(int(os.environ.get("PARITYGATE_SEED", "7")))
    killed: list[int] = []
    for moment in moments(timings, rng):
        resume = ["--resume"] if run.exists() else []
        if kill_at(start(spec, run, tau_bench_dir, *resume), run, moment, rng.uniform(0.0, 0.3)):
            killed.append(moment)
        if (run / "receipt.json").is_file():
            break
    finish(start(spec, run, tau_bench_dir, "--resume"))
    assert killed
    resumed = numbers_of(run)
    assert resumed.keys() == undisturbed.keys()
    for name, content in undisturbed.items():
        assert resumed[name] == content, f"{name}, killed at {killed}"
    PhaseChain(run).verify()
    assert (run / "receipt.json").is_file()


@pytest.mark.usefixtures("lean")
def test_a_service_that_fails_anywhere_costs_nothing(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    """After a failure (exit 5) at any call of any phase, before or after its effect, the resumed run ends the same."""
    service = scripted(ScriptedService())
    run_spec(brief(), output=tmp_path / "undisturbed")
    calls, rng = service.calls, random.Random(11)
    for number in range(soak(quick=3, full=60)):
        service = scripted(ScriptedService(Script(fails_at=rng.randrange(calls), fails_after=rng.random() < 0.5)))
        output = tmp_path / f"run-{number}"
        with pytest.raises(BackendError, match="planned failure"):
            run_spec(brief(), output=output)
        within = "train" not in PhaseChain(output).completed
        trained = [line["arm"] for line in read_lines(output / "metrics.jsonl") if within and line["phase"] == "train"]
        run_spec(brief(), output=output, resume=True)
        for name in FINAL:
            assert (output / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), service.script
        check_resumption_is_recorded(output, set(trained))


@pytest.mark.usefixtures("lean")
def test_what_was_changed_since_its_phase_is_not_gone_on_with(run_spec: Any, scripted: Any, tmp_path: Path) -> None:
    """No verdict and no report is made of items and units other than those that their phase vouched for."""
    scripted(ScriptedService())
    run_spec(brief(), until="decide")
    run = tmp_path / "run"
    metrics = (run / "metrics.jsonl").read_bytes()
    unit = sorted((run / "units" / "evaluate-grpo").iterdir())[0]
    for path in (run / "items.jsonl", run / "verdict.json", unit):
        right = path.read_bytes()
        for wrong in (right[:-5], right.replace(b"1", b"0", 1), b""):
            path.write_bytes(wrong)
            with pytest.raises(Refused, match=f"{path.name} was changed since the phase"):
                run_spec(brief(), resume=True)
        path.write_bytes(right)
    (run / "metrics.jsonl").write_bytes(metrics[:-5])
    assert run_spec(brief(), resume=True).completed[-1] == "report"
    assert (run / "metrics.jsonl").read_bytes() == metrics  # derived from the units, so made again


def check_resumption_is_recorded(run: Path, arms: set[str]) -> None:
    """Exactly the arms that had steps and were gone on with from saved state depart from checkpoint_restore: false."""
    lines = read_lines(run / "deviations.jsonl") if (run / "deviations.jsonl").is_file() else []
    saved = [line["what"] for line in lines if line["phase"] == "train" and line["kind"] == "resumed_from_saved_state"]
    assert len(saved) == len(arms)
    assert all(any(f"train-{arm} went on" in what for what in saved) for arm in arms)


def test_no_optimiser_step_is_applied_twice(run_spec: Any, scripted: Any, lean: None, tmp_path: Path) -> None:
    """However often a step is begun again, the chain of weights is that of one optimiser step a batch."""
    first = scripted(ScriptedService())
    run_spec(brief(), output=tmp_path / "undisturbed")
    weights = sorted(first.saved[path] for path in first.saved if "/train-" in path and "-final-" in path)
    service = scripted(ScriptedService())
    resume = False
    for failure in range(first.calls - 40, first.calls - 10, 6):
        service.calls, service.script.fails_at, service.script.fails_after = 0, failure, True
        with contextlib.suppress(BackendError):
            run_spec(brief(), resume=resume)
        resume = True
    service.script.fails_at = None
    run_spec(brief(), resume=True)
    finals = {path: service.saved[path] for path in service.saved if "/train-" in path and "-final-" in path}
    assert set(finals.values()) == set(weights)
