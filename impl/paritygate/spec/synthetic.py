"""The synthetic component as frozen data (spec/schema/synthetic.schema.json)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StatesPerEpisode:
    """Fewest and most states of an episode."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Gru:
    """Sizes of the causal GRU that student and teacher are."""

    vocabulary: int
    hidden: int


@dataclass(frozen=True, slots=True)
class SyntheticAdam:
    """Adam of the student."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True, slots=True)
class SpodConstants:
    """SPOD's floor: its probability tau0 in (0, 1] and the weight of the floor term."""

    tau0: float
    floor_weight: float


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A validated synthetic component; `frozen` is the whole file with every default written out (JSON data)."""

    path: Path
    frozen: Mapping[str, Any]
    unresolved: tuple[str, ...]
    recipe: str
    title: str
    seeds: tuple[int, ...]
    updates: int
    episodes_per_update: int
    states_per_episode: StatesPerEpisode
    action_tokens: int
    model: Gru
    optimizer: SyntheticAdam
    loss: SpodConstants
    audited_actions: int

    @property
    def losses(self) -> tuple[str, ...]:
        """Names in spec/losses.json that the component stands on."""
        return ("averaging", "spod")  # SPOD averages over tokens, states and episodes
