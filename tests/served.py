"""The embedded server's training pass on its tiny model, and the same model in float64 for what it should have done."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Served(NamedTuple):
    """The server's network and plain transformers' model of the same weights in float64."""

    network: Any
    plain: Any


@cache
def served() -> Served:
    """The tiny model, made once."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from paritygate.server.model import sources
    from paritygate.server.model.network import Network

    logging.disable_progress_bar()
    network = Network(sources.resolve("tiny").folder)
    plain = AutoModelForCausalLM.from_pretrained(
        str(network.folder), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    return Served(network, plain)


def server_gradients(tokens: list[int], targets_NK: Tensor, weights_NK: Tensor) -> dict[str, Tensor]:
    """The gradient of each fresh LoRA B after one `cross_entropy` request of (N, K) targets and weights."""
    from paritygate.server.engine.losses import LossInputs
    from paritygate.server.engine.training import Datum, Pass
    from paritygate.server.model.lora import Adapter, LoraSpec

    network = served().network
    adapter = Adapter(LoraSpec(rank=4, seed=3, unembed=False), network.targets)
    datum = Datum(tokens, LossInputs(targets_NK, {"weights": weights_NK.float()}))
    for _ in Pass(network, adapter, [datum], "cross_entropy", {}, forward_only=False).steps(4096):
        pass
    return {name: p.grad for name, p in adapter.parameters() if name.endswith("lora_B") and p.grad is not None}


def wanted_gradients(tokens: list[int], logits_gradient_NV: Tensor) -> dict[str, Tensor]:
    """What d loss / d logits of the unadapted model makes of the same B: scale * dW @ A.T, B being 0 at first."""
    from paritygate.server.model.lora import Adapter, LoraSpec

    network, plain = served()
    adapter = Adapter(LoraSpec(rank=4, seed=3, unembed=False), network.targets)
    weights = {name: plain.get_parameter(f"model.{name}.weight") for name in adapter.a}
    logits = plain(torch.tensor([tokens])).logits[0]
    slopes = torch.autograd.grad(logits, list(weights.values()), logits_gradient_NV)
    return {
        f"{name}.lora_B": adapter.spec.scale * slope @ adapter.a[name].detach().double().T
        for name, slope in zip(weights, slopes, strict=True)
    }
