"""The OpenAI-compatible routes, by the openai package and against the SDK's own samples."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import tinker

from paritygate import server

PROMPT = [5, 80, 90, 100]


@pytest.fixture(scope="module")
def oai(running: server.Running) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False) as http:
        client = openai.OpenAI(
            base_url=f"{running.base_url}/oai/api/v1", api_key=running.api_key, http_client=http, max_retries=0
        )
        yield client


def sampled(sampler: Any, **params: Any) -> Any:
    prompt, params = tinker.ModelInput.from_ints(PROMPT), tinker.SamplingParams(**params)
    return sampler.sample(prompt, 1, params).result().sequences[0]


def test_token_prompts_give_the_sdks_samples(oai: openai.OpenAI, client: Any, running: server.Running) -> None:
    sampler = client.create_sampling_client(base_model=running.model_name).result()
    want = sampled(sampler, max_tokens=12, seed=3, temperature=0.7)
    got: Any = oai.completions.create(
        model=running.model_name, prompt=PROMPT, max_tokens=12, seed=3, temperature=0.7, logprobs=2
    )
    [choice] = got.choices
    count = len(choice.token_ids)
    assert choice.token_ids == want.tokens[:count]
    assert choice.logprobs.token_logprobs == pytest.approx(want.logprobs[:count], abs=0)
    assert choice.finish_reason == want.stop_reason
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * count
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (4, count)


def test_every_prompt_of_a_request_has_a_seed_of_its_own(oai: openai.OpenAI, running: server.Running) -> None:
    """The first has the seed that was asked for, the second the next one: equal prompts are two draws."""

    def drawn(prompt: Any, seed: int) -> list[list[int]]:
        options: Any = {"max_tokens": 12, "seed": seed, "temperature": 1.0, "logprobs": 1}
        got: Any = oai.completions.create(model=running.model_name, prompt=prompt, **options)
        return [choice.token_ids for choice in got.choices]

    both = drawn([PROMPT, PROMPT], 3)
    assert both == [*drawn(PROMPT, 3), *drawn(PROMPT, 4)]
    assert both[0] != both[1]


def test_echo_scores_a_prompt_as_evaluation_harnesses_ask(
    oai: openai.OpenAI, client: Any, running: server.Running
) -> None:
    """lm-eval's loglikelihood: token ids, echo, logprobs, one token or none; several prompts at once."""
    sampler = client.create_sampling_client(base_model=running.model_name).result()
    want = sampler.compute_logprobs(tinker.ModelInput.from_ints(PROMPT)).result()
    for max_tokens in (0, 1):
        got = oai.completions.create(
            model=running.model_name,
            prompt=[PROMPT, PROMPT[::-1]],
            max_tokens=max_tokens,
            logprobs=1,
            echo=True,
            seed=1,
        )
        assert len(got.choices) == 2
        logprobs: Any = got.choices[0].logprobs
        assert logprobs.token_logprobs[: len(PROMPT)] == want
        assert len(logprobs.tokens) == len(PROMPT) + max_tokens
        assert logprobs.top_logprobs[0] is None
        assert all(
            max(top.values()) >= logprob for top, logprob in zip(logprobs.top_logprobs[1:], want[1:], strict=False)
        )


def test_chat_is_the_models_template_and_ends_at_its_end_token(oai: openai.OpenAI, running: server.Running) -> None:
    tokenizer: Any = running.service.engine.decoder
    messages: Any = [{"role": "user", "content": "The store confirms the refund."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    chat: Any = oai.chat.completions.create(
        model=running.model_name, messages=messages, max_tokens=20, seed=1, n=2, logprobs=True, top_logprobs=3
    )
    plain: Any = oai.completions.create(
        model=running.model_name, prompt=tokenizer.encode(text), max_tokens=20, seed=1, n=2, logprobs=3
    )
    for one, other in zip(chat.choices, plain.choices, strict=True):
        assert one.message.content == other.text
        assert one.token_ids == other.token_ids
        rows = one.logprobs.content
        assert [row.logprob for row in rows] == other.logprobs.token_logprobs
        assert [len(row.top_logprobs) for row in rows] == [3] * len(rows)
    assert chat.choices[0].message.content != chat.choices[1].message.content


def test_a_checkpoint_is_named_by_its_path(oai: openai.OpenAI, client: Any, running: server.Running) -> None:
    from tests.server.test_checkpoints_out import trained

    trainer = trained(client, running.model_name)
    path = trainer.save_weights_for_sampler("oai").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    want = sampler.compute_logprobs(tinker.ModelInput.from_ints(PROMPT)).result()
    for name in (path, f"{running.model_name};{path}"):
        got: Any = oai.completions.create(model=name, prompt=PROMPT, max_tokens=1, logprobs=0, echo=True)
        assert got.choices[0].logprobs.token_logprobs[:4] == want
    assert {running.model_name, path} <= {model.id for model in oai.models.list()}


def test_stop_strings_are_left_out_of_the_text(oai: openai.OpenAI, running: server.Running) -> None:
    options: Any = {"model": running.model_name, "prompt": PROMPT, "max_tokens": 30, "seed": 5}
    whole = oai.completions.create(**options).choices[0].text
    stop = whole[4:6]
    cut = oai.completions.create(**options, stop=stop).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stream": True}, "stream='True' is not served"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"beam_width": 3}, "no parameter 'beam_width'"),
        ({"prompt": [480]}, "outside the vocabulary"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [1.5]}, "prompt must be"),
        ({"max_tokens": 100_000}, "over the context"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": "gpt-4o"}, "not served here"),
        ({"model": "tinker://x/sampler_weights/none"}, "no checkpoint"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "body.n"),
        ({"stop": [3]}, "stop must be"),
    ],
)
def test_bad_requests_are_one_sentence(running: server.Running, changes: dict[str, Any], words: str) -> None:
    body = {"model": running.model_name, "prompt": PROMPT, "max_tokens": 2, **changes}
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {running.api_key}"}) as http:
        answer = http.post(f"{running.base_url}/oai/api/v1/completions", json=body)
    assert 400 <= answer.status_code < 500
    assert words in answer.json()["error"]["message"]


def test_the_key_is_asked_for(running: server.Running) -> None:
    with httpx.Client(trust_env=False) as http:
        answer = http.post(f"{running.base_url}/oai/api/v1/completions", json={})
    assert answer.status_code == 401
    assert "API key" in answer.json()["error"]["message"]
