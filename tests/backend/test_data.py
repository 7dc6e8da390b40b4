"""The shift by one, and what a datum refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paritygate.backend import BackendError, cross_entropy_datum, policy_gradient_datum, soft_cross_entropy_datum
from paritygate.backend.guard import Guard
from paritygate.backend.sampler import Sampler
from paritygate.backend.trainer import Trainer


@given(st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=2, max_size=40))
def test_a_policy_gradient_datum_sends_each_number_with_its_own_token(rows):
    tokens = [token for token, _ in rows]
    mask = [0, *(int(on) for _, on in rows[1:])]
    logprobs = [-(i + 0.5) if m else None for i, m in enumerate(mask)]
    advantages = [i * 2.0 if m else math.nan for i, m in enumerate(mask)]
    datum = policy_gradient_datum(tokens, mask, logprobs, advantages)
    wire = datum.to_tinker()
    assert wire.model_input.to_ints() == tokens[:-1]
    sent = {name: data.to_numpy().tolist() for name, data in wire.loss_fn_inputs.items()}
    assert set(sent) == {"target_tokens", "logprobs", "advantages"}
    for t in range(1, len(tokens)):
        assert sent["target_tokens"][t - 1] == tokens[t]
        assert sent["logprobs"][t - 1] == (-(t + 0.5) if mask[t] else 0.0)
        assert sent["advantages"][t - 1] == (t * 2.0 if mask[t] else 0.0)


def test_the_wire_types_are_those_of_the_service():
    wire = policy_gradient_datum([1, 2, 3], [0, 1, 1], [None, -1, -2], [0, 1, 2]).to_tinker()
    assert {name: data.dtype for name, data in wire.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "logprobs": "float32",
        "advantages": "float32",
    }
    soft = soft_cross_entropy_datum([1, 2, 3], [[0, 0], [4, 5], [6, 7]], [[0, 0], [0.5, 0.5], [1, 0]]).to_tinker()
    assert soft.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [[4, 5], [6, 7]]
    assert soft.loss_fn_inputs["weights"].to_numpy().tolist() == [[0.5, 0.5], [1, 0]]
    hard = cross_entropy_datum([1, 2, 3], [0, 0, 1]).to_tinker()
    assert hard.loss_fn_inputs["weights"].to_numpy().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [0], [None, -1], [0, 1]), "mask has 1 entries for 2 tokens"),
        (([1, 2], [0, 1], [-1], [0, 1]), "sampler_logprobs has 1"),
        (([1, 2], [0, 1], [None, -1], [1]), "advantages has 1"),
        (([1, 2], [0, 1], [None, None], [0, 1]), r"sampler_logprobs\[1\] is None"),
        (([1, 2], [0, 1], [None, math.nan], [0, 1]), r"sampler_logprobs\[1\] is nan"),
        (([1, 2], [0, 1], [None, -1], [0, math.inf]), r"advantages\[1\] is inf"),
        (([1, 2], [1, 1], [-1, -1], [1, 1]), "Token 0 is masked in"),
        (([1], [0], [None], [0]), "predicts nothing"),
    ],
)
def test_what_cannot_train_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        policy_gradient_datum(*arguments)


def test_other_datums_refuse_too():
    with pytest.raises(ValueError, match="weights has 1"):
        cross_entropy_datum([1, 2], [0])
    with pytest.raises(ValueError, match="Token 0 has a weight"):
        cross_entropy_datum([1, 2], [1, 1])
    with pytest.raises(ValueError, match=r"weights\[1\] is nan"):
        cross_entropy_datum([1, 2], [0, math.nan])
    with pytest.raises(ValueError, match="Row 1"):
        soft_cross_entropy_datum([1, 2, 3], [[0], [1], [2, 3]], [[0], [1], [1, 1]])
    with pytest.raises(ValueError, match="target_ids has 1 rows"):
        soft_cross_entropy_datum([1, 2], [[1]], [[1.0], [1.0]])


class Fake:
    """An SDK client whose every answer is one object."""

    def __init__(self, answer):
        self._answer = answer

    def get_base_model(self):
        return "fake"

    def __getattr__(self, name):
        async def call(*_, **__):
            return self._answer

        return call


def ask(client, method, *arguments, **options):
    """Call a method of a sampler or trainer over a fake SDK client."""
    import asyncio

    async def main():
        guard = Guard("http://127.0.0.1:9", "tml-x")
        try:
            maker = Trainer(Fake(client), guard, None, None) if method in ("forward_backward",) else None
            sampler = maker or Sampler(Fake(client), guard, None, None)
            return await getattr(sampler, method)(*arguments, **options)
        finally:
            await guard.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([None, -1.0], "2 logprobs for 3 tokens"),  # one too few, as SkyRL 0.4 returns
        ([-1.0, -1.0, -1.0], "token 0"),
        ([None, -1.0, None], "no logprob for token 2"),
    ],
)
def test_scores_of_another_shape_are_refused(answer, message):
    with pytest.raises(BackendError, match=message):
        ask(answer, "score", [1, 2, 3])


def test_samples_and_losses_of_another_shape_are_refused():
    import tinker

    short = tinker.SampledSequence(stop_reason="stop", sequence_id="s", _tokens_list=[1, 2], _logprobs_list=[-1.0])
    with pytest.raises(BackendError, match="1 logprobs for 2 tokens"):
        ask(tinker.SampleResponse(sequences=[short]), "sample", [1], max_tokens=2, temperature=1.0)
    with pytest.raises(BackendError, match="0 samples, not 1"):
        ask(tinker.SampleResponse(sequences=[]), "sample", [1], max_tokens=2, temperature=1.0)
    output = tinker.ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=[], metrics={"loss:mean": 1.0})
    with pytest.raises(BackendError, match="no loss:sum"):
        ask(output, "forward_backward", [cross_entropy_datum([1, 2], [0, 1])])
