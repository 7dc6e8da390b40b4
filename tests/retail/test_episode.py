"""An episode ends once and is graded once, by both criteria, and grading writes nothing."""

from collections.abc import Callable

import pytest

from paritygate import retail


def solved(source: retail.Source, split: str, index: int) -> retail.RetailEpisode:
    episode = retail.RetailEpisode(source, split, index)
    for action in episode.task.actions:
        episode.call(action.name, action.arguments)
    return episode


def test_grading_does_not_write(source: retail.Source) -> None:
    episode = retail.RetailEpisode(source, "train", 0)
    assert episode.grade([]).reward == 0.0
    assert retail.database_hash(episode.db) == source.initial_hash
    assert episode.grade([]).reward == 0.0  # upstream's second stop gives 1.0
    assert solved(source, "train", 0).grade(["bye"]).reward == 1.0


def test_a_wrong_extra_write_costs_the_reward(source: retail.Source) -> None:
    episode = solved(source, "train", 0)
    address = dict.fromkeys(("address1", "address2", "city", "state", "country", "zip"), "x")
    episode.call("modify_user_address", {"user_id": episode.task.user_id, **address})
    grade = episode.grade([])
    assert (grade.reward, grade.database_ok, grade.outputs_ok) == (0.0, False, True)


def test_nothing_can_be_done_after_the_end(source: retail.Source) -> None:
    episode = retail.RetailEpisode(source, "dev", 0)
    assert not episode.done
    assert episode.call("transfer_to_human_agents", {"summary": "x"}) == "Transfer successful"
    assert episode.done
    with pytest.raises(retail.EpisodeOver, match="dev task 0 was ended by a transfer: the call of think"):
        episode.call("think", {"thought": "x"})
    episode.grade(["a"])
    with pytest.raises(retail.EpisodeOver, match="no second grade"):
        episode.grade(["b"])
    with pytest.raises(retail.EpisodeOver, match="graded before"):
        episode.cut()


def test_a_transfer_that_was_called_wrongly_ends_the_episode_too(source: retail.Source) -> None:
    episode = retail.RetailEpisode(source, "dev", 0)
    assert episode.call("transfer_to_human_agents", {}).startswith("Error: ")
    assert episode.done


def test_a_cut_scores_zero_even_where_the_state_is_the_goal(source: retail.Source) -> None:
    episode = solved(source, "train", 0)
    grade = episode.cut()
    assert (grade.reward, grade.graded) == (0.0, False)
    with pytest.raises(retail.EpisodeOver, match="ended by a limit"):
        episode.grade([])
    with pytest.raises(retail.EpisodeOver, match="ended by a limit"):
        episode.call("think", {"thought": "x"})


@pytest.mark.parametrize(
    ("message", "reward", "substring_only"),
    [
        ("There are 10 t-shirts.", 1.0, ()),
        ("It is 9109.", 1.0, ("10",)),
        ("It is 10.50.", 1.0, ("10",)),
        ("It is 0.10!", 1.0, ("10",)),
        ("1,0", 1.0, ()),
        ("We have 10.", 1.0, ()),
        ("9109 or 10", 1.0, ()),
        ("ten", 0.0, ()),
        ("", 0.0, ()),
    ],
)
def test_outputs_are_substrings_without_commas(
    source: retail.Source, message: str, reward: float, substring_only: tuple[str, ...]
) -> None:
    episode = solved(source, "test", 2)
    assert episode.task.outputs == ("10",)
    grade = episode.grade(["Hello.", message])
    assert (grade.reward, grade.substring_only) == (reward, substring_only)


@pytest.mark.parametrize(("outputs", "reward"), [((), 0.0), ((0,), 0.0), ((1,), 0.0), ((0, 1), 1.0), ((1, 0), 1.0)])
def test_every_expected_output_has_to_be_said(source: retail.Source, outputs: tuple[int, ...], reward: float) -> None:
    index, task = next((i, task) for i, task in enumerate(source.tasks("test")) if len(task.outputs) == 2)
    grade = solved(source, "test", index).grade([f"It is {task.outputs[place].upper()}." for place in outputs])
    assert (grade.reward, grade.database_ok, grade.outputs_ok) == (reward, True, reward == 1.0)
    assert grade.outputs == {output: place in outputs for place, output in enumerate(task.outputs)}


@pytest.mark.parametrize("spelled", [str, str.lower, str.upper], ids=["as it is", "lower", "upper"])
def test_outputs_are_found_in_any_case(source: retail.Source, spelled: Callable[[str], str]) -> None:
    tasks = enumerate(source.tasks("test"))
    index, task = next((i, task) for i, task in tasks if any(output != output.lower() for output in task.outputs))
    assert solved(source, "test", index).grade([spelled(f"It is {'; '.join(task.outputs)}.")]).reward == 1.0


def test_an_output_is_not_found_across_two_messages(source: retail.Source) -> None:
    assert solved(source, "test", 2).grade(["1", "0"]).reward == 0.0


@pytest.mark.parametrize(("split", "index"), [("train", 500), ("train", -1), ("eval", 0)])
def test_a_task_that_does_not_exist_is_a_sentence(source: retail.Source, split: str, index: int) -> None:
    with pytest.raises(retail.DataError, match="tau-bench retail"):
        retail.RetailEpisode(source, split, index)


def test_goals_are_replayed_once(source: retail.Source) -> None:
    assert source.goal("test", 0) is source.goal("test", 0)
