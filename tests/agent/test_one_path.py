"""One rendering, one group, one shift: what sampling, the teacher, evaluation and the loss have to see alike."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from paritygate import retail
from paritygate.agent.episode import first_prompt
from paritygate.agent.judge import DIMENSIONS, Judged, Judgement
from paritygate.agent.rollouts import Group, Rollout
from paritygate.agent.trajectory import Trajectory
from paritygate.agent.user import opening
from paritygate.experiment.run.options import Options, Settings
from paritygate.experiment.step.advantages import group_advantages
from paritygate.experiment.step.batch import batch_advantages
from paritygate.experiment.step.collector import Collector
from paritygate.experiment.step.metrics import logprob_difference
from paritygate.spec import load
from paritygate.spec.schema import spec_folder
from tests.agent.fakes import Script


def judged(score: float) -> Judged:
    """A judgement of one score in every dimension, with nothing to say."""
    return Judged(Judgement(**dict.fromkeys(DIMENSIONS, score), rationale=dict.fromkeys(DIMENSIONS, "")), 1, True)


def rollout(task: int, number: int, score: float, logprobs: tuple[float | None, ...] = (None, -1.0, None, -2.0)):
    """A judged episode of four tokens, the second and the last of them sampled."""
    trajectory = Trajectory(
        split="train",
        task_index=task,
        rollout=number,
        seed=0,
        tokens=(5, 6, 7, 8),
        mask=(0, 1, 0, 1),
        sampler_logprobs=logprobs,
        prompt_length=1,
        spans=((1, 2), (3, 4)),
        messages=(),
        ended_by="user_stop",
        turns=2,
        reward=0.0,
        grade={},
    )
    return Rollout(trajectory, judged(score))


@pytest.mark.parametrize("kind", ["compact", "full"])
def test_sampling_scoring_and_evaluation_see_one_rendering(renderers, tau_bench_dir, tmp_path, kind):
    """Training (cookbook #796) and evaluation (#382) prompts, and the teacher's without a word to add, are one text."""
    exp = load(spec_folder() / "sdpo.json")
    protocol = dataclasses.replace(exp.protocol, context=dataclasses.replace(exp.protocol.context, kind=kind))
    state = SimpleNamespace(exp=dataclasses.replace(exp, protocol=protocol), options=Options(tmp_path))
    renderer, source = renderers["qwen3.5"], retail.load(tau_bench_dir)
    collector = Collector(state, Settings(3, "current"), source, renderer, None, None, 10**6)
    stop = renderer.get_stop_token_ids()[0]
    script = Script(lambda prompt, seed: [stop])

    async def play():
        limits = collector.limits(exp.protocol.rollout.temperature, exp.max_seq_len)
        trained = await collector.episode(script, "train", 3, 0, 1, limits)
        evaluated = await collector.evaluation_episode(script, 4, 0, 0)
        taught = await collector.teach(script, 0, [Rollout(trained, judged(0.0))])
        await collector.score_again(script, trained)
        return trained, evaluated.trajectory, taught

    trained, evaluated, taught = asyncio.run(play())
    for trajectory in (trained, evaluated):
        task = source.task(trajectory.split, trajectory.task_index)
        prompt = first_prompt(renderer, collector.context, opening(task))
        assert list(trajectory.tokens[: trajectory.prompt_length]) == prompt
    assert taught.context == trained.tokens[: trained.prompt_length]
    assert script.scored == [list(trained.tokens)] * 2


def test_rewards_are_centred_within_each_group():
    """A step of two tasks, one of them easy: the mean is its group's, not the step's (and TRL's batch's)."""
    exp = load(spec_folder() / "sdpo.json")
    arm = next(arm for arm in exp.arms if arm.kind == "grpo")
    groups = [
        Group(3, (rollout(3, 0, 1.0), rollout(3, 1, 1.0))),
        Group(9, (rollout(9, 0, 0.5), rollout(9, 1, 0.0))),
    ]
    rows = batch_advantages(exp, arm, groups)
    assert rows == [[0.0] * 4, [0.0] * 4, [0.0, 0.25, 0.0, 0.25], [0.0, -0.25, 0.0, -0.25]]


@pytest.mark.parametrize("kind", ["sdpo_token", "sdpo_sequence", "hybrid"])
def test_a_token_without_a_logprob_is_refused_and_not_read_as_certain(kind):
    """None is what a service gives where nothing is predicted; 0.0 would be a probability of one."""
    student, teacher = [None, -1.0, -2.0], [None, -0.5, -1.0]
    for students, teachers in (([student, [None, -1.0, None]], [teacher] * 2), ([student] * 2, [teacher, [None] * 3])):
        with pytest.raises(ValueError, match=r"rollout 1 of the group: .* at position [12] is nan"):
            group_advantages(kind, [1.0] * 2, [[0, 1, 1]] * 2, students, teachers, clip=5.0, hybrid_weight=0.5)


def test_sampled_against_recomputed_logprobs_is_a_metric():
    """A service whose sampled log-probabilities are exactly 0 where they are not (cookbook #396) shows."""
    difference = logprob_difference([rollout(0, 0, 1.0, (None, 0.0, None, -2.0))], [[-0.75, -9.0, -2.25]])
    assert difference == {"sampler_recomputed_mean_abs_diff": 0.5, "sampler_recomputed_max_abs_diff": 0.75}
