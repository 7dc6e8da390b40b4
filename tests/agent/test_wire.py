"""What a rollout asks of the service: the policy's whole distribution, at the temperature that the spec names."""

import asyncio

import pytest
import tinker

from paritygate.agent import Limits, run_episode
from paritygate.agent.prompt import full
from paritygate.backend.guard import Guard
from paritygate.backend.sampler import Sampler
from tests.agent.fakes import TOOLS, Store, Talker


class Client:
    """An SDK client that ends every turn at once and keeps what it was asked for."""

    def __init__(self, stop: int) -> None:
        self.asked: list[tuple[list[int], int, tinker.SamplingParams]] = []
        self._stop = stop

    def get_base_model(self) -> str:
        return "scripted"

    async def sample(
        self, prompt: tinker.ModelInput, num_samples: int, params: tinker.SamplingParams
    ) -> tinker.SampleResponse:
        self.asked.append((prompt.to_ints(), num_samples, params))
        answer = tinker.SampledSequence(
            stop_reason="stop", sequence_id="s", _tokens_list=[self._stop], _logprobs_list=[-0.5]
        )
        return tinker.SampleResponse(sequences=[answer])


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_policy_is_sampled_from_its_whole_distribution(renderers, temperature):
    """No top-p and no top-k: the trainer's log-probabilities are those of the whole vocabulary (TRL #6789)."""
    renderer = renderers["chatml"]
    client = Client(renderer.get_stop_token_ids()[0])

    async def play():
        guard = Guard("http://127.0.0.1:9", "tml-x")
        try:
            limits = Limits(max_tokens_per_turn=7, max_seq_len=50_000, temperature=temperature)
            sampler = Sampler(client, guard, None, None)
            return await run_episode(
                Store(), renderer, sampler, Talker(["a", "b"]), context=full("Be kind.", TOOLS), limits=limits, seed=0
            )
        finally:
            await guard.close()

    trajectory = asyncio.run(play())
    assert len(client.asked) == trajectory.turns == 2
    for (prompt, count, params), (start, _) in zip(client.asked, trajectory.spans, strict=True):
        assert prompt == list(trajectory.tokens[:start])
        assert count == 1
        assert (params.top_p, params.top_k, params.temperature) == (1.0, -1, temperature)
        assert (params.max_tokens, params.stop) == (7, list(renderer.get_stop_token_ids()))
