"""The real tau_bench package, where it is installed, beside our own environment: `pytest -m upstream`."""

import importlib.util
import random
import sys

import pytest

from paritygate import retail
from paritygate.retail import upstream
from tests.counts import soak
from tests.retail.calls import random_call, some_orders

INSTALLED = importlib.util.find_spec("tau_bench") is not None
live = [
    pytest.mark.upstream,
    pytest.mark.skipif(not INSTALLED, reason=f"tau_bench is not installed: {upstream.INSTALL}"),
]


@pytest.mark.skipif(INSTALLED, reason="tau_bench is installed")
def test_without_the_package_one_sentence_says_how_to_get_it(source: retail.Source) -> None:
    upstream.package.cache_clear()
    with pytest.raises(retail.DataError, match=r"--environment upstream needs the package tau_bench: pip install"):
        upstream.UpstreamEpisode(source, "test", 0)


class TestLive:
    pytestmark = live

    def test_its_language_model_client_is_not_imported(self, source: retail.Source) -> None:
        before = "litellm" in sys.modules
        upstream.UpstreamEpisode(source, "test", 0)
        assert ("litellm" in sys.modules) == before

    def test_gold_actions_are_graded_the_same(self, source: retail.Source) -> None:
        rng = random.Random(0)
        for index in rng.sample(range(115), soak(quick=8, full=115)):
            episodes = [kind(source, "test", index) for kind in (retail.RetailEpisode, upstream.UpstreamEpisode)]
            for action in episodes[0].task.actions:
                ours, theirs = (episode.call(action.name, action.arguments) for episode in episodes)
                assert ours == theirs
                assert episodes[0].done == episodes[1].done
            messages = ["Hello.", " ".join(episodes[0].task.outputs)]
            ours, theirs = (episode.grade(messages) for episode in episodes)
            assert ours == theirs
            assert ours.reward == 1.0
            assert episodes[1].grade(messages) is theirs

    def test_random_calls_are_answered_the_same_to_the_byte(self, source: retail.Source) -> None:
        rng = random.Random(11)
        for _ in range(soak(quick=6, full=100)):
            split = rng.choice(["train", "dev", "test"])
            index = rng.randrange(len(source.tasks(split)))
            ours = retail.RetailEpisode(source, split, index)
            theirs = upstream.UpstreamEpisode(source, split, index)
            orders = some_orders(rng, ours.db, 12)
            for _ in range(40):
                name, arguments = random_call(rng, ours.db, orders)
                if name == "transfer_to_human_agents" or "\ud800" in str(arguments):
                    continue  # the one ends the episode; upstream's hash raises on the other
                assert ours.call(name, arguments) == theirs.call(name, arguments), (name, arguments)
            assert retail.database_hash(ours.db) == theirs.env.get_data_hash()
            assert ours.grade(["x 10"]) == theirs.grade(["x 10"])

    def test_an_ended_episode_stays_ended(self, source: retail.Source) -> None:
        episode = upstream.UpstreamEpisode(source, "train", 0)
        assert episode.call("transfer_to_human_agents", {"summary": "x"}) == "Transfer successful"
        assert episode.env.data["orders"]  # not yet graded: the gold state has not replaced it
        with pytest.raises(retail.EpisodeOver):
            episode.call("think", {"thought": "x"})
        assert episode.grade([]).reward == 0.0
        assert episode.grade([]).reward == 0.0
