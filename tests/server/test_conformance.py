"""The real SDK, tinker 0.38.0, through every call that it has for training and sampling."""

import asyncio
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from paritygate import server

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
PROMPT = [5, 9, 200, 31, 77, 12, 300, 4]


def ints(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def params(**options: Any) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 8, "seed": 1, **options})


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(model_input=ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs})


@pytest.fixture(scope="module")
def trainer(client: Any, running: server.Running) -> Any:
    return client.create_lora_training_client(running.model_name, rank=8, seed=11).result()


@pytest.fixture(scope="module")
def sampler(client: Any, running: server.Running) -> Any:
    return client.create_sampling_client(base_model=running.model_name).result()


def test_the_sdk_is_the_one_that_is_spoken() -> None:
    assert tinker.__version__ == "0.38.0"


def test_capabilities_and_info(running: server.Running, trainer: Any, sampler: Any) -> None:
    rest = tinker.RestClient(base_url=running.base_url, api_key=running.api_key)
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == ("paritygate/tiny-qwen3", 8192)
    info = trainer.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 8, running.model_name)
    assert sampler.get_base_model() == running.model_name
    tokenizer = trainer.get_tokenizer()
    text = "The customer returns an order."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_samples_with_every_option(sampler: Any) -> None:
    target = torch.full((len(PROMPT) - 1, 2), -1, dtype=torch.int64)
    target[3, 0], target[6, 1] = 17, 4
    dense = types.TensorData.from_torch(target)
    sparse = types.TensorData.from_torch_sparse(target, pad_value=-1)
    assert sparse.sparse_crow_indices is not None
    result = sampler.sample(
        ints(PROMPT), 3, params(), include_prompt_logprobs=True, topk_prompt_logprobs=4, topk_sample_logprobs=2,
        target_prompt_logprobs=dense, prompt_alt_tokens_k=3,
    ).result()  # fmt: skip
    assert len(result.sequences) == 3
    assert len({s.sequence_id for s in result.sequences}) == 3
    for sequence in result.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == len(sequence.topk_logprobs)
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert len(top) == 2
            assert top[0][1] >= top[1][1]
            assert dict(top).get(token, logprob) == logprob
    assert result.prompt_logprobs[0] is None
    assert result.topk_prompt_logprobs[0] is None
    for i, top in enumerate(result.topk_prompt_logprobs[1:], 1):
        assert dict(top).get(PROMPT[i], result.prompt_logprobs[i]) == result.prompt_logprobs[i]
    scored = result.target_prompt_logprobs.to_numpy()
    assert scored.shape == (7, 2)
    assert scored[6, 1] == np.float32(result.prompt_logprobs[7])  # cell 6 names the prompt's own token 7
    assert scored[3, 0] < 0
    assert np.count_nonzero(scored) == 2
    alternatives = result.prompt_alt_tokens
    assert alternatives.tokens.to_numpy().shape == alternatives.logprobs.to_numpy().shape == (7, 3)
    for i, row in enumerate(alternatives.tokens.to_numpy()):
        for j, token in enumerate(row):
            logprob = alternatives.logprobs.to_numpy()[i, j]
            assert dict(result.topk_prompt_logprobs[i + 1]).get(int(token), logprob) == logprob
    again = sampler.sample(ints(PROMPT), 1, params(), target_prompt_logprobs=sparse).result()
    assert again.target_prompt_logprobs.sparse_crow_indices == sparse.sparse_crow_indices
    assert np.array_equal(again.target_prompt_logprobs.to_torch().numpy(), scored)


def test_compute_logprobs_and_last_n(sampler: Any) -> None:
    everything = sampler.compute_logprobs(ints(PROMPT)).result()
    assert len(everything) == len(PROMPT)
    assert everything[0] is None
    assert all(x < 0 for x in everything[1:])
    last = sampler.compute_logprobs(ints(PROMPT), prompt_logprobs_last_n=3).result()
    assert last == [None] * 5 + everything[-3:]


def test_a_seed_decides_and_none_varies(sampler: Any) -> None:
    def tokens(**options: Any) -> list[int]:
        return sampler.sample(ints(PROMPT), 1, params(**options)).result().sequences[0].tokens

    assert tokens(seed=5) == tokens(seed=5)
    assert tokens(seed=5) != tokens(seed=6)
    assert tokens(seed=None) != tokens(seed=None)
    assert tokens(temperature=0.0, seed=1) == tokens(temperature=0.0, seed=2)
    assert tokens(temperature=0.0) == tokens(top_k=1) == tokens(top_p=1e-6)


def test_stops(sampler: Any, trainer: Any) -> None:
    free = sampler.sample(ints(PROMPT), 1, params(max_tokens=30, stop=[])).result().sequences[0]
    assert (len(free.tokens), free.stop_reason) == (30, "length")
    first = free.tokens.index(free.tokens[9])
    by_id = sampler.sample(ints(PROMPT), 1, params(max_tokens=30, stop=[free.tokens[9]])).result().sequences[0]
    assert (by_id.tokens, by_id.stop_reason) == (free.tokens[: first + 1], "stop")
    tokenizer = trainer.get_tokenizer()
    piece = tokenizer.decode(free.tokens[9:11])
    by_text = sampler.sample(ints(PROMPT), 1, params(max_tokens=30, stop=[piece])).result().sequences[0]
    assert by_text.stop_reason == "stop"
    assert piece in tokenizer.decode(by_text.tokens)
    assert piece not in tokenizer.decode(by_text.tokens[:-1])
    assert free.tokens[: len(by_text.tokens)] == by_text.tokens


def test_training_lowers_the_loss_and_returns_logprobs(client: Any, running: server.Running) -> None:
    trainer = client.create_lora_training_client(running.model_name, rank=4, seed=0).result()
    data = [datum(PROMPT, weights=[1.0] * 7), datum(PROMPT[::-1], weights=[0.0] * 3 + [0.5] * 4)]
    losses: list[float] = []
    for _ in range(8):
        backward, step = (
            trainer.forward_backward(data, "cross_entropy"),
            trainer.optim_step(types.AdamParams(learning_rate=0.005)),
        )
        out = backward.result()
        step.result()
        logprobs = [o["logprobs"].to_numpy() for o in out.loss_fn_outputs]
        want = -sum(
            float((lp * np.asarray(w)).sum()) for lp, w in zip(logprobs, ([1.0] * 7, [0] * 3 + [0.5] * 4), strict=True)
        )
        assert out.metrics["loss:sum"] == pytest.approx(want, rel=1e-5)
        losses.append(out.metrics["loss:sum"])
    assert losses[-1] < 0.5 * losses[0]
    only = trainer.forward(data, "cross_entropy").result()
    assert only.metrics["loss:sum"] < losses[-1]


def test_cross_entropy_with_k_targets(trainer: Any) -> None:
    tokens = PROMPT[:-1]
    targets = torch.tensor([[t, (t + 1) % 480, 0] for t in PROMPT[1:]])
    weights = torch.rand(7, 3, generator=torch.Generator().manual_seed(0))
    two = types.Datum(model_input=ints(tokens), loss_fn_inputs={"target_tokens": targets, "weights": weights})
    one = types.Datum(model_input=ints(tokens), loss_fn_inputs={"target_tokens": PROMPT[1:], "weights": [1.0] * 7})
    mixed = trainer.forward([two, one], "cross_entropy").result()
    wide, narrow = (o["logprobs"].to_numpy() for o in mixed.loss_fn_outputs)
    assert (wide.shape, narrow.shape) == ((7, 3), (7,))
    assert np.array_equal(wide[:, 0], narrow)
    want = -float((wide * weights.numpy()).sum()) - float(narrow.sum())
    assert mixed.metrics["loss:sum"] == pytest.approx(want, rel=1e-5)
    thin = torch.zeros(7, 40, dtype=torch.int64)
    thin[:, 5] = torch.tensor(PROMPT[1:])
    weight = torch.zeros(7, 40)
    weight[:, 5] = 1.0
    sparse = types.Datum(model_input=ints(tokens), loss_fn_inputs={"target_tokens": thin, "weights": weight})
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    out = trainer.forward([sparse], "cross_entropy").result()
    assert out.metrics["loss:sum"] == pytest.approx(-float(narrow.sum()), rel=1e-5)


def test_policy_losses_and_custom(trainer: Any) -> None:
    old = trainer.forward([datum(PROMPT, weights=[0.0] * 7)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    policy = {"logprobs": old.to_numpy(), "advantages": [1.0, -1.0, 0.5, 0.0, 2.0, -0.5, 1.0]}
    for loss, config, more in (
        ("importance_sampling", None, {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, {}),
        ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}, {}),
        ("dro", {"beta": 0.05}, {}),
        (
            "gspo",
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            {"sequence_ratio_mask": np.ones(7, np.float32)},
        ),
    ):
        out = trainer.forward_backward([datum(PROMPT, **policy, **more)], loss, config).result()
        assert np.isfinite(out.metrics["loss:sum"]), loss
        if loss not in {"cispo", "dro"}:  # on policy every ratio is 1
            assert out.metrics["loss:sum"] == pytest.approx(-3.0, abs=1e-5), loss

    def custom(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return (logprobs[0] ** 2).sum(), {"mine": 1.0}

    out = trainer.forward_backward_custom([datum(PROMPT, weights=[1.0] * 7)], custom).result()
    assert out.metrics["loss:sum"] == pytest.approx(float((old.to_torch() ** 2).sum()), rel=1e-5)
    assert out.metrics["mine"] == 1.0
    trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()


@pytest.mark.parametrize(
    ("loss", "inputs", "config", "words"),
    [
        ("stable_reinforce", {"logprobs": [0.0] * 7, "advantages": [0.0] * 7}, None, "publishes no formula"),
        ("dro", {"logprobs": [0.0] * 7, "advantages": [0.0] * 7}, None, "no default for beta"),
        ("gspo", {"logprobs": [0.0] * 7, "advantages": [0.0] * 7}, CLIP, "sequence_ratio_mask"),
        (
            "gspo",
            {"logprobs": [0.0] * 7, "advantages": [0.0] * 7},
            None,
            r"for ppo .* and cispo .* only",
        ),
        (
            "importance_sampling",
            {"logprobs": [0.0] * 7, "advantages": [0.0] * 7, "clip_low_threshold": [0.0] * 7},
            None,
            "not an input",
        ),
        ("ppo", {"logprobs": [0.0] * 7, "advantages": [0.0] * 7}, {"epsilon": 0.2}, "unknown loss_fn_config"),
        ("importance_sampling", {"logprobs": [0.0] * 7, "advantages": [float("nan")] * 7}, None, "must be finite"),
        ("importance_sampling", {"logprobs": [0.0] * 6, "advantages": [0.0] * 7}, None, "shape"),
        ("cross_entropy", {}, None, "weights is missing"),
    ],
)
def test_a_refused_loss_says_why_and_poisons_nothing(
    trainer: Any, loss: Any, inputs: dict[str, Any], config: Any, words: str
) -> None:
    with pytest.raises(Exception, match=words):
        trainer.forward_backward([datum(PROMPT, **inputs)], loss, config).result()
    assert trainer.forward([datum(PROMPT, weights=[1.0] * 7)], "cross_entropy").result().metrics["loss:sum"] > 0


def test_many_chunks_accumulate(client: Any, running: server.Running) -> None:
    """More datums than a request holds: the SDK sends several, and one optimiser step uses them all."""
    trainers = [client.create_lora_training_client(running.model_name, rank=2, seed=5).result() for _ in range(2)]
    data = [datum([i % 480, (7 * i) % 480, 3], weights=[1.0, 1.0]) for i in range(1030)]
    trainers[0].forward_backward(data, "cross_entropy").result()
    trainers[1].forward_backward(data[:500], "cross_entropy").result()
    trainers[1].forward_backward(data[500:], "cross_entropy").result()
    losses: list[float] = []
    for trainer in trainers:
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
        losses.append(trainer.forward(data[:50], "cross_entropy").result().metrics["loss:sum"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_fifty_steps_equal_a_restore_at_25_bit_for_bit(client: Any, running: server.Running) -> None:
    def step(trainer: Any, i: int) -> None:
        tokens = [(i * 31 + j * 17) % 480 for j in range(12)]
        trainer.forward_backward([datum(tokens, weights=[1.0] * 11)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=3e-3, weight_decay=0.01, grad_clip_norm=1.0)).result()

    def logprobs(trainer: Any) -> bytes:
        out = trainer.forward([datum(PROMPT, weights=[1.0] * 7)], "cross_entropy").result()
        return out.loss_fn_outputs[0]["logprobs"].to_numpy().tobytes()

    whole = client.create_lora_training_client(running.model_name, rank=4, seed=9).result()
    for i in range(25):
        step(whole, i)
    path = whole.save_state("half").result().path
    restored = client.create_training_client_from_state_with_optimizer(path).result()
    without = client.create_training_client_from_state(path).result()
    assert logprobs(restored) == logprobs(whole) == logprobs(without)
    for i in range(25, 50):
        step(whole, i)
        step(restored, i)
    step(without, 25)
    assert logprobs(restored) == logprobs(whole)
    assert logprobs(without) != logprobs(whole)
    fresh = client.create_lora_training_client(running.model_name, rank=4, seed=1).result()
    with pytest.warns(FutureWarning):  # what SDKs before 0.30 do inside create_training_client_from_state
        fresh.load_state_with_optimizer(path).result()
    for i in range(25, 50):
        step(fresh, i)
    assert logprobs(restored) == logprobs(fresh)
    with pytest.warns(FutureWarning), pytest.raises(tinker.BadRequestError, match="not permitted with seq_id"):
        whole.load_state(path).result()
    step(whole, 50)  # the refusal has had its turn


def test_a_saved_state_has_no_pending_gradient_and_takes_none_away(client: Any, running: server.Running) -> None:
    """What forward_backward has left stays in the model that it was left in, and is not in the file."""

    def trainer() -> Any:
        return client.create_lora_training_client(running.model_name, rank=4, seed=5).result()

    def gradient(model: Any) -> None:
        model.forward_backward([datum(PROMPT, weights=[1.0] * 7)], "cross_entropy").result()

    def norm(model: Any) -> float:
        return model.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["unclipped_grad_l2:mean"]

    saved, unsaved = trainer(), trainer()
    gradient(saved)
    gradient(unsaved)
    path = saved.save_state("pending").result().path
    restored = client.create_training_client_from_state_with_optimizer(path).result()
    assert norm(restored) == 0.0
    assert norm(saved) == norm(unsaved) > 0.0


def test_the_gradient_norm_is_the_one_before_clipping(client: Any, running: server.Running) -> None:
    """Twice the weights, twice the norm; clipping does not touch what is reported."""
    norms: list[float] = []
    for weight, clip in ((1.0, 0.0), (2.0, 0.0), (2.0, 1e-3)):
        trainer = client.create_lora_training_client(running.model_name, rank=4, seed=5).result()
        trainer.forward_backward([datum(PROMPT, weights=[weight] * 7)], "cross_entropy")
        step = trainer.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=clip)).result()
        norms.append(step.metrics["unclipped_grad_l2:mean"])
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-6)
    assert norms[2] == norms[1] > 1e-3


def test_saved_and_ephemeral_samplers_and_their_isolation(client: Any, running: server.Running, sampler: Any) -> None:
    trainer = client.create_lora_training_client(running.model_name, rank=4, seed=2).result()
    other = client.create_lora_training_client(running.model_name, rank=16, seed=2, train_unembed=False).result()
    base = sampler.compute_logprobs(ints(PROMPT)).result()
    fresh = trainer.save_weights_and_get_sampling_client().result()
    assert fresh.compute_logprobs(ints(PROMPT)).result() == base  # B starts at 0
    trainer.forward_backward([datum(PROMPT, weights=[1.0] * 7)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    path = trainer.save_weights_for_sampler("named").result().path
    named = client.create_sampling_client(model_path=path).result()
    live = trainer.save_weights_and_get_sampling_client().result()
    trained = live.compute_logprobs(ints(PROMPT)).result()
    assert named.compute_logprobs(ints(PROMPT)).result() == trained != base
    for _ in range(2):
        trainer.forward_backward([datum(PROMPT[::-1], weights=[1.0] * 7)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    assert live.compute_logprobs(ints(PROMPT)).result() == trained
    assert fresh.compute_logprobs(ints(PROMPT)).result() == base
    untouched = other.save_weights_and_get_sampling_client().result()
    assert untouched.compute_logprobs(ints(PROMPT)).result() == base


def test_checkpoints_are_named_listed_refused_and_deleted(trainer: Any, client: Any, running: server.Running) -> None:
    rest = tinker.RestClient(base_url=running.base_url, api_key=running.api_key)
    path = trainer.save_state("mine", ttl_seconds=3600, user_metadata={"k": "v"}).result().path
    assert path == f"tinker://{trainer.model_id}/weights/mine"
    with pytest.raises(Exception, match="overwrite=True"):
        trainer.save_state("mine").result()
    trainer.save_state("mine", overwrite=True).result()
    for bad in ("../up", "a/b", ".hidden", "x" * 200):
        with pytest.raises(Exception, match="checkpoint name"):
            trainer.save_state(bad).result()
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.is_lora, info.lora_rank, info.train_mlp) == (True, 8, True)
    listed = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert path in [c.tinker_path for c in listed]
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(Exception, match="no checkpoint"):
        client.create_training_client_from_state(path).result()


def test_expired_checkpoints_are_gone(trainer: Any, client: Any, running: server.Running, monkeypatch: Any) -> None:
    import time

    path = trainer.save_weights_for_sampler("short", ttl_seconds=60).result().path
    client.create_sampling_client(model_path=path).result()
    now = time.time()
    monkeypatch.setattr("paritygate.server.sessions.checkpoints.time.time", lambda: now + 61)
    with pytest.raises(Exception, match="expired"):
        client.create_sampling_client(model_path=path).result()


def test_unknown_names_are_refused(client: Any, running: server.Running) -> None:
    with pytest.raises(Exception, match="this server has 'paritygate/tiny-qwen3'"):
        client.create_lora_training_client("Qwen/Qwen3-8B").result()
    with pytest.raises(Exception, match="this server has"):
        client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
    with pytest.raises(Exception, match="no checkpoint"):
        client.create_sampling_client(model_path="tinker://nobody/weights/x").result()
    with pytest.raises(Exception, match=r"lora_config\.rank"):
        client.create_lora_training_client(running.model_name, rank=100_000).result()


def test_everything_awaits_too(running: server.Running) -> None:
    async def script() -> tuple[list[int], float]:
        client = await asyncio.to_thread(
            lambda: tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key)
        )
        trainer = await client.create_lora_training_client(running.model_name, rank=2, seed=1)
        out = await trainer.forward_backward([datum(PROMPT, weights=[1.0] * 7)], "cross_entropy")
        await trainer.optim_step(types.AdamParams())
        sampler = await trainer.save_weights_and_get_sampling_client()
        results = await asyncio.gather(*(sampler.sample(ints(PROMPT), 1, params(seed=i)) for i in range(4)))
        logprobs = await sampler.compute_logprobs(ints(PROMPT))
        assert logprobs[0] is None
        with pytest.warns(FutureWarning):
            old = await sampler.sample_async(ints(PROMPT), 1, params(seed=0))
        assert old.sequences[0].tokens == results[0].sequences[0].tokens
        await client.close("success")
        return results[0].sequences[0].tokens, out.metrics["loss:sum"]

    tokens, loss = asyncio.run(script())
    assert len(tokens) == 8
    assert loss > 0


def test_a_closed_session_frees_its_models_and_samplers(running: server.Running) -> None:
    service = running.service
    with tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key) as client:
        trainer = client.create_lora_training_client(running.model_name, rank=2).result()
        trainer.save_weights_and_get_sampling_client().result()
        model, session = trainer.model_id, trainer.model_id.split(":")[0]
        assert model in service.trainers.models
    assert model not in service.trainers.models
    assert service.samplers.of_session(session) == []


def test_compressed_requests_are_the_same(client: Any, running: server.Running) -> None:
    """With proto_compress_fwdbwd the SDK sends zstd bodies."""
    trainer = client.create_lora_training_client(running.model_name, rank=2, seed=1).result()
    plain = trainer.forward([datum(PROMPT, weights=[1.0] * 7)], "cross_entropy").result().metrics
    config = trainer.holder._client_config
    changed = config.model_copy(update={"proto_compress_fwdbwd": True})
    for pool in trainer.holder._client_pools.values():
        for one in pool._clients:
            one._client_config = changed
    packed = trainer.forward([datum(PROMPT, weights=[1.0] * 7)], "cross_entropy").result().metrics
    for pool in trainer.holder._client_pools.values():
        for one in pool._clients:
            one._client_config = config
    assert packed == plain
