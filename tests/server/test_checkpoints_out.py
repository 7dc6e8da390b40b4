"""What others take out of the server: PEFT adapters, listings, metadata over a restart; and what it says it has not."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from paritygate import server
from paritygate.server.http.not_served import REASONS
from paritygate.server.model import sources

PROMPT = [5, 80, 90, 100, 110, 120, 7, 300]


def datum(tokens: list[int]) -> tinker.Datum:
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(value) for name, value in inputs.items()},
    )


def trained(client: Any, base_model: str, **options: Any) -> Any:
    trainer = client.create_lora_training_client(base_model, rank=4, seed=3, **options).result()
    for _ in range(2):
        trainer.forward_backward([datum(PROMPT)], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    return trainer


def rest_client(running: server.Running) -> Any:
    return tinker.RestClient(base_url=running.base_url, api_key=running.api_key)


def download(rest: Any, path: str, folder: Path) -> None:
    """As the tinker command line does: plain GETs without the key."""
    for name, url in rest.get_external_weights_urls(path).result().urls.items():
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as response:
            (folder / name).write_bytes(response.read())


def by_definition(base: Any, folder: Path) -> None:
    """Add lora_alpha / r * B A to each weight that the files name: what PEFT's documentation says an adapter is."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in [n for n in tensors if n.endswith(".lora_A.weight")]:
        assert name.startswith("base_model.model.")  # PEFT loads nothing else
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert module.rpartition(".")[2] in config["target_modules"]
        update = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        base.get_submodule(module).weight.data += config["lora_alpha"] / config["r"] * update


@pytest.mark.parametrize("layers", [{}, {"train_unembed": False}, {"train_attn": False, "train_unembed": False}])
@pytest.mark.parametrize("loader", ["peft", "definition"])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21 reads it
def test_an_exported_adapter_gives_the_servers_logprobs(
    client: Any, running: server.Running, tmp_path: Path, layers: dict[str, bool], loader: str
) -> None:
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft") if loader == "peft" else None
    trainer = trained(client, running.model_name, **layers)
    path = trainer.save_weights_external("out").result().path
    assert path == f"tinker://{trainer.model_id}/external_weights/out"
    download(rest_client(running), path, tmp_path)
    folder = json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    untrained = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].detach(), 1)
    if peft is None:
        by_definition(model, tmp_path)
    else:
        model = peft.PeftModel.from_pretrained(model, str(tmp_path))
    logprobs = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].detach(), 1)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    want = sampler.compute_logprobs(tinker.ModelInput.from_ints(PROMPT)).result()[1:]
    got = [float(logprobs[i, token]) for i, token in enumerate(PROMPT[1:])]
    assert got == pytest.approx(want, abs=1e-4)
    assert max(abs(float(untrained[i, t]) - want[i]) for i, t in enumerate(PROMPT[1:])) > 0.1  # it was trained


def test_a_tied_unembedding_is_no_adapter_and_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "tied"
    plain: Any = AutoModelForCausalLM.from_pretrained(str(sources.resolve("tiny").folder))
    plain.config.tie_word_embeddings = True
    plain.tie_weights()
    plain.lm_head.weight = plain.model.embed_tokens.weight
    plain.save_pretrained(str(folder))
    with server.start(str(folder)) as running:
        client = tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key)
        with pytest.raises(tinker.RequestFailedError, match="train_unembed=False"):
            trained(client, running.model_name).save_weights_external("out").result()
        # The folder itself names the model too, and without the unembedding the export is whole.
        trainer = trained(client, str(folder), train_unembed=False)
        out = tmp_path / "out"
        out.mkdir()
        download(rest_client(running), trainer.save_weights_external("out").result().path, out)
        by_definition(plain, out)
        want = trainer.forward([datum(PROMPT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        logprobs = torch.log_softmax(plain(torch.tensor([PROMPT])).logits[0].detach(), 1)
        assert [float(logprobs[i, t]) for i, t in enumerate(PROMPT[1:])] == pytest.approx(want.tolist(), abs=1e-4)
        with pytest.raises(tinker.NotFoundError, match="not served here"):
            client.create_lora_training_client(str(tmp_path)).result()
        client.close("success").result()


def test_urls_are_signed_for_one_file_and_a_while(client: Any, running: server.Running) -> None:
    path = trained(client, running.model_name).save_weights_external("signed").result().path
    urls = rest_client(running).get_external_weights_urls(path).result().urls
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
    with httpx.Client(trust_env=False) as http:
        url = urls["adapter_config.json"]
        assert http.get(url).json()["peft_type"] == "LORA"
        for wrong in (
            url.replace("adapter_config.json", "adapter_model.safetensors"),
            url.replace("expires=1", "expires=2"),
            url.split("&", maxsplit=1)[0],
            url.replace("adapter_config.json", "checkpoint.json"),
        ):
            assert http.get(wrong).status_code == 403
    # An export is for others: nothing is loaded from it, and it encrypts nothing.
    with pytest.raises(tinker.RequestFailedError, match="load a saved state"):
        client.create_training_client_from_state(path).result()
    with pytest.raises(tinker.BadRequestError, match="age_encryption_recipients"):
        trained(client, running.model_name).save_weights_external("x", age_encryption_recipients=["age1x"]).result()


def test_runs_and_checkpoints_are_listed_and_kept_over_a_restart(tmp_path: Path) -> None:
    """The cookbook reads its renderer from the training run's user_metadata when it goes on."""
    with server.start("tiny", state_dir=tmp_path) as running:
        client = tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key)
        trainer = trained(client, running.model_name, user_metadata={"renderer_name": "qwen3"})
        state = trainer.save_state("one", user_metadata={"step": "1"}).result().path
        sampler = trainer.save_weights_for_sampler("two").result().path
        rest = rest_client(running)
        live = rest.list_training_runs().result()
        assert [run.training_run_id for run in live.training_runs] == [trainer.model_id]
        session = trainer.model_id.split(":")[0]
        assert session in rest.list_sessions().result().sessions
        client.close("success").result()
    with server.start("tiny", state_dir=tmp_path) as running:
        client = tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key)
        rest = rest_client(running)
        run = rest.get_training_run_by_tinker_path(state).result()
        assert run.user_metadata == {"renderer_name": "qwen3"}
        assert (run.training_run_id, run.lora_rank, run.base_model) == (trainer.model_id, 4, running.model_name)
        assert run.last_checkpoint is not None
        assert run.last_checkpoint.user_metadata == {"step": "1"}
        assert run.last_sampler_checkpoint is not None
        assert run.last_sampler_checkpoint.tinker_path == sampler
        listed = rest.list_user_checkpoints(limit=1, offset=1).result()
        assert [checkpoint.tinker_path for checkpoint in listed.checkpoints] == [state]  # newest first
        assert listed.cursor is not None
        assert (listed.cursor.total_count, listed.cursor.limit, listed.cursor.offset) == (2, 1, 1)
        assert rest.list_training_runs(offset=1).result().training_runs == []
        rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
        [aged] = [c for c in rest.list_checkpoints(trainer.model_id).result().checkpoints if c.tinker_path == state]
        assert aged.expires_at is not None
        assert 3500 < aged.expires_at.timestamp() - aged.time.timestamp() < 3900
        rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
        client.create_training_client_from_state_with_optimizer(state).result()
        with pytest.raises(tinker.NotFoundError, match="no training run"):
            rest.get_training_run("nobody:train:0").result()
        client.close("success").result()


def test_a_state_saved_without_a_seed_is_read_again(client: Any, running: server.Running) -> None:
    """The server draws the seed then, and its record has to hold it."""
    trainer = client.create_lora_training_client(running.model_name, rank=2).result()
    saved = trainer.save_state("unseeded").result().path
    assert rest_client(running).get_training_run_by_tinker_path(saved).result().training_run_id == trainer.model_id
    client.create_training_client_from_state_with_optimizer(saved).result()


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "copy_weights", "no projects"),
        ("POST", "create_custom_loss", "forward_backward_custom"),
        ("POST", "join_sampling_session", "client/config"),
        ("POST", "retrieve_futures", "client/config"),
        ("POST", "auth/token", "one key"),
        ("GET", "auth/apikey/me", "one key"),
        ("GET", "audit", "no accounts"),
        ("GET", "billing/usage/events", "no accounts"),
        ("POST", "sessions/search", "have ended"),
        ("PUT", "sessions/x/project", "no projects"),
        ("GET", "sessions/x/trace_export", "no traces"),
        ("POST", "training_runs/r/checkpoints/weights/x/publish", "one owner"),
        ("DELETE", "training_runs/r/checkpoints/weights/x/publish", "one owner"),
        ("GET", "training_runs/r/checkpoints/weights/x/archive", "external_weights_urls"),
        ("GET", "nothing/of/this/name", ""),
        ("PUT", "asample", ""),
    ],
)
def test_what_is_not_served_says_so(http: httpx.Client, method: str, path: str, words: str) -> None:
    answer = http.request(method, path, json={})
    assert answer.status_code == 404
    message = answer.json()["detail"]
    assert message.startswith(f"{method} /api/v1/{path} is not served by paritygate's embedded server")
    assert words in message
    assert http.request(method, path, headers={"X-API-Key": "tml-wrong"}).status_code == 401


def test_every_route_of_the_sdk_is_served_or_named(running: server.Running) -> None:
    """Every address that stands in the SDK's sources is a route of the server or one of those it has a reason for."""
    import re

    text = "\n".join(
        path.read_text()
        for path in Path(tinker.__file__).parent.rglob("*.py")
        if not path.name.endswith("_test.py") and "cli" not in path.parts
    )
    addresses = {re.sub(r"\{[^}]*\}", "x", route) for route in re.findall(r'f?"/api/v1/([^"]+)"', text)}
    assert {"asample", "copy_weights", "sessions/x/finish"} <= addresses
    served = [re.sub(r"\{[^}]*\}", "[^/]+", path) for _, path in running.service.routes]
    for address in addresses:
        whole = re.sub(r"checkpoints/x", "checkpoints/weights/x", address)
        assert any(re.fullmatch(pattern, whole) for pattern in [*served, *REASONS]), address
