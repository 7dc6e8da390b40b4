"""Every update against the float64 reference, from the student's scores of that moment, and where the loss moves."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

import paritygate_reference.spod as reference
from paritygate.errors import GateStopped
from paritygate.spec import Synthetic
from paritygate.synthetic import training
from paritygate.synthetic.environment import END
from tests.counts import soak


def as_reference(batch: training.TrainingBatch) -> list[dict[str, Any]]:
    """The batch as the reference takes it: episodes of actions with float64 logits."""
    rows = iter(range(len(batch.student_logits)))
    episodes: list[dict[str, Any]] = []
    for episode in batch.episodes:
        actions: list[dict[str, Any]] = []
        for state in range(len(episode.starts)):
            at = [next(rows) for _ in range(episode.action_length)]
            actions.append(
                {
                    "student_logits": batch.student_logits[at].detach().double().numpy(),
                    "teacher_logits": batch.teacher_logits[at].double().numpy(),
                    "tokens": np.array(episode.action(state)),
                }
            )
        episodes.append({"success": episode.success, "actions": actions})
    return episodes


def test_updates_are_those_of_the_reference_with_the_gate_of_the_moment(spec: Synthetic) -> None:
    """A second loop beside the first: the reference's loss and gradient, and torch's Adam."""
    for seed in range(42, 42 + soak(quick=2, full=12)):
        result = training.train_seed(spec, seed, "cpu")
        world = training.World(spec, seed, "cpu")
        adam = torch.optim.Adam(world.student.parameters(), lr=0.05, betas=(0.9, 0.95), eps=1e-8)
        for update in result.updates:
            batch = world.score(world.roll_out(update.update))
            expected = reference.success_preserving_loss(as_reference(batch))
            gradient = reference.success_preserving_grad(as_reference(batch))
            assert update.loss == pytest.approx(expected.loss, rel=1e-5, abs=0.0)
            assert batch.loss.gate.tolist() == [gate for gates in expected.gate for gate in gates]
            assert update.protected == sum(sum(gates) for gates in expected.gate)
            rows = torch.tensor(np.concatenate([rows for actions in gradient for rows in actions]), dtype=torch.float32)
            parameters = list(world.student.parameters())
            grads = torch.autograd.grad(batch.student_logits, parameters, rows)
            assert update.gradient_norm == pytest.approx(
                float(torch.cat([grad.flatten() for grad in grads]).double().norm()), rel=1e-4
            )
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            adam.step()


def test_keeping_the_kl_at_protected_actions_would_show(spec: Synthetic) -> None:
    result = training.train_seed(spec, 42, "cpu")
    for update, batch in zip(result.updates, result.batches, strict=True):
        assert update.protected > 0
        failed = [{**episode, "success": False} for episode in as_reference(batch)]
        kept = reference.success_preserving_loss(failed).loss + sum(
            sum(floors) / len(floors) / len(batch.episodes)
            for floors in reference.success_preserving_loss(as_reference(batch)).floor
        )
        assert abs(kept - update.loss) > 0.01


def test_counts_are_those_of_the_batch(spec: Synthetic) -> None:
    result = training.train_seed(spec, 43, "cpu")
    assert [update.update for update in result.updates] == [1, 2, 3]
    for update, batch in zip(result.updates, result.batches, strict=True):
        assert len(batch.episodes) == spec.episodes_per_update
        assert update.actions == sum(len(episode.starts) for episode in batch.episodes)
        assert update.successful_episodes == sum(episode.success for episode in batch.episodes)
        below = batch.loss.gate & (batch.loss.floor > 0)
        assert update.protected_below_floor == int(below.sum())


def test_gates_change_from_update_to_update(spec: Synthetic) -> None:
    changed = [
        update.gates_changed_by_update for seed in range(6) for update in training.train_seed(spec, seed, "cpu").updates
    ]
    assert sum(changed) > 0  # so a gate kept from before an update would be another gate


def test_the_teacher_is_another_model_and_stays_as_it_is(spec: Synthetic) -> None:
    world = training.World(spec, 42, "cpu")
    before = {name: value.clone() for name, value in world.teacher.state_dict().items()}
    assert any(not torch.equal(value, world.student.state_dict()[name]) for name, value in before.items())
    batch = world.score(world.roll_out(1))
    assert batch.student_logits.requires_grad
    assert not batch.teacher_logits.requires_grad
    batch.loss.loss.backward()
    torch.optim.SGD(world.student.parameters(), lr=1.0).step()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in world.teacher.parameters())
    assert all(torch.equal(value, world.teacher.state_dict()[name]) for name, value in before.items())


def test_an_action_is_scored_with_its_end_token_by_raw_probabilities(spec: Synthetic) -> None:
    world = training.World(spec, 42, "cpu")
    batch = world.score(world.roll_out(1))
    place = 0
    for episode in batch.episodes:
        logprobs = world.student(episode.history).double().log_softmax(-1)
        for state, start in enumerate(episode.starts):
            action = episode.action(state)
            assert action[-1] == END
            assert len(action) == spec.action_tokens + 1
            whole = sum(float(logprobs[start + offset - 1, token].detach()) for offset, token in enumerate(action))
            assert float(batch.loss.student_logprob[place]) == pytest.approx(whole, rel=1e-5, abs=0.0)
            place += 1


def fixed(spec: Synthetic, *, success: bool, steps: int) -> tuple[training.TrainingBatch, training.TrainingBatch]:
    """The first and the last batch of many steps on the same episodes, all with one bit."""
    world = training.World(spec, 42, "cpu")
    episodes = [dataclasses.replace(episode, success=success) for episode in world.roll_out(1)]
    optimizer = torch.optim.Adam(world.student.parameters(), lr=0.05)
    first = world.score(episodes)
    for _ in range(steps):
        optimizer.zero_grad()
        world.score(episodes).loss.loss.backward()
        optimizer.step()
    return first, world.score(episodes)


def test_without_success_everything_is_distilled(small: Synthetic) -> None:
    first, last = fixed(small, success=False, steps=soak(quick=60, full=400))
    assert not last.loss.gate.any()
    assert float(last.loss.loss.detach()) < 0.5 * float(first.loss.loss.detach())
    assert bool((last.loss.floor == 0).all())


def test_a_protected_action_is_raised_to_the_floor_and_then_left_alone(small: Synthetic) -> None:
    one = dataclasses.replace(small, episodes_per_update=1)
    _, last = fixed(one, success=True, steps=150)
    protected = last.loss.gate
    assert protected.any()
    high = last.loss.student_logprob[protected] >= math.log(0.5)
    assert high.all()
    assert bool((last.loss.floor[protected][high] == 0).all())
    assert float(last.loss.teacher_logprob[protected].max()) < math.log(0.5)  # the teacher does not favour them


def test_a_seed_is_a_stream_of_its_own(spec: Synthetic) -> None:
    roles = [
        ("student", 42),
        ("teacher", 42),
        ("student", 43),
        ("actions", 42, 1, 1),
        ("actions", 42, 11),
        ("rules", 42),
    ]
    assert len({training.stream(spec, role, *numbers) for role, *numbers in roles}) == len(roles)
    torch.manual_seed(0)
    before = torch.rand(3)
    torch.manual_seed(0)
    one = training.train_seed(spec, 44, "cpu")
    assert torch.equal(torch.rand(3), before)  # nothing is drawn from the global generator
    assert training.train_seed(spec, 44, "cpu").updates == one.updates
    assert training.train_seed(spec, 45, "cpu").updates != one.updates


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_stops_before_the_step(small: Synthetic, broken: float) -> None:
    world = training.World(small, 42, "cpu")
    batch = world.score(world.roll_out(1))
    kl = batch.loss.kl.clone()
    kl[2] = broken
    broken_batch = dataclasses.replace(batch, loss=batch.loss._replace(kl=kl))
    with pytest.raises(GateStopped, match=r"seed 42, update 3: action 2 \(episode \d\) contributes (inf|nan)"):
        training.refuse_infinite(42, 3, broken_batch, 1.0)
    with pytest.raises(GateStopped, match="the gradient norm is"):
        training.refuse_infinite(42, 3, batch, broken)
    training.refuse_infinite(42, 3, batch, 1.0)
