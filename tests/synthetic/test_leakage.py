"""The success bit reaches the loss and nothing that the actor sees; a leak of it is detected."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from paritygate.spec import Synthetic
from paritygate.synthetic import training
from paritygate.synthetic.environment import OBSERVATIONS, Environment
from paritygate.synthetic.model import CausalGru
from tests.counts import soak

Bit = Callable[["Judged"], bool]


class Judged(Environment):
    """The environment with a bit of our choice."""

    bit: Bit = Environment.success

    def success(self) -> bool:
        return type(self).bit(self)


class Leaking(Judged):
    """The mistake: the first observation after an action says what the bit will be."""

    def act(self, action: list[int]) -> int | None:
        observation = super().act(action)
        if observation is None:
            return None
        self.observation = OBSERVATIONS[int(type(self).bit(self))]
        return self.observation


def episodes_with(
    monkeypatch: pytest.MonkeyPatch, spec: Synthetic, seed: int, kind: type[Judged], bit: Bit
) -> tuple[training.Episode, ...]:
    monkeypatch.setattr(kind, "bit", bit)
    monkeypatch.setattr(training, "Environment", kind)
    return training.World(spec, seed, "cpu").roll_out(1)


def public(episodes: tuple[training.Episode, ...]) -> list[tuple[int, ...]]:
    return [episode.history for episode in episodes]


def test_other_bits_change_no_sampled_action(monkeypatch: pytest.MonkeyPatch, spec: Synthetic) -> None:
    for seed in range(soak(quick=5, full=60)):
        episodes = {
            name: episodes_with(monkeypatch, spec, seed, Judged, bit)
            for name, bit in {
                "own": Environment.success,
                "flipped": lambda environment: not Environment.success(environment),
                "all": lambda _: True,
            }.items()
        }
        assert public(episodes["own"]) == public(episodes["flipped"]) == public(episodes["all"])
        bits = {name: [episode.success for episode in group] for name, group in episodes.items()}
        assert bits["own"] == [not bit for bit in bits["flipped"]]
        assert all(bits["all"])


def test_a_leak_is_detected(monkeypatch: pytest.MonkeyPatch, spec: Synthetic) -> None:
    yes = episodes_with(monkeypatch, spec, 0, Leaking, lambda _: True)
    no = episodes_with(monkeypatch, spec, 0, Leaking, lambda _: False)
    assert public(yes) != public(no)


def test_the_actor_is_fed_the_public_history_and_nothing_else(monkeypatch: pytest.MonkeyPatch, spec: Synthetic) -> None:
    fed: list[int] = []
    step = CausalGru.step

    def recorded(self: CausalGru, token: int, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        fed.append(token)
        return step(self, token, state)

    monkeypatch.setattr(CausalGru, "step", recorded)
    world = training.World(spec, 42, "cpu")
    for episode in world.roll_out(1):
        expected: list[int] = []
        for start in episode.starts:  # at every state: the history so far, then the content tokens of the action
            expected += episode.history[: start + spec.action_tokens]
        assert fed[: len(expected)] == expected
        del fed[: len(expected)]
    assert not fed


def test_the_bit_decides_the_gate(spec: Synthetic) -> None:
    world = training.World(spec, 42, "cpu")
    episodes = world.roll_out(1)
    gates = {
        bit: world.score([dataclasses.replace(episode, success=bit) for episode in episodes]).loss.gate
        for bit in (True, False)
    }
    assert not gates[False].any()
    assert gates[True].any()
    scored = world.score(episodes)
    assert torch.equal(scored.loss.gate, gates[True] & scored.packed.success[scored.packed.episode_index])


def test_logits_depend_on_nothing_later(spec: Synthetic) -> None:
    model = CausalGru(vocabulary=16, hidden=8, seed=1)
    tokens = [12, 3, 4, 5, 0, 13]
    whole = model(tokens)
    for place in range(1, len(tokens)):
        changed = [*tokens[:place], (tokens[place] + 1) % 16, *tokens[place + 1 :]]
        assert torch.equal(model(changed)[:place], whole[:place])
        assert not torch.equal(model(changed)[place:], whole[place:])
