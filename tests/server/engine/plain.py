"""Plain transformers with autograd, to hold the server's engine to; adapters and data to hold it with."""

import random
from typing import Any

import torch

from paritygate.server.engine.losses import LossInputs
from paritygate.server.engine.training import Datum
from paritygate.server.model.lora import Adapter, LoraSpec


def plain_model(network: Any, dtype: torch.dtype = torch.float64) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(network.folder), dtype=dtype, attn_implementation="eager").eval()


def moved_adapter(network: Any, **kinds: bool) -> Adapter:
    """An adapter whose B is not 0, so that every gradient is in play."""
    adapter = Adapter(LoraSpec(rank=4, seed=3, **kinds), network.targets)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in adapter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return adapter


def merged_logprobs(model: Any, adapter: Adapter, leaves: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """(N, V) logprobs of plain transformers whose weights are W + scale * B A, differentiable in A and B."""
    weights = dict(model.named_parameters())
    for name in adapter.a:
        full = "lm_head.weight" if name == "unembed" else f"model.{name}.weight"
        low_rank = leaves[f"{name}.lora_B"] @ leaves[f"{name}.lora_A"]
        weights[full] = weights[full].detach() + adapter.spec.scale * low_rank
    out = torch.func.functional_call(model, weights, (torch.tensor([tokens]),))
    return torch.log_softmax(out.logits[0].double(), -1)


def leaves_of(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in adapter.parameters()}


def random_datum(generator: random.Random, length: int, vocabulary: int) -> Datum:
    tokens = [generator.randrange(vocabulary) for _ in range(length + 1)]
    weights = torch.tensor([generator.choice([0.0, 1.0, 0.25]) for _ in range(length)])
    return Datum(tokens[:-1], LossInputs(torch.tensor(tokens[1:]), {"weights": weights}))
