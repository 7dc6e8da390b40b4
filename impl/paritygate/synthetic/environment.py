"""The synthetic environment: public observations at every state, and one success bit when the episode is over.

The vocabulary of 16 tokens is shared by everything that is said: 0 ends an action, 1 to 11 are what an actor may say,
12 to 15 are the ids of observations. What makes an episode a success is known to the environment alone.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

END = 0
CONTENT = range(1, 12)
OBSERVATIONS = range(12, 16)
KEY_SIZE = 6


@dataclass(frozen=True)
class Rules:
    """What a world's environment hides: the good tokens of an observation, and where a first token leads from it."""

    keys: dict[int, frozenset[int]]
    leads_to: dict[tuple[int, int], int]

    @classmethod
    def drawn(cls, seed: int) -> "Rules":
        """The rules of one world."""
        rng = random.Random(seed)
        keys = {observation: frozenset(rng.sample(CONTENT, KEY_SIZE)) for observation in OBSERVATIONS}
        leads_to = {(observation, token): rng.choice(OBSERVATIONS) for observation in OBSERVATIONS for token in CONTENT}
        return cls(keys, leads_to)


class Environment:
    """One episode: `observation`, then `act` until it gives None, and only then `success`."""

    def __init__(self, rules: Rules, *, least: int, most: int, action_tokens: int, seed: int) -> None:
        rng = random.Random(seed)
        self._rules = rules
        self._states_left = rng.randint(least, most)
        self._action_tokens = action_tokens
        self._right: list[bool] = []
        self._over = False
        self.observation = rng.choice(OBSERVATIONS)

    def act(self, action: Sequence[int]) -> int | None:
        """Take an action, `action_tokens` content tokens and END, and give the next observation id, or None at the end.

        ValueError for another form of action, RuntimeError after the end.
        """
        if self._over:
            raise RuntimeError("the episode is over: no further action can be taken")
        content, end = list(action[:-1]), action[-1:]
        if list(end) != [END] or len(content) != self._action_tokens or any(token not in CONTENT for token in content):
            raise ValueError(
                f"{list(action)} is no action: {self._action_tokens} tokens of 1 to 11 and {END} at the end"
            )
        key = self._rules.keys[self.observation]
        self._right.append(2 * sum(token in key for token in content) > len(content))
        self._states_left -= 1
        if self._states_left == 0:
            self._over = True
            return None
        self.observation = self._rules.leads_to[self.observation, content[0]]
        return self.observation

    def success(self) -> bool:
        """The training bit: were most tokens good in at least half of the states? RuntimeError before the end."""
        if not self._over:
            raise RuntimeError("the success bit exists at the end of an episode only")
        return 2 * sum(self._right) >= len(self._right)
