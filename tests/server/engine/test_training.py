"""The numbers are right: against plain transformers with autograd, torch's AdamW, and themselves at any batching."""

import random
from typing import Any

import pytest
import torch

from paritygate.server.engine.losses import LossInputs
from paritygate.server.engine.training import AdamParams, Datum, Packing, Pass, adam_step
from paritygate.server.errors import RequestError
from paritygate.server.model import layers, sources
from paritygate.server.model.layers import Layers
from paritygate.server.model.lora import LoraLinear
from paritygate.server.model.network import Network
from paritygate.server.model.products import available
from tests.server.engine.plain import leaves_of, merged_logprobs, moved_adapter, plain_model, random_datum


@pytest.mark.parametrize("kinds", [{}, {"unembed": False}, {"attn": False, "mlp": False}])
def test_logprobs_and_gradients_equal_plain_transformers(network: Any, kinds: dict[str, bool]) -> None:
    generator = random.Random(0)
    adapter = moved_adapter(network, **kinds)
    # Lengths below, at and over a block of 64 keys, packed into pieces of different numbers of datums.
    data = [random_datum(generator, n, network.shape.vocabulary) for n in (1, 3, 63, 64, 65, 130, 20)]
    work = Pass(network, adapter, data, "cross_entropy", {}, forward_only=False)
    for _ in work.steps(150):
        pass
    model, leaves = plain_model(network), leaves_of(adapter)
    loss = torch.zeros((), dtype=torch.float64)
    for datum, got in zip(data, work.outcome.logprobs, strict=True):
        want = merged_logprobs(model, adapter, leaves, datum.tokens)
        want = want.gather(1, datum.inputs.target_tokens[:, None])[:, 0]
        assert torch.allclose(got.double(), want, rtol=0, atol=1e-5)
        loss = loss - (datum.inputs.of("weights") * want).sum()
    assert work.outcome.loss == pytest.approx(float(loss.detach()), rel=1e-6, abs=0.0)
    loss.backward()
    for name, parameter in adapter.parameters():
        want = leaves[name].grad
        assert parameter.grad is not None
        assert want is not None
        scale = float(want.abs().max())
        assert torch.allclose(parameter.grad.double(), want, rtol=1e-5, atol=1e-5 * max(scale, 1.0)), name


def test_recomputed_activations_give_the_same_gradients(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [random_datum(random.Random(5), 90, network.shape.vocabulary) for _ in range(2)]
    gradients: list[dict[str, torch.Tensor]] = []
    for limit in (2048, 10):
        monkeypatch.setattr(Pass, "recompute_over", limit)
        adapter = moved_adapter(network)
        for _ in Pass(network, adapter, data, "cross_entropy", {}, forward_only=False).steps(1000):
            pass
        gradients.append({name: p.grad for name, p in adapter.parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, grad in gradients[0].items():
        assert torch.equal(grad, gradients[1][name]), name


def test_gradients_accumulate_over_requests_and_pieces(network: Any) -> None:
    data = [random_datum(random.Random(2), n, network.shape.vocabulary) for n in (30, 40, 50, 60)]
    at_once, split = moved_adapter(network), moved_adapter(network)
    for _ in Pass(network, at_once, data, "cross_entropy", {}, forward_only=False).steps(10_000):
        pass
    for half in (data[:2], data[2:]):
        for _ in Pass(network, split, half, "cross_entropy", {}, forward_only=False).steps(1):
            pass
    for (name, a), (_, b) in zip(at_once.parameters(), split.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-5 * max(1.0, float(a.grad.abs().max()))), name


@pytest.mark.parametrize("prompt", [7, 64, 100])
def test_a_prompt_in_common_is_computed_once_and_changes_nothing(network: Any, prompt: int) -> None:
    """Logprobs keep every bit; gradients are those of the datums one by one. One datum is the prompt and no more."""
    generator = random.Random(4)
    vocabulary = network.shape.vocabulary
    common = [generator.randrange(vocabulary) for _ in range(prompt)]
    data: list[Datum] = []
    for length in (0, 1, 40, 40, 90):
        tokens = common + [generator.randrange(vocabulary) for _ in range(length + 1)]
        weights = torch.tensor([generator.choice([0.0, 1.0, -0.5]) for _ in range(len(tokens) - 1)])
        data.append(Datum(tokens[:-1], LossInputs(torch.tensor(tokens[1:]), {"weights": weights})))
    together, separate = moved_adapter(network), moved_adapter(network)
    whole = Pass(network, together, data, "cross_entropy", {}, forward_only=False)
    pieces = list(whole.steps(10_000))
    single = Pass(network, separate, data, "cross_entropy", {}, forward_only=False)
    for _ in single.steps(1):
        pass
    assert len(pieces) == 1
    assert all(torch.equal(a, b) for a, b in zip(whole.outcome.logprobs, single.outcome.logprobs, strict=True))
    assert whole.outcome.loss == pytest.approx(single.outcome.loss, rel=1e-6, abs=0.0)
    for (name, a), (_, b) in zip(together.parameters(), separate.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-5 * max(1.0, float(a.grad.abs().max()))), name


def test_a_pass_packs_what_fits_with_the_common_prompt_counted_once() -> None:
    datums = [Datum([1, 2, 3, 4 + i], LossInputs(torch.tensor([2, 3, 4 + i, 9]))) for i in range(3)]
    packing = Packing()
    assert packing.rows_with(datums[0]) == 4
    packing.add(datums[0])
    assert packing.rows_with(datums[0]) == 4  # the same again adds nothing
    assert packing.rows_with(datums[1]) == 2 + 2 * 2  # the third row asks for another target
    packing.add(datums[1])
    layout = packing.laid_out()
    assert layout.tokens.tolist() == [1, 2, 3, 4, 3, 5]
    assert layout.positions.tolist() == [0, 1, 2, 3, 2, 3]
    assert [index.tolist() for index in layout.indices] == [[0, 1, 2, 3], [0, 1, 4, 5]]


def test_forward_only_leaves_no_gradient(network: Any) -> None:
    adapter = moved_adapter(network)
    data = [random_datum(random.Random(2), 30, network.shape.vocabulary)]
    for _ in Pass(network, adapter, data, "cross_entropy", {}, forward_only=True).steps(100):
        pass
    assert all(p.grad is None for _, p in adapter.parameters())


@pytest.mark.skipif(not available(), reason="no compiler here, or PARITYGATE_KERNELS=off")
def test_forward_only_keeps_nothing_to_go_back_with(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Function of autograd is told that its inputs need gradients even where none are recorded."""
    kept: list[torch.Size] = []

    def counted(shape: torch.Size, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kept.append(shape)
        return torch.empty(shape, dtype=dtype, device=like.device)

    monkeypatch.setattr(layers, "buffer", counted)
    data = [random_datum(random.Random(2), 30, network.shape.vocabulary)]
    for forward_only, memories in ((True, 0), (False, 2)):  # what each layer keeps, and its input
        for _ in Pass(network, moved_adapter(network), data, "cross_entropy", {}, forward_only=forward_only).steps(100):
            pass
        assert len(kept) == memories


def test_a_failed_request_leaves_no_gradient(network: Any) -> None:
    adapter = moved_adapter(network)
    good = random_datum(random.Random(2), 30, network.shape.vocabulary)
    inputs = {"logprobs": torch.full((30,), -200.0), "advantages": torch.ones(30)}
    bad = Datum(good.tokens, LossInputs(good.inputs.target_tokens, inputs))
    fine = Datum(good.tokens, LossInputs(good.inputs.target_tokens, {**inputs, "logprobs": torch.zeros(30)}))
    work = Pass(network, adapter, [fine, bad], "importance_sampling", {}, forward_only=False)
    with pytest.raises(RequestError, match="datum 1"):
        list(work.steps(1))
    assert all(p.grad is None for _, p in adapter.parameters())


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_adam_is_torch_adamw(network: Any, clip: float) -> None:
    adapter = moved_adapter(network)
    mirror = [p.detach().clone().requires_grad_() for _, p in adapter.parameters()]
    optimizer = torch.optim.AdamW(mirror, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for (_, parameter), other in zip(adapter.parameters(), mirror, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            other.grad = parameter.grad.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(mirror, clip)
        optimizer.step()
        adam_step(adapter, AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.1, clip))
    for (name, parameter), other in zip(adapter.parameters(), mirror, strict=True):
        assert torch.allclose(parameter, other, rtol=1e-5, atol=1e-6), name
        assert parameter.grad is None


def test_adam_refuses_a_gradient_that_is_not_finite(network: Any) -> None:
    adapter = moved_adapter(network)
    before = [p.detach().clone() for _, p in adapter.parameters()]
    first = next(p for _, p in adapter.parameters())
    first.grad = torch.full_like(first, float("nan"))
    with pytest.raises(RequestError, match="gradient norm"):
        adam_step(adapter, AdamParams())
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, adapter.parameters(), strict=True))
    adam_step(adapter, AdamParams())


def test_weights_in_bfloat16_are_rounded_and_nothing_else_is() -> None:
    """Logprobs and the gradient are those of float32 with the same rounded weights, to float32's own rounding."""
    folder = sources.resolve("tiny").folder
    narrow, wide = Network(folder, torch.bfloat16), Network(folder)
    for layer in [wide._head, *(m.base for m in wide.body.modules() if isinstance(m, LoraLinear))]:
        layer.__init__(layer.weight.bfloat16().float(), layer.bias)
    for parameter in wide.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    wide._fused = Layers.of(wide.body, torch.float32)  # it has the addresses of the weights before
    data = [random_datum(random.Random(n), n, 480) for n in (30, 7)]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for network in (narrow, wide):
        adapter = moved_adapter(network)
        work = Pass(network, adapter, data, "cross_entropy", {}, forward_only=False)
        for _ in work.steps(100):
            pass
        gradient = torch.cat([p.grad.flatten() for _, p in adapter.parameters() if p.grad is not None])
        pairs.append((torch.cat(work.outcome.logprobs), gradient))
    (logprobs, gradient), (want, want_gradient) = pairs
    assert float((logprobs - want).abs().max()) < 1e-5
    assert float((gradient - want_gradient).norm() / want_gradient.norm()) < 1e-5
