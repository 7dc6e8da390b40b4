"""The option that takes the advantage from recomputed student logprobs: off by default, recorded when on."""

import dataclasses

import pytest

from paritygate.agent.judge import Judged, Judgement
from paritygate.agent.rollouts import Group, Rollout, TeacherScores
from paritygate.agent.trajectory import Trajectory
from paritygate.experiment.phases.preflight.spec_preflight import deviations
from paritygate.experiment.step.batch import batch_advantages
from paritygate.experiment.step.metrics import gaps
from paritygate.spec import Experiment, load
from paritygate.spec.schema import spec_folder

TRAJECTORY = Trajectory(
    split="train",
    task_index=0,
    rollout=0,
    seed=0,
    tokens=(5, 6, 7, 8),
    mask=(0, 1, 0, 1),
    sampler_logprobs=(None, -1.0, None, -2.0),
    prompt_length=1,
    spans=((1, 2), (3, 4)),
    messages=(),
    ended_by="user_stop",
    turns=2,
    reward=0.0,
    grade={},
)
JUDGED = Judged(
    Judgement(
        invalid_tool_use=1.0,
        ungrounded_claims=1.0,
        upfront_clarification=1.0,
        rationale=dict.fromkeys(("invalid_tool_use", "ungrounded_claims", "upfront_clarification"), "fine"),
    ),
    1,
    first_try_parsed=True,
)
TEACHER = TeacherScores((None, -0.5, None, -1.0), True, None, 0, 9)


def advantages(rollout: Rollout) -> list[list[float]]:
    """Of the token-level arm of the experiment, for a group of this rollout alone."""
    spec = load(spec_folder() / "sdpo.json")
    assert isinstance(spec, Experiment)
    [arm] = [arm for arm in spec.arms if arm.kind == "sdpo_token"]
    return batch_advantages(spec, arm, [Group(0, (rollout,))])


def test_by_default_the_teacher_is_compared_with_what_was_sampled():
    rollout = Rollout(TRAJECTORY, JUDGED, TEACHER)
    assert gaps(rollout) == [0.5, 1.0]
    assert advantages(rollout) == [[0.0, 0.5, 0.0, 1.0]]


def test_recomputed_student_logprobs_replace_the_sampled_ones_in_the_advantage_alone():
    teacher = dataclasses.replace(TEACHER, student=(None, -0.75, None, -1.25))
    rollout = Rollout(TRAJECTORY, JUDGED, teacher)
    assert gaps(rollout) == [0.25, 0.25]
    assert advantages(rollout) == [[0.0, 0.25, 0.0, 0.25]]
    assert rollout.trajectory.sampler_logprobs == TRAJECTORY.sampler_logprobs  # the loss keeps the sampled ones


@pytest.mark.parametrize(
    ("change", "key"),
    [({"student": "recomputed"}, "recomputed_student"), ({"success_wording": True}, "success_wording")],
)
def test_an_option_that_departs_from_what_was_asked_is_a_deviation(change: dict[str, object], key: str):
    spec = load(spec_folder() / "sdpo.json")
    assert isinstance(spec, Experiment)
    as_asked = deviations(spec)
    assert [kind for kind, _ in as_asked] == ["no_ema"]
    protocol = dataclasses.replace(spec.protocol, advantage=dataclasses.replace(spec.protocol.advantage, **change))
    [(kind, sentence)] = [d for d in deviations(dataclasses.replace(spec, protocol=protocol)) if d not in as_asked]
    assert kind == key
    assert sentence
