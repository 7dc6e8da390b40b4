"""The environment tells ids of observations while an episode runs, and its bit afterwards only."""

import random

import pytest

from paritygate.synthetic.environment import CONTENT, END, OBSERVATIONS, Environment, Rules


def random_action(rng: random.Random, length: int = 3) -> list[int]:
    return [*rng.choices(CONTENT, k=length), END]


def test_the_vocabulary_has_sixteen_tokens_that_do_not_overlap() -> None:
    assert sorted([END, *CONTENT, *OBSERVATIONS]) == list(range(16))


def test_episodes_have_several_states_and_end_with_one_bit_of_either_kind() -> None:
    rng = random.Random(0)
    lengths: set[int] = set()
    bits: list[bool] = []
    for seed in range(200):
        environment = Environment(Rules.drawn(seed % 7), least=2, most=4, action_tokens=3, seed=seed)
        observation: int | None = environment.observation
        states = 0
        while observation is not None:
            assert observation in OBSERVATIONS
            with pytest.raises(RuntimeError, match="at the end of an episode only"):
                environment.success()
            observation = environment.act(random_action(rng))
            states += 1
        lengths.add(states)
        bits.append(environment.success())
        with pytest.raises(RuntimeError, match="the episode is over"):
            environment.act(random_action(rng))
    assert lengths == {2, 3, 4}
    assert 40 < sum(bits) < 160


def test_the_bit_is_what_the_hidden_keys_say() -> None:
    rules = Rules.drawn(3)
    for good in (True, False):
        environment = Environment(rules, least=3, most=3, action_tokens=3, seed=1)
        observation: int | None = environment.observation
        while observation is not None:
            key = rules.keys[observation]
            tokens = sorted(key if good else set(CONTENT) - key)
            observation = environment.act([*tokens[:3], END])
        assert environment.success() is good


@pytest.mark.parametrize(
    "action", [[], [END], [1, 2, END], [1, 2, 3], [1, 2, 3, 4, END], [1, 2, 12, END], [0, 1, 2, END]]
)
def test_an_action_has_its_length_its_tokens_and_its_end(action: list[int]) -> None:
    environment = Environment(Rules.drawn(0), least=2, most=2, action_tokens=3, seed=0)
    with pytest.raises(ValueError, match="is no action"):
        environment.act(action)
