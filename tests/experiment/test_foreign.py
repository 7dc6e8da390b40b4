"""The protocol at somebody else's service through the real SDK: noise, faults, an unpaid bill, kills; every number.

Nothing of the run is stubbed: its guard shows parity again in a checkout, its proof holds a service that computes.
"""

import asyncio
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paritygate.backend import policy_gradient_datum
from paritygate.experiment.audit import check_service_proof
from paritygate.experiment.plan.service_obligations import stands_on
from paritygate.experiment.run.journal import read_lines
from paritygate.receipts import PhaseChain
from paritygate.spec import load
from tests.computing_service import ComputingService
from tests.counts import SOAK
from tests.experiment import proven_tree
from tests.experiment.scaled_spec import asked_for, brief
from tests.experiment.test_protocol import check_chain
from tests.experiment.tiny_spec import ROOT, write_spec
from tests.foreign_service import KEY, Faults
from tests.guard.small_tree import Tree
from tests.scripted_service import JUDGE, POLICY, USER, Script, ScriptedService, digest

ARMS = ("grpo", "sdpo_token")
NOISE = 1e-3  # nats between two calls for the same logprob
SLOW = {JUDGE: 0.05, POLICY: 0.01}  # seconds a call
FULL = pytest.mark.skipif(not SOAK, reason="minutes of processes that are killed: PARITYGATE_SOAK=1")
PRICES = {  # USD a million tokens, of spec/prices.json
    POLICY: {"prefill": 0.22, "sampled": 0.67, "trained": 0.67},
    USER: {"prefill": 0.195, "sampled": 0.6},
    JUDGE: {"prefill": 0.18, "sampled": 0.44},
}
THINKS = 4300  # tokens: more than a first answer of the judge may have, less than a second


class Bills:
    """Answers lost now and then, once too many requests, and from the request `unpaid` on a bill to be paid (402)."""

    unpaid: int | None = None

    def __call__(self, kind: str, number: int) -> int | None:
        if kind in ("result:asample", "result:score") and number % 151 == 37:
            return 410
        if kind == "asample" and self.unpaid is not None and number >= self.unpaid:
            return 402
        return 429 if kind == "asample" and number == 90 else None


class Runs:
    """The same run in processes that are killed where they stand, and in one that goes to the end."""

    def __init__(self, tree: Path, folder: Path, data: Path, spec: dict[str, Any], url: str) -> None:
        self.run = folder / "run"
        path = str(write_spec(folder, spec))
        self._arguments = [str(tree), "--spec", path, "--output", str(self.run), "--tau-bench", str(data)]
        # As parity was shown: a receipt holds what the environment asks of numerical libraries.
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        self._environment = kept | {"TINKER_BASE_URL": f"{url}/", "TINKER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}

    def start(self) -> "subprocess.Popen[str]":
        script = str(ROOT / "tests" / "experiment" / "proven_run.py")
        resume = ["--resume"] if self.run.exists() else []
        command = [sys.executable, script, *self._arguments, *resume]
        return subprocess.Popen(
            command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def killed_in_the_proof(self, obligations: int) -> None:
        """Run until so many obligations of the service's proof are committed, then end the process without a word."""

        def shown() -> int:
            path = self.run / "service-proof.json"
            return len(json.loads(path.read_bytes())["obligations"]) if path.exists() else 0

        self._killed(lambda: shown() >= obligations)

    def killed_at(self, prefix: str, units: int) -> None:
        """The same once so many units of a phase are committed."""
        self._killed(lambda: len(list((self.run / "units").glob(f"{prefix}*/*.json"))) >= units)

    def _killed(self, reached: Callable[[], bool]) -> None:
        process = self.start()
        while not reached() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        _, stderr = process.communicate()
        assert process.returncode == -signal.SIGKILL, stderr

    def ended(self, code: int = 0) -> str:
        """Run until the process ends, with this exit code; what it wrote to stderr."""
        process = self.start()
        _, stderr = process.communicate()
        assert process.returncode == code, stderr
        return stderr


@dataclasses.dataclass
class Foreign:
    """A finished run at a foreign service: of how many steps an arm and held-out tasks, and what it wrote to stderr."""

    service: ComputingService
    tree: Path
    run: Path
    steps: int
    items: int
    log: str
    whole: bool  # the protocol at full size, with kills and an unpaid bill


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=FULL)], ids=["small", "full size"])
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tau_bench_dir: Path) -> Any:
    """The protocol as asked for and whole, killed in training and in evaluation; and a small one, undisturbed."""
    bills = Bills()
    faults = Faults(status=bills, seconds=lambda model: SLOW.get(model, 0.0))
    folder = tmp_path_factory.mktemp("foreign")
    tree = proven_tree.build(folder / "tree", whole=request.param).root
    if not request.param:
        with ComputingService(Script(noise=NOISE, harmony=True), faults) as service:
            runs = Runs(tree, folder, tau_bench_dir, brief(1, 3), service.url)
            yield Foreign(service, tree, runs.run, 1, 3, runs.ended(), whole=False)
        return
    script = Script(
        noise=NOISE,
        harmony=True,
        judge_thinks=lambda seed: THINKS if seed % 211 == 3 else seed % 300,
        judge_says=lambda seed: "" if seed % 223 == 5 else None,
    )
    faults.unhealthy = (20.0, 1e9)  # for more than the 90 s that a gateway was seen to fail
    with ComputingService(script, faults) as service:
        runs = Runs(tree, folder, tau_bench_dir, asked_for(20, 60), service.url)
        runs.killed_in_the_proof(7)
        runs.killed_at("train-", 12)
        bills.unpaid = service.requests["asample"] + 1000
        assert "for a matter of billing (HTTP 402" in runs.ended(5)
        bills.unpaid = None
        runs.killed_at("evaluate-", 60)
        yield Foreign(service, tree, runs.run, 20, 60, runs.ended(), whole=True)


def steps(run: Path, arm: str) -> list[list[dict[str, Any]]]:
    """The rollouts of each training step, as committed."""
    paths = sorted((run / "trajectories").glob(f"train-{arm}-*.jsonl"))
    return [read_lines(path) for path in paths]


def test_the_run_is_whole_and_its_faults_were_met(foreign: Foreign) -> None:
    refused, run = foreign.service.refused, foreign.run
    check_chain(run)
    assert (refused["result:asample 410"], refused["result:score 410"]) > (0, 0)
    metrics = [line for line in read_lines(run / "metrics.jsonl") if line["phase"] == "train"]
    for arm in ARMS:
        assert [line["step"] for line in metrics if line["arm"] == arm] == list(range(foreign.steps))
    differences = [line["sampler_recomputed_max_abs_diff"] for line in metrics]
    assert all(NOISE < difference < 12 * NOISE for difference in differences)
    kinds = [line["kind"] for line in read_lines(run / "deviations.jsonl")]
    assert "no_ema" in kinds
    assert "not_finite" not in kinds
    if foreign.whole:
        assert refused["asample 429"] == 1
        assert refused["asample 402"] > 0
        assert refused["healthz 503"] > 0
        # A step in which one arm was not committed is taken up for the other as well, which is recorded once a resume.
        assert 2 <= kinds.count("resumed_from_saved_state") <= 4


def test_parity_was_shown_again_and_the_service_proved(foreign: Foreign) -> None:
    """The receipts are real: of the checkout, and of a service that computes with that noise."""
    chain = PhaseChain(foreign.run)
    [receipt] = foreign.run.glob("parity-*.json")
    facts = chain.record("correctness_preflight")["facts"]
    assert facts["full_run"] is True
    assert receipt.name == f"parity-{facts['parity']}.json"
    shown = set(json.loads(receipt.read_bytes())["predicate"]["passedTests"])
    assert set(facts["obligations"]) <= shown
    assert shown == (every_obligation() if foreign.whole else set(proven_tree.SHOWN.values()))
    exp = load(foreign.run / "spec.json")
    proof = chain.record("service_proof")["facts"]
    count = len(stands_on(exp).entries) if foreign.whole else 2 + len(proven_tree.OBLIGATIONS)  # greedy, and a need
    assert proof["outcomes"] == {"holds": count, "departs": 0, "undecided": 0, "refused": 0}
    assert 0.5 * NOISE < proof["noise"]["logprob"] < 2 * NOISE
    figures = {name: entry["figure"] for name, entry in proof["obligations"].items()}
    assert 1e-4 < figures["gradient/importance_sampling"] < 1e-2
    if foreign.whole:
        [line] = check_service_proof(foreign.run, exp)
        assert f"{count} holds" in line
        verified = Tree(foreign.tree).python("impl/verify.py", str(foreign.run))
        assert (verified.returncode, "verifies; the verdict" in verified.stdout) == (0, True), verified


def every_obligation() -> set[str]:
    """As spec/losses.json lists them."""
    losses = json.loads((ROOT / "spec" / "losses.json").read_text())["losses"]
    return {name for loss in losses.values() for name in loss["obligations"]}


def test_every_number_of_a_step_is_that_of_its_trajectories(foreign: Foreign) -> None:
    """Counted again from the trajectories and judgements alone, by the definitions of the spec's gates."""
    metrics = {(line["arm"], line["step"]): line for line in read_lines(foreign.run / "metrics.jsonl") if trains(line)}
    for arm in ARMS:
        for step, rollouts in enumerate(steps(foreign.run, arm)):
            line = metrics[arm, step]
            groups: dict[int, list[float]] = {}
            for rollout in rollouts:
                groups.setdefault(rollout["task_index"], []).append(rollout["judgement"]["composite"])
            composites = [composite for group in groups.values() for composite in group]
            assert line["tasks"] == list(groups)
            assert line["composite_rubric_score"] == pytest.approx(statistics.fmean(composites), abs=1e-12)
            assert line["tau_bench_task_reward"] == statistics.fmean(r["reward"] for r in rollouts)
            assert line["grpo_frac_groups_nonzero_adv"] == statistics.fmean(len({*g}) > 1 for g in groups.values())
            assert line["judge_parse_success_rate"] == statistics.fmean(r["judge_first_try_parsed"] for r in rollouts)
            assert line["executed_base_model"] == POLICY
            if arm == "grpo":
                continue
            pairs = [zip(r["mask"], r["teacher"]["logprobs"], r["sampler_logprobs"], strict=True) for r in rollouts]
            gaps = [abs(teacher - student) for rows in pairs for mask, teacher, student in rows if mask]
            assert line["sdpo_mean_abs_token_adv"] == pytest.approx(statistics.fmean(gaps), abs=1e-9)
            assert line["sdpo_frac_tokens_abs_adv_gt_0.1"] == statistics.fmean(gap > 0.1 for gap in gaps)
            assert line["sdpo_frac_trajectories_with_feedback"] == 1.0


def trains(line: dict[str, Any]) -> bool:
    return line["phase"] == "train"


def test_what_it_used_is_counted_and_nothing_is_left(foreign: Foreign) -> None:
    """All that was committed is counted, and no more than the service saw; the adapters are what remains there."""
    service, run = foreign.service.scripted, foreign.run
    cost = json.loads((run / "cost.json").read_bytes())
    counted = {(row["role"], row["kind"]): row["tokens"] for row in cost["rows"]}
    lines = [line for path in (run / "trajectories").glob("*.jsonl") for line in read_lines(path)]
    answered = sum(answer["tokens"] for line in lines for answer in line["judge_answers"])
    played = sum(sum(line["mask"]) for line in lines)
    for role, model, committed in (("judge", JUDGE, answered), ("policy", POLICY, played)):
        seen = sum(call["sampled"] for call in service.samples if call["model"] == model)
        assert committed <= counted[role, "sampled"] <= seen
    for kind, answered in foreign.service.computed.items():
        assert (counted["proof", kind] <= answered) if foreign.whole else (counted["proof", kind] == answered)
    assert cost["unknown"] == []
    money = sum(row["tokens"] * PRICES[row["model"]][row["kind"]] for row in cost["rows"]) / 1e6
    assert cost["money"] == pytest.approx(money, rel=1e-12, abs=0.0)
    totals = [float(line.split("; ")[-2].split(" USD")[0]) for line in foreign.log.splitlines() if " to go" in line]
    assert totals == sorted(totals)
    assert totals[-1] == pytest.approx(money, abs=0.02 * money + 0.01)  # what the last judgements cost is missing
    adapters = set(PhaseChain(run).record("train")["facts"]["samplers"].values())
    assert set(service.saved) == adapters
    limits = {save["path"]: save["ttl_seconds"] for save in foreign.service.saves if "-final-" not in save["path"]}
    assert set(limits.values()) == {14 * 24 * 3600, 24 * 3600}
    assert {save["ttl_seconds"] for save in foreign.service.saves if save["path"] in adapters} == {None}
    page = (run / "report.html").read_text()
    assert all(path in page for path in adapters)
    assert f"{foreign.items} of {foreign.items} episodes; tokens: prefill" in foreign.log


def test_the_address_is_one_everywhere_and_the_key_nowhere(foreign: Foreign) -> None:
    """It was given with a final slash; what a reviewer holds together are the preflight's and the proof's."""
    facts, url = PhaseChain(foreign.run).record("service_preflight")["facts"], foreign.service.url
    proved = json.loads((foreign.run / "service-proof.receipt.json").read_bytes())
    assert (facts["endpoint"], proved["endpoint"]) == (url, url)
    files = [path for path in foreign.run.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in foreign.log


def test_every_advantage_is_the_protocols_and_no_step_is_taken_twice(foreign: Foreign) -> None:
    """From the trajectories alone: what each datum must have held, and the weights that all the steps lead to."""
    service, run = foreign.service, foreign.run
    updates = [update for update in service.scripted.updates if "adam" in update]
    for arm in ARMS:
        weights = digest(POLICY, 32, 0)
        for rollouts in steps(run, arm):
            expected, moving = _expected(rollouts, arm)
            [update] = [u for u in updates if _matches(u, expected, moving)][-1:]
            sent = [(datum.tokens, sorted(datum.inputs.items())) for datum in update["data"]]
            weights = digest(weights, digest(0, sent, update["loss_fn"]), *update["adam"])
            assert update["adam"] == (4e-05, 0.9, 0.95, 1e-08)
        final = PhaseChain(run).record("train")["facts"]["samplers"][arm]
        assert service.scripted.saved[final] == weights


Inputs = dict[tuple[int, ...], tuple[list[float], list[float]]]


def _expected(rollouts: list[dict[str, Any]], arm: str) -> tuple[Inputs, set[tuple[int, ...]]]:
    """By tokens, the logprobs and advantages that these rollouts' datums hold; and those that move anything."""
    composites: dict[int, list[float]] = {}
    for rollout in rollouts:
        if rollout["judgement"] is not None:
            composites.setdefault(rollout["task_index"], []).append(rollout["judgement"]["composite"])
    expected: Inputs = {}
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
    return expected, moving


def _matches(update: dict[str, Any], expected: Inputs, moving: set[tuple[int, ...]]) -> bool:
    """Whether an optimiser step was on exactly the expected datums, those without an effect aside."""
    data = {datum.tokens: datum.inputs for datum in update["data"]}
    if not moving <= set(data) <= set(expected):
        return False
    return all(
        np.allclose(inputs["logprobs"], expected[tokens][0], rtol=0, atol=1e-6)
        and np.allclose(inputs["advantages"], expected[tokens][1], rtol=0, atol=1e-6)
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
    foreign: Foreign,
) -> None:
    run = foreign.run
    lines = [line for path in (run / "trajectories").glob("*.jsonl") for line in read_lines(path)]
    answered = [line["judge_answers"] for line in lines if line["judge_tries"]]
    assert all(answers[-1]["error"] == "" for answers in answered)
    again = [answers for answers in answered if len(answers) > 1]
    errors = {answers[0]["error"].split(",")[0].split(" at ")[0] for answers in again}
    assert errors == ({"cut", "it is empty"} if foreign.whole else set())
    for answers in again:
        assert answers[0]["tokens"] in (4096, 4) or answers[0]["stop_reason"] == "stop"
    assert all(
        line["judge_first_try_parsed"] == (len(line["judge_answers"]) == 1) for line in lines if line["judgement"]
    )


def test_the_verdict_is_that_of_the_items(foreign: Foreign) -> None:
    """One item an arm and task, judged; paired Hoeffding by hand: 2 sqrt(ln(2 m / alpha) / (2 n)), m = 2."""
    run, count = foreign.run, foreign.items
    items = {(item["arm"], item["task_index"]): item for item in read_lines(run / "items.jsonl")}
    assert sorted(items) == [(arm, task) for arm in ARMS for task in range(count)]
    verdict = json.loads((run / "verdict.json").read_bytes())
    half = 2 * math.sqrt(math.log(2 * 2 / 0.05) / (2 * count))
    for criterion, name, margin in zip(verdict["criteria"], ("composite", "reward"), (0.03, -0.1), strict=True):
        mean = statistics.fmean(items["sdpo_token", task][name] - items["grpo", task][name] for task in range(count))
        assert criterion["mean"] == pytest.approx(mean, abs=1e-12)
        assert criterion["margin"] == margin
        assert criterion["low"] == pytest.approx(mean - half, abs=1e-12)
        assert criterion["high"] == pytest.approx(mean + half, abs=1e-12)
    for task in range(count):
        assert items["grpo", task]["tries"] == 1
