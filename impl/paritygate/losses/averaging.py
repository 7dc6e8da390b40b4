"""Three-level averaging: tokens in an action, then actions in an episode, then episodes."""

import torch
from torch import Tensor

from .checks import result_dtype
from .numerics import total


def three_level_mean(values: Tensor, action_index: Tensor, episode_index: Tensor) -> Tensor:
    """Mean over episodes of the mean over actions of the mean over tokens of `values` (N,), differentiable; scalar.

    `action_index` (N,) int64 names each token's action, `episode_index` (A,) int64 each action's episode, both
    nondecreasing from 0 without a gap. ValueError names the place: an empty batch, an index out of order, an action
    with no token, an episode with no action. Source: SPOD, arXiv 2610.25034, section 3.
    Obligations: averaging/value, averaging/gradient.
    """
    if values.ndim != 1:
        raise ValueError(f"three_level_mean: values have shape {tuple(values.shape)}; (N,) is expected")
    check_levels(action_index, episode_index, values.shape[0], None)
    weights = token_weights(action_index, episode_index, episode_count(episode_index))
    return total(values.double() * weights).to(result_dtype(values))


def token_weights(action_index: Tensor, episode_index: Tensor, episodes: int | Tensor) -> Tensor:
    """1 / (n S E) for each token (N,) float64: n tokens in its action, S actions in its episode, `episodes` in all."""
    tokens, actions = lengths(action_index, episode_index.shape[0]), lengths(episode_index, None)
    return 1.0 / (tokens[action_index] * actions[episode_index[action_index]] * episodes).double()


def lengths(index: Tensor, groups: int | None) -> Tensor:
    """How many entries of `index` name each group, (groups,) int64; as many groups as entries where None (no sync)."""
    size = index.shape[0] if groups is None else groups
    return torch.zeros(size, dtype=torch.int64, device=index.device).index_add_(0, index, torch.ones_like(index))


def episode_count(episode_index: Tensor) -> Tensor:
    """The number of episodes that nondecreasing `episode_index` (A,) names, as a tensor on its device."""
    return episode_index[-1] + 1


def check_levels(action_index: Tensor, episode_index: Tensor, tokens: int, episodes: int | None) -> None:
    """ValueError naming the place where the two indices do not describe `tokens` tokens in `episodes` episodes."""
    if action_index.shape != (tokens,) or episode_index.ndim != 1:
        raise ValueError(
            f"shapes differ: {tokens} tokens, action_index {tuple(action_index.shape)}, "
            f"episode_index {tuple(episode_index.shape)}; (N,), (N,) and (A,) are expected"
        )
    if tokens == 0 or episode_index.shape[0] == 0:
        raise ValueError(f"the batch is empty: {tokens} tokens, {episode_index.shape[0]} actions")
    _check_index(action_index, episode_index.shape[0], "action_index", "token", "action")
    last = int(episode_index[-1]) + 1 if episodes is None else episodes
    _check_index(episode_index, last, "episode_index", "action", "episode")


def _check_index(index: Tensor, groups: int, name: str, member: str, group: str) -> None:
    if index.dtype != torch.int64:
        raise ValueError(f"{name} is {index.dtype}; int64 is expected")
    before = torch.cat([index.new_full((1,), -1), index[:-1]])
    step = index - before
    for bad in ((step < 0) | (index < 0) | (index >= groups)).nonzero()[:1].flatten().tolist():
        raise ValueError(
            f"{name} is out of order at {member} {bad}: {int(index[bad])} after {int(before[bad])}, "
            f"where {group}s 0 to {groups - 1} come in turn"
        )
    for bad in (step > 1).nonzero()[:1].flatten().tolist():
        raise ValueError(f"{group} {int(before[bad]) + 1} has no {member}: {name} skips it at {member} {bad}")
    if int(index[-1]) != groups - 1:
        raise ValueError(f"{group} {int(index[-1]) + 1} has no {member}: {name} ends at {int(index[-1])}")
