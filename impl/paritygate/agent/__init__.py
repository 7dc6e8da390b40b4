"""A multi-turn support agent, tokens in and tokens out: renderer, rollout, trajectory, user, judge and teacher."""

from paritygate.agent.episode import Limits, run_episode
from paritygate.agent.gold import gold_trajectory
from paritygate.agent.rollouts import Group, Rollout, TeacherScores, collect_step
from paritygate.agent.trajectory import Trajectory

__all__ = [
    "Group",
    "Limits",
    "Rollout",
    "TeacherScores",
    "Trajectory",
    "collect_step",
    "gold_trajectory",
    "run_episode",
]
