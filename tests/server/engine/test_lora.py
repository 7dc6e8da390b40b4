"""LoRA by its definition: the scale, the copy that a sampler gets."""

from typing import Any

import pytest
import torch

from paritygate.server.model import products
from paritygate.server.model.lora import Adapter, LoraSpec, Target

TARGET = Target("layer", "mlp", 48, 32)


def adapter(rank: int) -> Adapter:
    made = Adapter(LoraSpec(rank, seed=1), [TARGET])
    made.b["layer"] = torch.randn(32, rank, generator=torch.Generator().manual_seed(2)).requires_grad_()
    return made


@pytest.mark.parametrize(("rank", "scale"), [(1, 32.0), (4, 8.0), (8, 4.0), (32, 1.0), (64, 0.5)])
def test_the_update_is_alpha_over_rank_times_b_times_a(rank: int, scale: float) -> None:
    """alpha is 32, so rank 32 adds B A itself; trained and frozen weights alike."""
    weights = adapter(rank)
    rows = torch.randn(20, 48, generator=torch.Generator().manual_seed(3))
    want = scale * rows.double() @ weights.a["layer"].double().T @ weights.b["layer"].double().T
    for delta in (weights.delta("layer", rows), weights.freeze("v").delta("layer", rows)):
        assert delta is not None
        assert float((delta.double() - want).detach().abs().max()) <= 1e-5 * float(want.detach().abs().max())


@pytest.mark.parametrize("kernels", [True, False])
def test_a_samplers_weights_are_a_copy_with_and_without_kernels(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:  # they lay weights out anew, which is a copy by itself
        monkeypatch.setattr(products, "available", lambda: False)
    weights = adapter(8)
    snapshot = weights.freeze("v")
    rows = torch.randn(20, 48, generator=torch.Generator().manual_seed(3))
    before: Any = snapshot.delta("layer", rows)
    with torch.no_grad():
        for _, parameter in weights.parameters():
            parameter.mul_(2.0)
    after: Any = snapshot.delta("layer", rows)
    assert torch.equal(after, before)
