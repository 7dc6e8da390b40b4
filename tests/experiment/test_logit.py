"""Logit-level SDPO on an unmodified service: the gradient that arrives is the reference's, by way of a real model."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paritygate.agent.judge import Judged
from paritygate.agent.rollouts import Rollout, TeacherScores
from paritygate.agent.trajectory import Trajectory
from paritygate.backend import connect
from paritygate.experiment.run.journal import read_lines
from paritygate.experiment.step.logit import logit_datums
from paritygate.server import Running, start
from paritygate.server.model.sources import resolve
from paritygate_reference import sdpo as reference
from tests.experiment import model_gradients
from tests.experiment.tiny_spec import small_at_a_service

K = 8
PROMPT = (5, 6, 7, 8, 9)
CONTEXT = (40, 41, 42, 43, 44, 45, 46, 5, 6, 7, 8, 9)
REST = (100, 101, 7, 102, 60, 61, 103, 104)
MASK = (1, 1, 1, 0, 0, 1, 1, 1)


def rollout() -> Rollout:
    tokens, mask = (*PROMPT, *REST), (*([0] * len(PROMPT)), *MASK)
    trajectory = Trajectory(
        split="train",
        task_index=0,
        rollout=0,
        seed=0,
        tokens=tokens,
        mask=mask,
        sampler_logprobs=tuple(-1.0 if bit else None for bit in mask),
        prompt_length=len(PROMPT),
        spans=((5, 8), (10, 13)),
        messages=(),
        ended_by="user_stop",
        turns=2,
        reward=0.0,
        grade={},
    )
    teacher = TeacherScores(tuple(-1.0 if bit else None for bit in mask), True, None, 0, len(CONTEXT), CONTEXT)
    return Rollout(trajectory, Judged(None, 1, first_try_parsed=True), teacher)


async def by_the_service(folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    """The gradient of every LoRA B, read from what an Adam step without memory saved; A; the facts."""
    server = start(model_gradients.MODEL, state_dir=folder)
    try:
        async with connect(server.base_url, server.api_key) as backend:
            trainer = await backend.training(server.model_name, rank=4, seed=0)
            sampler = await trainer.snapshot("now")
            datums, _, facts = await logit_datums([rollout()], [0], sampler, sampler, k=K)
            await trainer.forward_backward(datums, "cross_entropy")
            huge = model_gradients.HUGE
            await trainer.optim_step(huge, beta1=0.0, beta2=0.0, eps=huge)
            run, kind, name = (await trainer.save("gradient")).removeprefix("tinker://").split("/")
    finally:
        server.stop()
    tensors = load_file(folder / run / kind / name / "adapter.safetensors")
    moved = [-tensors[key].double().flatten() for key in sorted(tensors) if key.endswith(model_gradients.B)]
    lora_a = {key.removesuffix(model_gradients.A): t for key, t in tensors.items() if key.endswith(model_gradients.A)}
    return torch.cat(moved), lora_a, facts


def by_the_reference(lora_a: dict[str, torch.Tensor]) -> torch.Tensor:
    """d loss / d student logits of the float64 reference, taken back through the same model by autograd."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(resolve(model_gradients.MODEL).folder), dtype=torch.float32)
    lora_b = model_gradients._adapt(model.eval(), lora_a)
    student = model(input_ids=torch.tensor([(*PROMPT, *REST)])).logits[0, len(PROMPT) - 1 : -1]
    teacher = model(input_ids=torch.tensor([(*CONTEXT, *REST)])).logits[0, len(CONTEXT) - 1 : -1].detach()
    gradient = reference.logit_loss_grad(
        student.detach().double().numpy()[None],
        teacher.double().numpy()[None],
        np.asarray([MASK]),
        divergence="reverse_kl",
        top_k=K,
        tail=True,
        aggregation="token_sum",
    )[0]
    upstream = torch.from_numpy(np.asarray(gradient)).float()
    parts = torch.autograd.grad(student, list(lora_b.values()), grad_outputs=upstream)
    named = dict(zip(lora_b, parts, strict=True))
    return torch.cat([named[name].double().flatten() for name in sorted(named)])


def test_the_gradient_is_the_references(tmp_path: Path) -> None:
    served, lora_a, facts = asyncio.run(by_the_service(tmp_path))
    expected = by_the_reference(lora_a)
    assert facts == {"logit_frac_tail_dropped": 0.0, "logit_top_k": K}
    assert float(expected.abs().max()) > 1e-3
    cosine = float(served @ expected / (served.norm() * expected.norm()))
    assert cosine > 0.99999
    torch.testing.assert_close(served, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.usefixtures("lean")
def test_an_arm_of_this_kind_trains(run_spec: Any, at_tiny: Any, tiny_server: Running, tmp_path: Path) -> None:
    spec = small_at_a_service()
    spec["arms"][1] |= {"kind": "sdpo_logit", "top_k": K}
    at_tiny(tiny_server.base_url)
    run_spec(spec, until="activation_pilot")
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "activation_pilot"]
    assert [line.get("logit_top_k") for line in lines] == [None, K, None, K]
    assert all(line["logit_frac_tail_dropped"] == 0 for line in lines if line["arm"] == "sdpo_token")
    assert all(line["loss"] for line in lines if line["arm"] == "sdpo_token")
