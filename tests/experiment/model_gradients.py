"""Loss and parameter gradients through a real model, twice: by the embedded server over HTTP, and by autograd here.

The wire has no gradients. One Adam step with beta1 = beta2 = 0, eps = lr = 1e8 moves a parameter by
-g / (1 + |g| / 1e8), minus its gradient. LoRA's B starts at 0, so the saved B is minus its gradient (A's is 0 there).
"""

import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paritygate.backend import Datum, connect, policy_gradient_datum
from paritygate.experiment.correctness.comparison import Comparison, compare_values
from paritygate.experiment.correctness.paths import FAR
from paritygate.experiment.step.advantages import group_advantages
from paritygate.server.model.lora import ALPHA
from paritygate.server.model.sources import resolve
from paritygate.spec.experiment import CorrectnessPath

MODEL = "tiny"
RANK = 8
A, B = ".lora_A", ".lora_B"
HUGE = 1e8


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """One training sequence: tokens, mask, sampler logprobs (nats) and advantages, all (L,)."""

    tokens: Sequence[int]
    mask: Sequence[int]
    sampler_logprobs: Sequence[float | None]
    advantages: Sequence[float]

    def datum(self) -> Datum:
        """What training sends for it."""
        return policy_gradient_datum(self.tokens, self.mask, self.sampler_logprobs, self.advantages)


@dataclasses.dataclass(frozen=True)
class LossAndGradient:
    """The summed loss, and d loss / d B of every adapted layer, end to end in the order of their names."""

    loss: float
    gradient: list[float]


async def through_server(datums: Sequence[Datum]) -> tuple[LossAndGradient, dict[str, torch.Tensor]]:
    """By `importance_sampling` of the embedded server, over its wire, read from what it saved; and its LoRA A."""
    from paritygate.server import start

    with tempfile.TemporaryDirectory(prefix="paritygate-") as folder:
        server = start(MODEL, state_dir=folder)
        try:
            async with connect(server.base_url, server.api_key) as backend:
                trainer = await backend.training(server.model_name, rank=RANK, seed=0)
                passed = await trainer.forward_backward(datums)
                await trainer.optim_step(HUGE, beta1=0.0, beta2=0.0, eps=HUGE)
                saved = await trainer.save("gradient")
        finally:
            server.stop()
        run, kind, name = saved.removeprefix("tinker://").split("/")
        tensors = load_file(Path(folder) / run / kind / name / "adapter.safetensors")
    moved = [-tensors[key].double().flatten() for key in sorted(tensors) if key.endswith(B)]
    lora_a = {key.removesuffix(A): tensor for key, tensor in tensors.items() if key.endswith(A)}
    return LossAndGradient(passed.loss, torch.cat(moved).tolist()), lora_a


def through_torch(sequences: Sequence[TokenSequence], lora_a: Mapping[str, torch.Tensor]) -> LossAndGradient:
    """By autograd through the same weights in transformers, with the documented loss's terms written out in float64.

    L = -sum exp(logprob - sampler) A (Tinker's importance sampling), so what enters the model at each assistant token
    is -exp(logprob - sampler) A, and 0 elsewhere. Each adapted layer adds (alpha / rank) (x A^T) B^T with B = 0.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(str(resolve(MODEL).folder), dtype=torch.float32).eval()
    lora_b = _adapt(model, lora_a)
    loss, total = 0.0, {name: torch.zeros_like(b, dtype=torch.float64) for name, b in lora_b.items()}
    for sequence in sequences:
        tokens = torch.tensor(sequence.tokens)
        logits = model(input_ids=tokens[None, :-1]).logits[0]
        logprobs = logits.double().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        acted = torch.tensor(sequence.mask[1:], dtype=torch.bool)
        sampled = torch.tensor([value or 0.0 for value in sequence.sampler_logprobs[1:]], dtype=torch.float64)
        advantages = torch.tensor(sequence.advantages[1:], dtype=torch.float64)
        term = torch.where(acted, -(logprobs.detach() - sampled).exp() * advantages, 0.0)
        loss += float(term.sum())
        for name, part in zip(lora_b, torch.autograd.grad((term * logprobs).sum(), list(lora_b.values())), strict=True):
            total[name] += part.double()
    return LossAndGradient(loss, torch.cat([total[name].flatten() for name in sorted(total)]).tolist())


def _adapt(model: Any, lora_a: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hook a zero B with the given A onto every adapted layer, and return the B's by name."""
    lora_b: dict[str, torch.Tensor] = {}
    for name, a in lora_a.items():
        layer = model.get_output_embeddings() if name == "unembed" else model.get_decoder().get_submodule(name)
        b = torch.zeros(layer.out_features, a.shape[0], requires_grad=True)
        layer.register_forward_hook(functools.partial(_add_lora, a, b))
        lora_b[name] = b
    return lora_b


def _add_lora(a: torch.Tensor, b: torch.Tensor, _: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + (inputs[0] @ a.T) @ b.T * (ALPHA / a.shape[0])


async def model_comparisons(path: CorrectnessPath) -> list[Comparison]:
    """Loss and gradient of every LoRA B through the embedded server against float64 terms through the same model."""
    sequences = model_batch(path.id)
    served, lora_a = await through_server([sequence.datum() for sequence in sequences])
    expected = through_torch(sequences, lora_a)
    revisions = ("baseline", "reference") if path.id.startswith("grpo") else ("reference",)
    values = {
        "loss": ([served.loss], [expected.loss]),
        "gradient": (served.gradient, expected.gradient),
    }
    return [
        compare_values(path, f"{revision}_{name}", f"{name} through the embedded model", *pair)
        for revision in revisions
        for name, pair in values.items()
    ]


def model_batch(path_id: str) -> list[TokenSequence]:
    """Four fixed token sequences of one group with sampler logprobs off the policy, and the path's advantages."""
    generator = torch.Generator().manual_seed(20)
    tokens: list[list[int]] = []
    masks: list[list[int]] = []
    students: list[list[float]] = []
    teachers: list[list[float]] = []
    for length in (12, 17, 9, 24):
        tokens.append(torch.randint(3, 250, (length,), generator=generator).tolist())
        masks.append([0, 0, 0] + [int(t % 5 != 4) for t in range(3, length)])
        students.append((-5.5 + 0.4 * torch.randn(length, generator=generator)).tolist())
        shifts = torch.randn(length, generator=generator).tolist()
        teachers.append([value + shift for value, shift in zip(students[-1], shifts, strict=True)])
    kind = "grpo" if path_id.startswith("grpo") else "sdpo_token"
    composites = [1.0, 2 / 3, 1 / 3, 2 / 3]
    rows = group_advantages(kind, composites, masks, students, teachers, clip=FAR, hybrid_weight=0.0)
    return [TokenSequence(*parts) for parts in zip(tokens, masks, students, rows, strict=True)]
