"""The protocol at somebody else's service through the real SDK: noise, faults, two kills, and every number right."""

import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paritygate.backend import policy_gradient_datum
from paritygate.experiment.run.journal import read_lines
from paritygate.receipts import PhaseChain
from tests.counts import SOAK, soak
from tests.experiment.scaled_spec import asked_for
from tests.experiment.test_protocol import check_chain
from tests.experiment.tiny_spec import ROOT, write_spec
from tests.foreign_service import KEY, Faults, ForeignService
from tests.scripted_service import JUDGE, POLICY, Script, ScriptedService, digest

STEPS, ITEMS = soak(quick=2, full=20), soak(quick=6, full=60)
ARMS = ("grpo", "sdpo_token")
NOISE = 1e-3  # nats between two calls for the same logprob
SLOW = {JUDGE: 0.05, POLICY: 0.01}  # seconds a call
THINKS = 4300  # tokens: more than a first answer of the judge may have, less than a second


def status(kind: str, number: int) -> int | None:
    """A lost answer now and then, and once too many requests."""
    if kind in ("result:asample", "result:score") and number % 151 == 37:
        return 410
    return 429 if kind == "asample" and number == 90 else None


class Runs:
    """The same run in processes that are killed where they stand, and in one that goes to the end."""

    def __init__(self, folder: Path, data: Path, spec: dict[str, Any], url: str) -> None:
        self.run = folder / "run"
        self._arguments = [str(write_spec(folder, spec)), str(self.run), str(data), "--vocabularies"]
        self._environment = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}

    def start(self) -> "subprocess.Popen[str]":
        script = str(ROOT / "tests" / "experiment" / "subprocess_run.py")
        resume = ["--resume"] if self.run.exists() else []
        command = [sys.executable, script, *self._arguments, *resume]
        return subprocess.Popen(command, env=self._environment, stderr=subprocess.PIPE, text=True)

    def killed_at(self, prefix: str, units: int) -> None:
        """Run until so many units of a phase are committed, then end the process without a word."""
        process = self.start()
        while len(list((self.run / "units").glob(f"{prefix}*/*.json"))) < units and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        _, stderr = process.communicate()
        assert process.returncode == -signal.SIGKILL, stderr

    def finished(self) -> None:
        process = self.start()
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, tau_bench_dir: Path) -> Any:
    """(service, run directory) of a whole run that was killed in training and in evaluation."""
    if not SOAK:
        pytest.skip("75 s and more of processes that are killed: PARITYGATE_SOAK=1")
    script = Script(
        noise=NOISE,
        harmony=True,
        judge_thinks=lambda seed: THINKS if seed % 211 == 3 else seed % 300,
        judge_says=lambda seed: "" if seed % 223 == 5 else None,
    )
    faults = Faults(status=status, seconds=lambda model: SLOW.get(model, 0.0), unhealthy=(20.0, 1e9))
    with ForeignService(script, faults) as service:
        runs = Runs(tmp_path_factory.mktemp("foreign"), tau_bench_dir, asked_for(STEPS, ITEMS), service.url)
        runs.killed_at("train-", STEPS)
        runs.killed_at("evaluate-", ITEMS)
        runs.finished()
        yield service, runs.run


def steps(run: Path, arm: str) -> list[list[dict[str, Any]]]:
    """The rollouts of each training step, as committed."""
    paths = sorted((run / "trajectories").glob(f"train-{arm}-*.jsonl"))
    return [read_lines(path) for path in paths]


def test_the_run_is_whole_and_its_faults_were_met(foreign: tuple[ForeignService, Path]) -> None:
    service, run = foreign
    check_chain(run)
    assert service.refused["result:asample 410"] > 3
    assert service.refused["result:score 410"] > 0
    assert service.refused["asample 429"] == 1
    assert service.refused["healthz 503"] > 0
    metrics = [line for line in read_lines(run / "metrics.jsonl") if line["phase"] == "train"]
    for arm in ARMS:
        assert [line["step"] for line in metrics if line["arm"] == arm] == list(range(STEPS))
    differences = [line["sampler_recomputed_max_abs_diff"] for line in metrics]
    assert all(NOISE < difference < 12 * NOISE for difference in differences)
    kinds = [line["kind"] for line in read_lines(run / "deviations.jsonl")]
    assert kinds.count("resumed_from_saved_state") in (1, 2)  # the kill may have met one arm before its first commit


def test_every_advantage_is_the_protocols_and_no_step_is_taken_twice(foreign: tuple[ForeignService, Path]) -> None:
    """From the trajectories alone: what each datum must have held, and the weights that all the steps lead to."""
    service, run = foreign
    updates = [update for update in service.scripted.updates if "adam" in update]
    for arm in ARMS:
        weights = digest(POLICY, 32, 0)
        for rollouts in steps(run, arm):
            [update] = [u for u in updates if _matches(u, rollouts, arm)][-1:]
            sent = [(datum.tokens, sorted(datum.inputs.items())) for datum in update["data"]]
            weights = digest(weights, digest(0, sent, update["loss_fn"]), *update["adam"])
            assert update["adam"] == (4e-05, 0.9, 0.95, 1e-08)
        final = PhaseChain(run).record("train")["facts"]["samplers"][arm]
        assert service.scripted.saved[final] == weights


def _matches(update: dict[str, Any], rollouts: list[dict[str, Any]], arm: str) -> bool:
    """Whether an optimiser step was on exactly these rollouts, with the arm's advantages."""
    composites: dict[int, list[float]] = {}
    for rollout in rollouts:
        if rollout["judgement"] is not None:
            composites.setdefault(rollout["task_index"], []).append(rollout["judgement"]["composite"])
    expected: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
    moving: set[tuple[int, ...]] = set()  # a datum whose advantages are all 0 adds nothing and is not sent
    for rollout in rollouts:
        if rollout["judgement"] is None:
            continue
        mask, sampled = rollout["mask"], rollout["sampler_logprobs"]
        if arm == "grpo":
            centred = rollout["judgement"]["composite"] - statistics.fmean(composites[rollout["task_index"]])
            row = [centred * m for m in mask]
        else:
            pairs = zip(rollout["teacher"]["logprobs"], sampled, mask, strict=True)
            row = [min(max(t - s, -5.0), 5.0) if m else 0.0 for t, s, m in pairs]
        logprobs = [s if m else 0.0 for s, m in zip(sampled, mask, strict=True)]
        expected[tuple(rollout["tokens"])] = (logprobs[1:], row[1:])
        if any(abs(advantage) > 1e-12 for advantage in row):
            moving.add(tuple(rollout["tokens"]))
    data = {datum.tokens: datum.inputs for datum in update["data"]}
    if not moving <= set(data) <= set(expected):
        return False
    return all(
        inputs["logprobs"] == pytest.approx(expected[tokens][0], abs=1e-6)
        and inputs["advantages"] == pytest.approx(expected[tokens][1], abs=1e-6)
        for tokens, inputs in data.items()
    )


def test_a_step_is_recorded_with_the_client_that_took_it() -> None:
    """Arms train at the same time: another's pass may come between a client's own pass and its optimiser step."""
    service = ScriptedService()
    datum = policy_gradient_datum([5, 6, 7], [0, 1, 1], [None, -1.0, -1.0], [None, 0.5, 0.5])

    async def interleaved() -> None:
        first, second = await service.training(POLICY), await service.training(POLICY)
        await first.forward_backward([datum])
        await second.forward_backward([datum])
        await first.optim_step(1e-4, 0.9, 0.95, 1e-8)
        await second.optim_step(2e-4, 0.9, 0.95, 1e-8)

    asyncio.run(interleaved())
    assert [update["adam"][0] for update in service.updates] == [1e-4, 2e-4]


def test_every_answer_of_the_judge_is_there_and_a_cut_one_was_asked_for_again(
    foreign: tuple[ForeignService, Path],
) -> None:
    _, run = foreign
    lines = [line for path in (run / "trajectories").glob("*.jsonl") for line in read_lines(path)]
    answered = [line["judge_answers"] for line in lines if line["judge_tries"]]
    assert all(answers[-1]["error"] == "" for answers in answered)
    again = [answers for answers in answered if len(answers) > 1]
    assert {answers[0]["error"].split(",")[0].split(" at ")[0] for answers in again} == {"cut", "it is empty"}
    for answers in again:
        assert answers[0]["tokens"] in (4096, 4) or answers[0]["stop_reason"] == "stop"
    assert all(
        line["judge_first_try_parsed"] == (len(line["judge_answers"]) == 1) for line in lines if line["judgement"]
    )


def test_the_verdict_is_that_of_the_items(foreign: tuple[ForeignService, Path]) -> None:
    """One item an arm and task, judged; paired Hoeffding by hand: 2 sqrt(ln(2 m / alpha) / (2 n)), m = 2."""
    _, run = foreign
    items = {(item["arm"], item["task_index"]): item for item in read_lines(run / "items.jsonl")}
    assert sorted(items) == [(arm, task) for arm in ARMS for task in range(ITEMS)]
    verdict = json.loads((run / "verdict.json").read_bytes())
    half = 2 * math.sqrt(math.log(2 * 2 / 0.05) / (2 * ITEMS))
    for criterion, name, margin in zip(verdict["criteria"], ("composite", "reward"), (0.03, -0.1), strict=True):
        mean = statistics.fmean(items["sdpo_token", task][name] - items["grpo", task][name] for task in range(ITEMS))
        assert criterion["mean"] == pytest.approx(mean, abs=1e-12)
        assert criterion["margin"] == margin
        assert criterion["low"] == pytest.approx(mean - half, abs=1e-12)
        assert criterion["high"] == pytest.approx(mean + half, abs=1e-12)
    for task in range(ITEMS):
        assert items["grpo", task]["tries"] == 1
