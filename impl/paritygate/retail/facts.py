"""What an honest report must say of the retail tasks, computed from the data: nothing here is a list typed in."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from paritygate.retail.source import Source
from paritygate.retail.tools import WRITE_TOOLS


def do_nothing(source: Source, split: str) -> list[int]:
    """Indices of the tasks that an agent solves by saying nothing and calling nothing."""
    return [
        index
        for index, task in enumerate(source.tasks(split))
        if not task.outputs and not source.goal(split, index).changes
    ]


def failing_gold(source: Source, split: str, *, writes_only: bool = False) -> list[int]:
    """Indices of the tasks with a gold action that is itself answered with an error."""
    return [
        index
        for index, task in enumerate(source.tasks(split))
        if any(
            not writes_only or task.actions[place].name in WRITE_TOOLS for place in source.goal(split, index).failing
        )
    ]


def same_gold(source: Source, split: str, indices: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Pairs of tasks whose gold actions are the same, two empty lists included: no independent draws."""
    tasks = source.tasks(split)
    chosen = range(len(tasks)) if indices is None else indices
    return [(one, other) for one, other in combinations(chosen, 2) if tasks[one].actions == tasks[other].actions]


def writes_only(source: Source, split: str) -> bool:
    """Whether the gold of every task of a split changes something with each action and expects no output."""
    tasks = source.tasks(split)
    return all(not task.outputs and all(action.name in WRITE_TOOLS for action in task.actions) for task in tasks)


def users(source: Source, split: str, indices: Iterable[int] | None = None) -> Counter[str]:
    """How many of the tasks belong to each user."""
    tasks = source.tasks(split)
    return Counter(tasks[index].user_id for index in (range(len(tasks)) if indices is None else indices))


def orders_written(source: Source, split: str) -> set[str]:
    """Order ids that the gold writes of a split name."""
    return {
        action.arguments["order_id"]
        for task in source.tasks(split)
        for action in task.actions
        if action.name in WRITE_TOOLS and "order_id" in action.arguments
    }


@dataclass(frozen=True, slots=True)
class Overlap:
    """What one split shares with another."""

    users: int
    users_shared: int
    orders: int
    orders_shared: int


def overlap(source: Source, split: str = "test", other: str = "train") -> Overlap:
    """How many users and written orders of `split` occur in `other` too."""
    own_users, own_orders = set(users(source, split)), orders_written(source, split)
    return Overlap(
        users=len(own_users),
        users_shared=len(own_users & set(users(source, other))),
        orders=len(own_orders),
        orders_shared=len(own_orders & orders_written(source, other)),
    )
