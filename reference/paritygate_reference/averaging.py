"""Three-level averaging: tokens in an action, then actions in an episode, then episodes."""

from collections.abc import Sequence

from ._distributions import exact_sum


def three_level_mean(values: Sequence[Sequence[Sequence[float]]]) -> float:
    """Mean over episodes of the mean over actions of the mean over tokens of `values[episode][action][token]`.

    ValueError names the place of an empty batch, an episode with no action or an action with no token.
    Source: SPOD, arXiv 2610.25034, section 3 (longer actions and episodes get no more weight).
    Obligations: averaging/value, averaging/gradient, averaging/oracle.
    """
    if len(values) == 0:
        raise ValueError("three_level_mean: the batch has no episode")
    means = list[float]()
    for e, episode in enumerate(values):
        if len(episode) == 0:
            raise ValueError(f"three_level_mean: episode {e} has no action")
        action_means = list[float]()
        for a, action in enumerate(episode):
            if len(action) == 0:
                raise ValueError(f"three_level_mean: episode {e}, action {a} has no token")
            action_means.append(exact_sum(action, len(action)))
        means.append(exact_sum(action_means, len(episode)))
    return exact_sum(means, len(values))
