"""Models, the command line, saved files, the cache: what stands on disk and how a server starts and ends."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from paritygate import server
from paritygate.errors import BadInputError
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model import sources, tiny
from paritygate.server.model.cache import PAGE, PrefixCache, Sequence
from paritygate.server.model.lora import BASE, Adapter, LoraSpec
from paritygate.server.model.network import Network
from paritygate.server.sessions.checkpoints import Store

ROOT = Path(__file__).resolve().parents[2]


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def test_tiny_is_built_the_same_in_another_process(tmp_path: Path) -> None:
    script = "import sys, pathlib; from paritygate.server.model import tiny; tiny.build(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "impl"), "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=True, capture_output=True)
    assert digests(tmp_path) == digests(sources.resolve("tiny").folder)


def test_tiny_has_a_tokenizer_with_a_chat_template() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(sources.resolve("tiny").folder))
    assert len(tokenizer) == tiny.VOCABULARY
    text = "Ünïcode, tabs\t, emoji 🙂 and {json: [1, 2]}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]


@pytest.mark.parametrize("name", ["gpt-9", "/nonexistent"])
def test_unknown_models_are_refused(name: str) -> None:
    with pytest.raises(BadInputError, match="no transformers folder"):
        sources.resolve(name)


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(BadInputError, match="safetensors"):
        sources.resolve(str(tmp_path))


def test_a_half_built_cache_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITYGATE_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("the disk is full")

    monkeypatch.setattr(tiny, "build", fail)
    with pytest.raises(OSError, match="full"):
        sources.resolve("tiny")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_local_folder_of_another_architecture_is_served(tmp_path: Path) -> None:
    """A Llama and a Qwen2 (biases, tied embeddings, one key head): the packed network is transformers'."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "max_position_embeddings": 256}  # fmt: skip
    for index, config in enumerate(
        (
            LlamaConfig(**sizes, num_key_value_heads=4),
            Qwen2Config(**sizes, num_key_value_heads=1, tie_word_embeddings=True, use_sliding_window=False),
        )
    ):
        torch.manual_seed(index)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(str(tmp_path / str(index)))
        network = Network(sources.resolve(str(tmp_path / str(index))).folder)
        tokens = torch.randint(0, 96, (70,))
        from paritygate.server.model.attention import PlainAttention

        with torch.no_grad(), network.routed([], PlainAttention(0, [70])):
            logits, _ = network.head(network.forward(tokens, torch.arange(70)), BASE)
            assert torch.allclose(logits, model(tokens[None]).logits[0], rtol=0, atol=1e-5)


def test_what_the_packed_attention_would_get_wrong_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Gemma2Config

    config = Gemma2Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                          num_attention_heads=2, num_key_value_heads=2, head_dim=16)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    with pytest.raises(BadInputError, match=r"not supported|only full causal"):
        Network(tmp_path)


def test_a_model_whose_attention_is_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
    from transformers.models.llama import modeling_llama

    AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64)).save_pretrained(
        str(tmp_path / "gpt2")
    )
    with pytest.raises(BadInputError, match="not known"):
        Network(tmp_path / "gpt2")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path / "llama"))
    Network(tmp_path / "llama")
    attention = modeling_llama.eager_attention_forward

    def other(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **more: Any) -> Any:
        return attention(module, query, key, value, mask, scaling=2 * scaling, **more)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", other)
    with pytest.raises(BadInputError, match="packed attention differs"):
        Network(tmp_path / "llama")


def test_lora_starts_from_its_seed_and_from_zero(network: Any) -> None:
    one, same, other = (Adapter(LoraSpec(4, seed), network.targets) for seed in (1, 1, 2))
    part = Adapter(LoraSpec(4, 1, mlp=False), network.targets)
    for name in one.a:
        assert torch.equal(one.a[name], same.a[name])
        assert not torch.equal(one.a[name], other.a[name])
        assert not bool(one.b[name].any())
    assert set(part.a) == {n for n in one.a if "mlp" not in n}
    assert all(torch.equal(part.a[n], one.a[n]) for n in part.a)
    assert {n.rpartition(".")[2] for n in one.a} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "unembed",
    }  # fmt: skip


def test_saved_states_hold_no_pickle_and_survive_a_restart(network: Any, tmp_path: Path) -> None:
    adapter = Adapter(LoraSpec(2, 1), network.targets)
    adapter.moments = {n: (torch.rand(p.shape), torch.rand(p.shape)) for n, p in adapter.parameters()}
    adapter.steps = 3
    options: dict[str, Any] = {"ttl_seconds": None, "overwrite": False, "user_metadata": None}
    saved = Store(tmp_path).save(adapter, "run", "weights", "a", "m", **options)
    assert {f.suffix for f in tmp_path.rglob("*") if f.is_file()} == {".safetensors", ".json"}
    again = Store(tmp_path)
    fresh = Adapter(saved.spec, network.targets)
    again.load_into(fresh, again.find(saved.path), optimizer=True)
    assert fresh.steps == 3
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(adapter.parameters(), fresh.parameters(), strict=True))
    assert all(torch.equal(adapter.moments[n][i], fresh.moments[n][i]) for n in adapter.moments for i in (0, 1))
    with pytest.raises(RequestError, match="does not fit"):
        again.load_into(Adapter(LoraSpec(3, 1), network.targets), saved, optimizer=False)
    file = tmp_path / "run" / "weights" / "a" / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RequestError, match="cannot be read"):
        again.load_into(fresh, saved, optimizer=False)


def test_spilled_weights_come_back_the_same(network: Any, tmp_path: Path) -> None:
    store, snapshot = Store(tmp_path), Adapter(LoraSpec(2, 1), network.targets).freeze("v")
    path = store.spill(snapshot, "x")
    back = store.unspill(path, "v")
    assert not path.exists()
    assert back.pairs.keys() == snapshot.pairs.keys()
    for name, (a, b, scale) in snapshot.pairs.items():
        assert torch.equal(back.pairs[name][0].weight, a.weight)
        assert torch.equal(back.pairs[name][1].weight, b.weight)
        assert back.pairs[name][2] == scale


def test_idle_samplers_leave_memory_and_come_back() -> None:
    import tinker
    from tinker import types

    running = server.start("tiny", limits=Limits(sampler_bytes=1))
    client = tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key)
    trainer = client.create_lora_training_client(running.model_name, rank=2, seed=1).result()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    samplers, expected = [], []
    for _ in range(3):
        datum = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4})
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
        samplers.append(trainer.save_weights_and_get_sampling_client().result())
        expected.append(samplers[-1].compute_logprobs(prompt).result())
    held = [s for s in running.service.samplers._samplers.values() if s.snapshot is not None]
    assert len(held) == 1
    assert [s.compute_logprobs(prompt).result() for s in samplers] == expected
    assert len({str(e) for e in expected}) == 3
    client.close("success").result()
    assert list(running.service.store.folder.rglob("*.safetensors")) == []
    running.stop()


def test_the_prefix_cache_keeps_versions_apart_and_its_bound(network: Any) -> None:
    tokens = list(range(5 * PAGE + 3))

    def computed(fill: float) -> Sequence:
        sequence = Sequence(network.shape, tokens, 200)
        sequence.kv += fill
        sequence.done = len(tokens)
        sequence.has_hidden[: sequence.done] = True
        return sequence

    cache = PrefixCache(10**9)
    cache.store(computed(1.0), "a")
    fresh = Sequence(network.shape, tokens, 200)
    assert cache.fill(fresh, "b") == 0
    assert cache.fill(fresh, "a") == 5 * PAGE
    assert bool((fresh.kv[:, :, :, : 5 * PAGE] == 1).all())
    assert not bool(fresh.kv[:, :, :, 5 * PAGE :].any())
    other = Sequence(network.shape, [*tokens[:20], 400, *tokens[21:]], 200)
    assert cache.fill(other, "a") == PAGE
    page = cache.bytes // 5
    part = computed(1.0)  # hidden states of tokens 35 to 37 were not asked for
    part.has_hidden[35:38] = False
    cache.store(part, "c")
    for read_from, length in ((0, 2 * PAGE), (35, 2 * PAGE), (38, 5 * PAGE), (3 * PAGE, 5 * PAGE)):
        fresh = Sequence(network.shape, tokens, 200)
        fresh.read_from = read_from
        assert cache.fill(fresh, "c") == length
        assert fresh.has_hidden[: fresh.done].tolist() == [not 2 * PAGE <= i < 38 for i in range(length)]
    cache.store(computed(1.0), "c")
    assert cache.fill(Sequence(network.shape, tokens, 200), "c") == 5 * PAGE
    assert cache.bytes == 10 * page
    small = PrefixCache(3 * page)
    small.store(computed(1.0), "a")
    assert small.bytes <= 3 * page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nothing"], "no transformers folder"),
        (["--model", "tiny", "--api-key", "secret"], "tml-"),
        (["--model", "tiny", "--threads", "0"], "threads"),
        (["--model", "tiny", "--port", "99999"], "port"),
    ],
)
def test_bad_arguments_exit_2_with_one_sentence(arguments: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paritygate.server", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "impl")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_command_serves_and_stops_on_a_signal(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "paritygate.server", "--model", "tiny", "--api-key", "tml-x", "--state", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "impl")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["model"] == "paritygate/tiny-qwen3"
    assert ready["api_key"] == "tml-x"
    headers = {"X-API-Key": "tml-x"}
    assert httpx.get(f"{ready['base_url']}/api/v1/healthz", headers=headers, trust_env=False).status_code == 200
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    lines = [line for line in err.splitlines() if not line.startswith("paritygate: compiling ")]  # on a fresh machine
    assert (process.returncode, out, lines) == (0, "", [])


def test_importing_the_server_does_not_import_torch() -> None:
    script = "import sys, paritygate.server; assert 'torch' not in sys.modules and 'uvicorn' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "impl")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
