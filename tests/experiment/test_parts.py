"""The parts of the protocol that are pure: advantages, metrics, the journal, feasibility."""

import dataclasses
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paritygate.agent.judge import DIMENSIONS, Judged, Judgement
from paritygate.agent.rollouts import Group, Rollout, TeacherScores
from paritygate.agent.trajectory import Trajectory
from paritygate.experiment.phases.activation_pilot import is_divergence
from paritygate.experiment.phases.evaluate import item_of
from paritygate.experiment.phases.report import keep_products
from paritygate.experiment.phases.timing_pilot import project, seconds_by_part
from paritygate.experiment.run.directory import latest_run
from paritygate.experiment.run.journal import Journal, Timings, drop_torn_tail, read_lines
from paritygate.experiment.run.state import State
from paritygate.experiment.step.advantages import group_advantages
from paritygate.experiment.step.batch import _placeholder
from paritygate.experiment.step.gates import check_gate
from paritygate.experiment.step.metrics import add_tallies, advantage_metrics, gate_values, measured_over, tally
from paritygate.receipts import canonical
from paritygate.spec import GateCheck, load
from paritygate.spec.schema import spec_folder

SCORE = st.floats(0.0, 1.0)
LOGPROB = st.floats(-20.0, 0.0)


class Scores(NamedTuple):
    """One rollout of a group, as an advantage sees it."""

    composite: float | None
    mask: list[int]
    student: list[float | None]
    teacher: list[float | None] | None


def advantages(kind: str, group: list[Scores], *, clip: float = 5.0, hybrid_weight: float = 0.9) -> list[list[float]]:
    columns = [list(column) for column in zip(*group, strict=True)] or [[]] * 4
    return group_advantages(kind, *columns, clip=clip, hybrid_weight=hybrid_weight)


@st.composite
def groups(draw: st.DrawFn) -> list[Scores]:
    scores: list[Scores] = []
    for _ in range(draw(st.integers(1, 5))):
        mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        rows = [[draw(LOGPROB) if bit else None for bit in mask] for _ in range(2)]
        scores.append(Scores(draw(st.none() | SCORE), mask, rows[0], rows[1]))
    return scores


@given(groups())
def test_grpo_is_the_centred_composite_on_the_mask(group: list[Scores]) -> None:
    rows = advantages("grpo", group)
    judged = [scores.composite for scores in group if scores.composite is not None]
    mean = math.fsum(judged) / len(judged) if judged else 0.0
    for scores, row in zip(group, rows, strict=True):
        centred = 0.0 if scores.composite is None else scores.composite - mean
        assert row == pytest.approx([centred * bit for bit in scores.mask], abs=1e-12)


@given(groups(), st.floats(0.1, 6.0))
def test_sdpo_is_the_clipped_difference_on_the_mask(group: list[Scores], clip: float) -> None:
    rows = advantages("sdpo_token", group, clip=clip)
    for scores, row in zip(group, rows, strict=True):
        for bit, student, teacher, value in zip(scores.mask, scores.student, scores.teacher or (), row, strict=True):
            if not bit or scores.composite is None:
                assert value == 0.0
            else:
                assert student is not None
                assert teacher is not None
                assert value == pytest.approx(max(-clip, min(clip, teacher - student)), abs=1e-9)


@given(groups())
def test_a_rollout_without_a_judgement_is_as_if_it_had_not_been(group: list[Scores]) -> None:
    """The others' advantages are those of the group without it; its own are 0."""
    for kind in ("grpo", "sdpo_token", "sdpo_sequence", "hybrid"):
        rows = advantages(kind, group)
        kept = [scores for scores in group if scores.composite is not None]
        assert [row for scores, row in zip(group, rows, strict=True) if scores.composite is not None] == (
            advantages(kind, kept) if kept else []
        )
        assert all(not any(row) for scores, row in zip(group, rows, strict=True) if scores.composite is None)


@given(groups(), st.floats(0.1, 6.0))
def test_hybrid_lies_between_its_ends(group: list[Scores], clip: float) -> None:
    assert advantages("hybrid", group, clip=clip, hybrid_weight=1.0) == advantages("grpo", group)
    assert advantages("hybrid", group, clip=clip, hybrid_weight=0.0) == advantages("sdpo_token", group, clip=clip)


def test_hybrid_clips_at_the_clip_of_the_spec() -> None:
    """By hand, w = 0.75: w * (composite - 0.5) + (1 - w) * the difference, 3, -7 and 1 clipped at 2 or at 6 nats."""
    first = Scores(1.0, [0, 1, 1, 1], [None, -4.0, -1.0, -2.0], [None, -1.0, -8.0, -1.0])
    group = [first, Scores(0.0, [1], [-1.0], [-1.0])]
    assert advantages("hybrid", group, clip=2.0, hybrid_weight=0.75) == [[0.0, 0.875, -0.125, 0.625], [-0.375]]
    assert advantages("hybrid", group, clip=6.0, hybrid_weight=0.75) == [[0.0, 1.125, -1.125, 0.625], [-0.375]]


def test_what_cannot_be_an_advantage_is_named() -> None:
    bad = Scores(0.5, [0, 1, 1], [None, -1.0, math.nan], [None, -1.0, -1.0])
    with pytest.raises(ValueError, match=r"rollout 1 of the group: .*2"):
        advantages("sdpo_token", [Scores(0.5, [0], [None], [None]), bad])
    with pytest.raises(ValueError, match="no teacher logprobs"):
        advantages("sdpo_token", [Scores(0.5, [1], [-1.0], None)])
    with pytest.raises(ValueError, match="'ppo'"):
        advantages("ppo", [Scores(0.5, [1], [-1.0], [-1.0])])


def test_a_gate_is_measured_over_all_tokens_of_the_pilot() -> None:
    """Two steps of unequal size: the share of their tokens, not the mean of their shares."""
    steps = [
        {"teacher_trajectories": 1, "teacher_with_feedback": 1, "loss_tokens": 10, "loss_tokens_over_0.1": 10},
        {"teacher_trajectories": 3, "teacher_with_feedback": 2, "loss_tokens": 90, "loss_tokens_over_0.1": 0},
    ]
    rest = {"groups": 2, "groups_with_variance": 1, "judge_calls": 8, "judge_parsed_first": 8}
    values = gate_values(add_tallies([step | rest | {"sum_abs_gap": "inf"} for step in steps]), "model")
    assert values["sdpo_frac_tokens_abs_adv_gt_0.1"] == 0.1
    assert values["sdpo_frac_trajectories_with_feedback"] == 0.75
    assert values["sdpo_mean_abs_token_adv"] == math.inf
    assert values["grpo_frac_groups_nonzero_adv"] == 0.5


def unit(step: int) -> dict[str, Any]:
    return {"state": f"s{step}", "metrics": {"step": step, "value": step / 3, "odd": math.nan}}


def test_the_journal_is_rebuilt_from_its_units(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in range(12):
        journal.commit(f"lane/step-{step:03d}", unit(step))
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    assert [line["index"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(12))
    for torn in (b"", whole[:40], whole[:-1], whole[: whole.rfind(b"{")], whole + b'{"step":99}\n'):
        (tmp_path / "metrics.jsonl").write_bytes(torn)
        assert Journal(tmp_path).units("lane/") == [f"lane/step-{step:03d}" for step in range(12)]
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    Journal(tmp_path).commit("lane/step-012", unit(12))
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["index"] == 12


def test_the_thousandth_step_comes_after_the_one_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for index, step in enumerate((1000, 999, 100)):
        journal.commit(f"lane/step-{step:03d}", unit(index))
    assert journal.units() == ["lane/step-100", "lane/step-999", "lane/step-1000"]


def test_a_unit_is_committed_once(tmp_path: Path) -> None:
    Journal(tmp_path).commit("lane/step-000", unit(0))
    with pytest.raises(FileExistsError):
        Journal(tmp_path).commit("lane/step-000", unit(1))
    assert (Journal(tmp_path).committed("lane/step-000") or {})["state"] == "s0"
    assert Journal(tmp_path).committed("lane/step-001") is None


def test_times_survive_a_torn_line(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "timings.jsonl")
    with timings.measure("train", what="step", step=0):
        pass
    whole = timings.path.read_bytes()
    timings.path.write_bytes(whole + b'{"phase":"tr')
    drop_torn_tail(timings.path)
    assert timings.path.read_bytes() == whole
    with pytest.raises(RuntimeError), timings.measure("train", what="step", step=1):
        raise RuntimeError
    assert [entry["step"] for entry in timings.entries("train")] == [0, 1]
    assert json.loads(whole)["seconds"] >= 0


def taught_episode(gaps: list[float]) -> Rollout:
    """An episode of one sampled token a gap, which the teacher likes that much better than the student's 0 nats."""
    n = len(gaps)
    tokens, mask, student = (0, *range(1, n + 1)), (0, *[1] * n), (None, *[0.0] * n)
    trajectory = Trajectory("train", 0, 0, 0, tokens, mask, student, 1, ((1, n + 1),), (), "user_stop", 1, 0.0, {})
    judgement = Judgement(0.5, 0.5, 0.5, dict.fromkeys(DIMENSIONS, "x"))
    return Rollout(trajectory, Judged(judgement, 1, True), TeacherScores((None, *gaps), True, None, 0, 1))


def test_what_is_exactly_at_a_bound_is_neither_clipped_nor_over_it() -> None:
    rollout = taught_episode([0.1, -0.1, 0.100001, 2.0, -2.0, 2.5, 0.0, -3.0])
    counts = tally([Group(0, (rollout,))])
    assert (counts["loss_tokens"], counts["loss_tokens_over_0.1"]) == (8, 5)
    advantages = [[0.0] * 9]
    assert advantage_metrics([rollout], advantages, clip=2.0)["frac_clipped"] == 0.25


def test_who_was_told_that_a_success_had_failed() -> None:
    """An episode of reward 1 with feedback in its teacher's context, unless the spec asks for the other wording."""
    lost = taught_episode([0.1])
    won = dataclasses.replace(lost, trajectory=dataclasses.replace(lost.trajectory, reward=1.0))
    untaught = TeacherScores((None, None), False, None, 0, 0)
    unjudged = dataclasses.replace(won, judged=Judged(None, 3, False), teacher=untaught)
    groups = [Group(0, (lost, won, won, unjudged))]
    assert tally(groups)["loss_tokens"] == 3  # what trains; an episode without a judgement does not
    assert tally(groups)["teacher_told_unsuccessful"] == 2
    assert tally(groups, success_wording=True)["teacher_told_unsuccessful"] == 0


def test_the_recomputed_difference_of_a_pilot_is_the_largest_of_its_steps() -> None:
    steps = [
        {"tally": {}, "metrics": {"executed_base_model": "m", "sampler_recomputed_max_abs_diff": size}}
        for size in (0.25, None, 0.5, 0.125)
    ]
    assert measured_over(steps)["sampler_recomputed_max_abs_diff"] == 0.5


@pytest.mark.parametrize(("ended_by", "bit"), [("user_fault", 1), ("sequence_limit", 0)])
def test_what_spoilt_an_episode_is_named(ended_by: Any, bit: int) -> None:
    """A prompt that fills the sequence leaves the agent no turn, which is no fault of the user simulator."""
    fault = "the user simulator failed" if bit else "the agent said nothing"
    whole = taught_episode([0.1])
    trajectory = dataclasses.replace(whole.trajectory, ended_by=ended_by, mask=(0, bit))
    spoilt = dataclasses.replace(whole, trajectory=trajectory)
    assert (whole.trajectory.trains, trajectory.trains, spoilt.composite) == (True, False, None)
    arm: Any = SimpleNamespace(name="grpo")
    assert item_of(arm, 0, 0, spoilt, 1)["missing"] == fault
    unparsed = dataclasses.replace(whole, judged=Judged(None, 3, False))
    assert item_of(arm, 0, 0, unparsed, 1)["missing"] == "the judge was not parsed"
    with pytest.raises(ValueError, match=rf"^{fault} in all 2 episodes of the step$"):
        _placeholder([spoilt, spoilt], [])
    assert _placeholder([spoilt, unparsed], []) == [1]


def test_each_arms_last_state_and_sampler_stay_of_what_the_server_saved(tmp_path: Path) -> None:
    """A user trains on from the one and samples from the other; everything else is deleted, empty folders too."""
    products = {"run/weights/grpo-2", "run/sampler_weights/grpo-2", "run/weights/sdpo-2", "run/sampler_weights/sdpo-2"}
    others = {"run/weights/grpo-1", "run/sampler_weights/grpo-1", "pilot/weights/step-2"}
    for name in products | others:
        (tmp_path / "service" / name).mkdir(parents=True)
        (tmp_path / "service" / name / "weights").touch()
    arms = [SimpleNamespace(name=name) for name in ("grpo", "sdpo")]
    state: Any = SimpleNamespace(
        directory=tmp_path,
        exp=SimpleNamespace(steps=3, arms=arms),
        journal=Journal(tmp_path / "journal"),
        facts=lambda _: {"samplers": {arm.name: f"tinker://run/sampler_weights/{arm.name}-2" for arm in arms}},
        saved=lambda path: State.saved(state, path),
    )
    for arm in arms:
        for step in range(3):
            record = {"state": f"tinker://run/weights/{arm.name}-{step}"}
            state.journal.commit(f"train-{arm.name}/step-{step:03d}", record)
    keep_products(state)
    left = tmp_path.joinpath("service").glob("*/*/*")
    assert {str(path.relative_to(tmp_path / "service")) for path in left} == products
    assert [path.name for path in (tmp_path / "service").iterdir()] == ["run"]


def test_divergence_is_seen_whichever_gate_bounds_it() -> None:
    """A metric may have a gate for its lower bound and another for its upper one."""
    low, high = (
        GateCheck("sdpo_mean_abs_token_adv", "", least, most, None) for least, most in ((0.05, None), (None, 5.0))
    )
    state: Any = SimpleNamespace(exp=SimpleNamespace(activation_gate=SimpleNamespace(checks=(low, high))))
    for measured, diverged in ((0.01, False), (5.0, False), (5.000001, True), (math.nan, True)):
        assert is_divergence(check_gate(high, measured), state) is diverged


def test_arms_side_by_side_are_as_many_as_the_cores_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert State.side_by_side() == 1


def test_a_projection_by_hand() -> None:
    """Seconds of a step of 7: two arms at once, pilots of 2 steps, 20 steps, evaluation in waves of 16 episodes."""
    exp = load(spec_folder() / "sdpo.json")
    account = SimpleNamespace(record=lambda: None, seconds=lambda: 100.0)
    state: Any = SimpleNamespace(exp=exp, account=account)
    parts = {"rollouts": 5.0, "optim_step": 2.0}
    episodes = exp.eval.n_examples * exp.eval.rollouts_per_task
    for at_once, rounds in ((2, 1), (1, 2)):
        made = project(state, exp.arms[0], parts, embedded=False, arms_at_once=at_once)
        assert made["phases"] == {
            "spent": 100.0,
            "activation_pilot": 7.0 * exp.protocol.pilot.steps * rounds,
            "train": 7.0 * exp.steps * rounds,
            "evaluate": 5.0 * math.ceil(episodes / 16) * rounds,
        }
        assert made["wall_seconds"] == sum(made["phases"].values())


def test_the_timed_step_is_multiplied_where_it_grows_with_the_episodes(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "timings.jsonl")
    for what, seconds in (("rollouts", 9.0), ("rollouts", 3.0), ("forward_backward", 2.0), ("save", 1.0)):
        timings.append("timing_pilot", what=what, step=0, seconds=seconds)  # a kill had it be timed twice
    timings.append("timing_pilot", what="phase", seconds=50.0)
    state: Any = SimpleNamespace(timings=timings)
    assert seconds_by_part(state, 4.0) == {"rollouts": 12.0, "forward_backward": 8.0, "save": 1.0}


def test_a_resume_without_a_name_goes_on_with_the_newest_run_of_the_spec(tmp_path: Path) -> None:
    exp = load(spec_folder() / "sdpo.json")
    for stamp, frozen in (("20260101-000000", exp.frozen), ("20260301-000000", exp.frozen), ("20260401-000000", {})):
        folder = tmp_path / "runs" / f"sdpo-{stamp}"
        folder.mkdir(parents=True)
        (folder / "spec.json").write_bytes(canonical(dict(frozen)))
    assert latest_run(exp, tmp_path) == tmp_path / "runs" / "sdpo-20260301-000000"
