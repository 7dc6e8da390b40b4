"""Is it the right experiment? Every request of a small run as a table, against the one that the protocol implies.

A request is (weights, seed, temperature, prompt): whose weights were sampled, with which seed, for which task and
purpose. What the protocol implies is written out here from the spec, the seed rule and the benchmark's own tasks.
"""

import asyncio
import dataclasses
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paritygate import retail
from paritygate.agent import renderer
from paritygate.agent.judge import DIMENSIONS, Judged, Judgement
from paritygate.agent.rollouts import Rollout
from paritygate.agent.seeds import derive
from paritygate.agent.trajectory import Trajectory
from paritygate.backend.vocabulary import offline
from paritygate.errors import BackendError
from paritygate.experiment.run.journal import read_lines
from paritygate.experiment.run.options import Options, Settings
from paritygate.experiment.step.collector import Collector, Partner
from paritygate.spec import load
from paritygate.spec.schema import spec_folder
from tests.experiment.scaled_spec import brief
from tests.scripted_service import JUDGE, POLICY, USER, ScriptedService, digest

ARMS = ("grpo", "sdpo_token")
STEPS, ROLLOUTS, ITEMS = 2, 2, 2
SEED, RANK = 5, 16
ADAM = (3e-05, 0.8, 0.97, 1e-07)  # lr, beta1, beta2, eps: no default of anybody


def unusual() -> dict[str, Any]:
    """A small spec whose seed, rank and optimiser are nobody's default: a constant in their place shows."""
    spec = brief(STEPS, ITEMS)
    lr, beta1, beta2, eps = ADAM
    spec["optimizer"]["lr"], spec["lora_rank"], spec["decision_rule"]["seeds"] = lr, RANK, [SEED]
    for arm in spec["arms"]:
        arm.update(lr=lr, seed=SEED)
    for arm in spec["restoration_preflight"]["groups"][0]["arms"]:
        arm["optimizer_config"] = {"learning_rate": lr, "lora_rank": RANK, "beta1": beta1, "beta2": beta2, "eps": eps}
    return spec


def test_every_request_is_the_one_that_the_protocol_implies(
    lean: None, run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    """One run of two steps of two tasks, two rollouts each, held to the spec request by request."""
    service = scripted(ScriptedService())
    run_spec(unusual())
    assert {update["adam"] for update in service.updates if "adam" in update} == {ADAM}
    check_policy(service, tmp_path / "run")
    check_weights(service)
    check_partners(service, tmp_path / "run")
    check_teacher(service, tmp_path / "run")


def trajectories(run: Path, name: str) -> list[dict[str, Any]]:
    return read_lines(run / "trajectories" / f"{name}.jsonl")


def purpose(path: str | None) -> str:
    """What saved weights are for, from the name under which the run saved them: PHASE-ARM-STEP, without the process."""
    return re.sub(r"-[0-9a-f]{8}$", "", str(path).rsplit("/", 1)[-1])


def agent_seeds(episode: int, turns: int) -> list[int]:
    return [derive(episode, "agent", turn) for turn in range(turns)]


def check_policy(service: ScriptedService, folder: Path) -> None:
    """(weights, temperature, seed) of every sampled turn: this step's weights, a seed of purpose, task, rollout."""
    asked = Counter(
        (purpose(s["path"]), s["temperature"], s["seed"])
        for s in service.samples
        if s["model"] == POLICY and purpose(s["path"]).startswith("train-")
    )
    order = load(folder / "spec.json").protocol.train.indices(500)
    implied: Counter[tuple[str, float, int]] = Counter()
    for arm in ARMS:
        for step in range(STEPS):
            rows = trajectories(folder, f"train-{arm}-{step:03d}")
            wanted = [(task, r) for task in order[2 * step : 2 * step + 2] for r in range(ROLLOUTS)]
            assert [(row["split"], row["task_index"], row["rollout"]) for row in rows] == [
                ("train", *w) for w in wanted
            ]
            for (task, rollout), row in zip(wanted, rows, strict=True):
                episode = derive(derive(SEED, "train", step), task, rollout)
                implied.update((f"train-{arm}-{step}", 1.0, seed) for seed in agent_seeds(episode, row["turns"]))
        for task in range(ITEMS):
            [row] = trajectories(folder, f"evaluate-{arm}-{task:04d}-0")
            assert (row["split"], row["task_index"]) == ("test", task)
            episode = derive(SEED, "evaluate", task, 0, 0)
            implied.update((f"train-{arm}-final", 0.0, seed) for seed in agent_seeds(episode, row["turns"]))
    assert asked == implied
    assert max(Counter(seed for _, _, seed in implied).values()) == len(ARMS)  # arms share seeds, nothing else does


def check_weights(service: ScriptedService) -> None:
    """What is evaluated are the weights after the last step; the arms begin equal and part at the first."""
    for arm in ARMS:
        [final] = [path for path in service.ever_saved if purpose(path) == f"train-{arm}-final"]
        [last] = [path for path in service.ever_saved if purpose(path) == f"train-{arm}-{STEPS}"]
        [first] = [path for path in service.ever_saved if purpose(path) == f"train-{arm}-0"]
        assert service.ever_saved[final] == service.ever_saved[last] != service.ever_saved[first]
    states = {purpose(path): weights for path, weights in service.ever_saved.items()}
    assert states["train-grpo-0"] == states["train-sdpo_token-0"] == digest(POLICY, RANK, SEED)
    assert states["train-grpo-1"] != states["train-sdpo_token-1"]


def check_partners(service: ScriptedService, folder: Path) -> None:
    """User and judge of an evaluated task have the same seeds in both arms, and in nothing else of the run."""
    users = Counter(s["seed"] for s in service.samples if s["model"] == USER)
    judges = Counter(s["seed"] for s in service.samples if s["model"] == JUDGE)
    for task in range(ITEMS):
        episode = derive(SEED, "evaluate", task, 0, 0)
        replies = {derive(derive(episode, "simulator"), "user", turn, 0) for turn in range(20)} & users.keys()
        assert replies
        assert {users[seed] for seed in replies} == {len(ARMS)}
        assert judges[derive(SEED, "judge", "test", task, 0, episode, 0)] == len(ARMS)
    for arm in ARMS:
        rows = [row for step in range(STEPS) for row in trajectories(folder, f"train-{arm}-{step:03d}")]
        seeds = [derive(SEED, "judge", "train", row["task_index"], row["rollout"], row["seed"], 0) for row in rows]
        assert len(set(seeds)) == len(rows) == STEPS * 2 * ROLLOUTS
        assert all(judges[seed] == len(ARMS) for seed in seeds)


def check_teacher(service: ScriptedService, folder: Path) -> None:
    """Each SDPO rollout is scored once a step: by the sampler that it came from, under its own judge's rationales."""
    spec = load(folder / "spec.json")
    tokenizer = offline(POLICY)
    for step in range(STEPS):
        scored = [s for s in service.scores if purpose(s["path"]) == f"train-sdpo_token-{step}"]
        rows = trajectories(folder, f"train-sdpo_token-{step:03d}")
        assert len(scored) == len(rows)
        by_ending = {tuple(s["tokens"]): tokenizer.decode(s["tokens"]) for s in scored}
        for row in rows:
            rest = tuple(row["tokens"][row["prompt_length"] :])
            [text] = [text for tokens, text in by_ending.items() if tokens[-len(rest) :] == rest]
            assert all(rationale in text for rationale in row["judgement"]["rationale"].values())
            assert "Correctly solve the original question." in text
            group = [r for r in rows if r["task_index"] == row["task_index"]]
            others = [r["judgement"]["composite"] for r in group if r["rollout"] != row["rollout"]]
            best = max(others) >= spec.protocol.advantage.sibling_threshold
            assert ("Correct solution:" in text) is best is (row["teacher"]["sibling"] is not None)
    assert not [s for s in service.scores if purpose(s["path"]).startswith("train-grpo")]


# What of the spec reaches the teacher ---------------------------------------------------------------------------------


class Scorer:
    """Remembers what it scores."""

    def __init__(self) -> None:
        self.scored: list[list[int]] = []

    async def score(self, tokens: Any, last: int | None = None) -> list[float | None]:
        assert last
        self.scored.append(list(tokens))
        return [None, *([-1.0] * (len(tokens) - 1))]


def collector_of(tau_bench_dir: Path, context_length: int | None = 10**6, **advantage: Any) -> Collector:
    """Of spec/sdpo.json with a compact prompt and other keys of its advantage; nothing is served."""
    exp = load(spec_folder() / "sdpo.json")
    protocol = dataclasses.replace(
        exp.protocol,
        advantage=dataclasses.replace(exp.protocol.advantage, **advantage),
        context=dataclasses.replace(exp.protocol.context, kind="compact"),
    )
    state: Any = SimpleNamespace(exp=dataclasses.replace(exp, protocol=protocol), options=Options(Path()))
    rendering, source = renderer.load("qwen3.5", offline(POLICY)), retail.load(tau_bench_dir)
    return Collector(state, Settings(3, "current"), source, rendering, None, None, context_length)


def taught(tau_bench_dir: Path, composites: list[float], index: int, reward: float = 0.0, **advantage: Any) -> Any:
    """(teacher scores, text of what was scored) of rollout `index` of a group with these composites."""
    collector = collector_of(tau_bench_dir, **advantage)
    gold = collector.gold("train", 3)
    group = [
        Rollout(
            dataclasses.replace(gold, rollout=number, reward=reward),
            Judged(Judgement(*[score] * 3, rationale={name: f"{name} of {number}" for name in DIMENSIONS}), 1, True),
        )
        for number, score in enumerate(composites)
    ]
    scorer: Any = Scorer()
    scores = asyncio.run(collector.teach(scorer, index, group))
    assert isinstance(group[index].trajectory, Trajectory)
    return scores, offline(POLICY).decode(scorer.scored[0])


@pytest.mark.parametrize(
    ("context_length", "evaluated", "scored", "trained"),
    [(8192, 8192, 8191, 8191), (8193, 8193, 8192, 8192), (10**6, 10**6, 10**6 - 1, 8192), (None, 8192, 8192, 8192)],
)
def test_the_longest_sequence_by_the_context_of_the_service_and_the_spec(
    tau_bench_dir: Path, context_length: int | None, evaluated: int, scored: int, trained: int
) -> None:
    """A scoring samples one token too; the max_seq_len of 8192 bounds training, and all where no context is known."""
    collector = collector_of(tau_bench_dir, context_length)
    assert (collector.longest_evaluated, collector.longest_scored, collector.longest_trained) == (
        evaluated,
        scored,
        trained,
    )


def test_the_student_is_scored_again_under_its_own_context(tau_bench_dir: Path) -> None:
    collector = collector_of(tau_bench_dir)
    gold, scorer = collector.gold("train", 3), Scorer()
    logprobs = asyncio.run(collector.score_again(cast(Any, scorer), gold))
    assert scorer.scored == [list(gold.tokens)]
    assert logprobs == tuple(-1.0 if bit else None for bit in gold.mask)


def test_the_student_is_scored_again_by_the_weights_that_sampled(tau_bench_dir: Path) -> None:
    """Not by the teacher's, which are others where it is the frozen initial policy."""
    collector: Any = collector_of(tau_bench_dir, student="recomputed")
    gold = dataclasses.replace(collector.gold("train", 3), rollout=0)
    judged = Judged(Judgement(0.5, 0.5, 0.5, rationale=dict.fromkeys(DIMENSIONS, "x")), 1, True)
    collector.episode, collector.judge = answering(gold), answering(judged)
    sampler, teacher = Scorer(), Scorer()
    [group] = asyncio.run(collector.groups("train", 0, [3], sampler, teacher, rollouts=1))
    assert sampler.scored == [list(gold.tokens)]
    assert [len(tokens) > len(gold.tokens) for tokens in teacher.scored] == [True]
    assert group.rollouts[0].teacher.student is not None


def test_a_teachers_context_leaves_room_for_the_token_that_a_scoring_samples(tau_bench_dir: Path) -> None:
    """With exactly the context that is left nothing is cut; with one token less the feedback is."""
    gold = collector_of(tau_bench_dir).gold("train", 3)
    judged = Judged(Judgement(0.5, 0.5, 0.5, rationale=dict.fromkeys(DIMENSIONS, "a b c d e f g h")), 1, True)
    scorer: Any = Scorer()

    def shortened(context_length: int) -> int:
        collector = collector_of(tau_bench_dir, context_length)
        return asyncio.run(collector.teach(scorer, 0, [Rollout(gold, judged)])).shortened_tokens

    assert shortened(10**6) == 0
    longest = len(scorer.scored[0])
    assert shortened(longest + 1) == 0
    assert shortened(longest) > 0
    assert len(scorer.scored[-1]) < longest


def test_what_the_judge_is_asked(tau_bench_dir: Path) -> None:
    """With the agent's policy, as much of an answer as the spec gives and the context has, a seed a try."""
    collector: Any = collector_of(tau_bench_dir)
    gold, spec, calls = collector.gold("train", 3), collector.exp.protocol.judge, []

    async def sample(prompt: list[int], **options: Any) -> None:
        calls.append((len(prompt), options))
        raise BackendError("busy")

    def ask(context_length: int | None) -> list[int]:
        calls.clear()
        collector._judge = Partner(cast(Any, SimpleNamespace(sample=sample)), collector.renderer, context_length)
        asyncio.run(collector.judge(gold))
        return [options["max_tokens"] for _, options in calls]

    assert ask(None) == [spec.max_tokens, *[spec.retry_max_tokens] * (spec.tries - 1)]
    length = calls[0][0]
    assert length > len(offline(POLICY).encode(collector.source.wiki))
    assert ask(length + spec.max_tokens + 1) == [spec.max_tokens, *[spec.max_tokens + 1] * (spec.tries - 1)]
    key = ("judge", gold.split, gold.task_index, gold.rollout, gold.seed)
    seed = collector.exp.arms[0].seed
    assert [options["seed"] for _, options in calls] == [derive(seed, *key, attempt) for attempt in range(spec.tries)]
    assert {options["temperature"] for _, options in calls} == {spec.temperature}


def answering(value: Any) -> Any:
    async def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


@pytest.mark.parametrize(
    ("advantage", "sibling"),
    [
        ({}, 2),
        ({"sibling_rule": "first"}, 1),
        ({"sibling_threshold": 0.95}, 2),
        ({"sibling_threshold": 1.0}, None),
        ({"sibling_threshold": 0.875, "sibling_rule": "first"}, 1),  # exactly at the threshold
    ],
)
def test_the_siblings_threshold_and_rule_are_the_specs(
    tau_bench_dir: Path, advantage: dict[str, Any], sibling: int | None
) -> None:
    scores, text = taught(tau_bench_dir, [0.25, 0.875, 0.96875], 0, **advantage)
    assert scores.sibling == sibling
    assert ("Correct solution:" in text) is (sibling is not None)
    assert "ungrounded_claims of 0" in text.replace("ungrounded claims: ", "")
    assert "of 1" not in text.split("feedback from your")[1].split("Correctly solve")[0]


@pytest.mark.parametrize(("wording", "reward", "failed"), [(False, 1.0, True), (True, 1.0, False), (True, 0.0, True)])
def test_the_wording_for_a_success_is_the_specs(
    tau_bench_dir: Path, wording: bool, reward: float, failed: bool
) -> None:
    _, text = taught(tau_bench_dir, [0.5, 0.25], 0, reward=reward, success_wording=wording)
    assert ("unsuccessful earlier attempt" in text) is failed
    assert ("feedback from your earlier attempt" in text) is not failed
