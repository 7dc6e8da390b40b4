"""All layers in one call: the bits of the modules, for any mix of sequences, adapters and threads, or not used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paritygate.server.model import products
from paritygate.server.model.attention import PlainAttention, Span, cached
from paritygate.server.model.cache import Sequence
from paritygate.server.model.layers import Layers
from paritygate.server.model.lora import BASE, Adapter
from paritygate.server.model.network import Network
from paritygate.server.model.products import available, use_threads
from tests.server.engine.plain import moved_adapter

pytestmark = pytest.mark.skipif(not available(), reason="no compiler here, or PARITYGATE_KERNELS=off")


def llama(folder: Path, **options: Any) -> Network:
    """A Llama of two layers, with biases, from nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32, "vocab_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**(sizes | {"attention_bias": True} | options))
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return Network.load(folder)


def passed(
    network: Network, fused: Layers | None, read_from: tuple[int, int, int] = (0, 0, 0)
) -> tuple[Tensor, list[Tensor]]:
    """Hidden states and caches after a prefill of three sequences and a pass of a decoded token, a piece, a prompt."""
    generator = torch.Generator().manual_seed(0)
    adapters = [moved_adapter(network, mlp=mlp).freeze(f"{mlp}") for mlp in (True, False)]
    sequences = [Sequence(network.shape, [0] * 64, 128) for _ in range(3)]
    for sequence, first in zip(sequences, read_from, strict=True):
        sequence.read_from = first
    network._fused = fused
    out = Tensor()
    for counts in ((70, 3, 0), (1, 30, 40)):
        ends = [sum(counts[: i + 1]) for i in range(3)]
        spans = [Span(s, end - n, s.done, n) for s, end, n in zip(sequences, ends, counts, strict=True) if n]
        attention = cached(spans, ends[-1])
        ranges = [(0, ends[0], adapters[0]), (ends[0], ends[1], BASE), (ends[1], ends[2], adapters[1])]
        tokens = torch.randint(network.shape.vocabulary, (ends[-1],), generator=generator)
        positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
        with torch.no_grad(), network.routed([r for r in ranges if r[1] > r[0]], attention):
            out = network.forward(tokens, positions)
        for span in spans:
            span.sequence.done += span.count
    return out, [sequence.kv for sequence in sequences]


@pytest.fixture(params=["tiny float32", "tiny bfloat16", "tiny tiles", "llama with biases"])
def model(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Network:
    from paritygate.server.model.sources import resolve

    if "llama" in request.param:
        return llama(tmp_path)
    if "tiles" in request.param:
        monkeypatch.delenv("PARITYGATE_BFLOAT16", raising=False)
        monkeypatch.setattr(products, "EMULATED", bool(products.tiles_refused()))
    return Network.load(resolve("tiny").folder, torch.float32 if "float32" in request.param else torch.bfloat16)


def test_one_call_gives_the_bits_of_the_modules(model: Network) -> None:
    fused = model._fused
    assert fused is not None
    want, caches = passed(model, None)
    got, written = passed(model, fused)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(written, caches, strict=True))
    use_threads(3, torch.float32)
    assert torch.equal(passed(model, fused)[0], want)
    use_threads(1, torch.float32)


def test_the_last_layer_is_computed_for_the_rows_that_are_read(model: Network) -> None:
    """Of the second pass the decoded token, nothing of the piece, the last two of the prompt; of the first nothing."""
    want, caches = passed(model, model._fused)
    for fused in (model._fused, None):
        got, written = passed(model, fused, read_from=(70, 40, 38))
        assert torch.equal(got, want[[0, 69, 70]])
        assert all(torch.equal(a, b) for a, b in zip(written, caches, strict=True))


def trained(network: Network, fused: Layers | None, adapter: Adapter) -> tuple[Tensor, list[Tensor]]:
    """Hidden states and the adapter's gradients of sequences that begin with the same five rows; one adds none."""
    attention = PlainAttention(5, [70, 3, 0, 40])
    places = [torch.arange(5), *(torch.arange(5, 5 + rest) for rest in (70, 3, 40))]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(network.shape.vocabulary, (118,), generator=generator)
    network._fused = fused
    with network.routed([(0, 118, adapter)], attention):
        hidden = network.forward(tokens, torch.cat(places))
        into = torch.randn(hidden.shape, generator=generator)
        parameters = [p for name, p in adapter.parameters() if "unembed" not in name]
        return hidden.detach(), list(torch.autograd.grad(hidden, parameters, into))


@pytest.mark.parametrize("kinds", [{}, {"mlp": False}])
def test_a_training_pass_is_that_of_the_modules(model: Network, kinds: dict[str, bool]) -> None:
    """Hidden states bit for bit, gradients to float32's rounding; threads move no bit of either."""
    fused, adapter = model._fused, moved_adapter(model, **kinds)
    assert fused is not None
    want, gradients = trained(model, None, adapter)
    got, ours = trained(model, fused, adapter)
    assert torch.equal(got, want)
    for a, b in zip(ours, gradients, strict=True):
        assert float((a - b).abs().max()) <= 5e-6 * float(b.abs().max())
    use_threads(3, torch.float32)
    again, others = trained(model, fused, adapter)
    use_threads(1, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip([again, *others], [got, *ours], strict=True))


def test_a_training_pass_goes_back_once(tmp_path: Path) -> None:
    """What it kept is overwritten: a second time would give other gradients, silently."""
    network = llama(tmp_path)
    adapter = moved_adapter(network)
    with network.routed([(0, 3, adapter)], PlainAttention(0, [3])):
        hidden = network.forward(torch.arange(3), torch.arange(3))
    parameter = next(p for name, p in adapter.parameters() if "unembed" not in name)
    torch.autograd.grad(hidden.sum(), parameter, retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        torch.autograd.grad(hidden.sum(), parameter)


def test_layers_that_the_kernels_do_not_know_stay_modules(tmp_path: Path) -> None:
    """Another gate of the MLP; heads of which half is no whole vector."""
    assert llama(tmp_path / "gelu", hidden_act="gelu")._fused is None
    assert llama(tmp_path / "narrow", head_dim=products.library().width())._fused is None
