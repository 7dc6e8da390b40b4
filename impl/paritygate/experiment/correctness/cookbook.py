"""The installed tinker-cookbook, asked for its own numbers; imported only where it is there."""

from typing import Any


def live_advantages(rewards: list[float]) -> list[float]:
    """`tinker_cookbook.rl.data_processing.compute_advantages` of one group with these final rewards."""
    from tinker_cookbook.rl.data_processing import compute_advantages  # pyright: ignore[reportMissingImports]
    from tinker_cookbook.rl.types import TrajectoryGroup  # pyright: ignore[reportMissingImports]

    group: Any = TrajectoryGroup(trajectories_G=[], final_rewards_G=[], metrics_G=[])
    group.get_total_rewards = lambda: rewards
    [advantages] = compute_advantages([group])
    return [float(value) for value in advantages]
