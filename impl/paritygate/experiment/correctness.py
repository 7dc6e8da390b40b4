"""The correctness preflight: parity green for this tree, both advantage paths against recorded numbers and a model."""

import importlib.util
from typing import Any

import torch

from paritygate.backend import Datum, policy_gradient_datum
from paritygate.errors import Refused
from paritygate.experiment.advantages import Scores, group_advantages
from paritygate.experiment.compare import Comparison, compare_values, recorded
from paritygate.experiment.journal import Record
from paritygate.experiment.model_gradients import Sequence_, through_server, through_torch
from paritygate.experiment.state import Decided, State
from paritygate.losses import policy_gradient
from paritygate.receipts import ParityReceipt, canonical, guard, write_atomic
from paritygate.spec.experiment import CorrectnessPath

GRADIENT = "gradient through the embedded model"
EXPECTED = {"grpo_via_new_advantage_path", "sdpo_token_advantage"}


async def correctness_preflight(state: State) -> Decided:
    """Raises Refused (exit 3) unless parity holds and every comparison is within the spec's tolerances."""
    receipt = await show_parity(state)
    write_atomic(state.directory / receipt.path.name, canonical(receipt.statement))
    comparisons: list[Comparison] = []
    for path in state.exp.correctness_preflight.paths:
        if path.id not in EXPECTED:
            raise Refused(f"correctness path {path.id!r} is not one that this version can check: {sorted(EXPECTED)}.")
        state.progress.update(path.id)
        check = grpo_path if path.id == "grpo_via_new_advantage_path" else sdpo_path
        comparisons += check(path)
        comparisons += await model_comparisons(path)
    failed = [comparison for comparison in comparisons if not comparison.passed]
    if failed:
        raise Refused(f"correctness preflight, {failed[0].sentence()}; the run does not start.")
    facts: Record = {
        "parity": receipt.sha256,
        "obligations": _covered(receipt, state.exp.losses),
        "comparisons": [comparison.to_json() for comparison in comparisons],
        "cookbook": "live and recorded"
        if cookbook_installed()
        else "recorded numbers (tinker-cookbook is not installed)",
    }
    return Decided(
        f"parity holds for {', '.join(state.exp.losses)}; {len(comparisons)} comparisons on both paths pass",
        f"{receipt.path.name} fits this tree; losses and gradients agree; cookbook: {facts['cookbook']}",
        facts,
        [receipt.path.name],
    )


async def show_parity(state: State) -> ParityReceipt:
    """The guard: for a run against a service parity is shown again by a pytest subprocess, else its receipt is read."""
    import asyncio
    import os

    options = state.options
    full_run = bool(os.environ.get("TINKER_BASE_URL"))
    return await asyncio.to_thread(
        guard,
        options.root,
        state.exp.losses,
        options.device,
        full_run=full_run,
        trust_receipt=options.trust_receipt,
        say=state.progress.line,
    )


def grpo_path(path: CorrectnessPath) -> list[Comparison]:
    """Our advantages, datums, loss and gradient against the cookbook's: recorded always, live when installed."""
    numbers = recorded("cookbook")
    found: list[Comparison] = []
    for index, case in enumerate(numbers["compute_advantages"]):
        if max(case["rewards"]) > 1:
            continue  # composites lie in [0, 1]; at 1e8 the cookbook's float32 loses what our float64 keeps
        where = f"compute_advantages case {index}"
        found.append(compare_values(path, "baseline_gradient", where, grpo_rows(case["rewards"]), case["advantages"]))
    found += _datum_comparisons(path, numbers["assemble_training_data"])
    found += _loss_comparisons(path, numbers["importance_sampling"])
    if cookbook_installed():
        from paritygate.experiment.cookbook import live_advantages

        for rewards in ([1.0, 0.0, 0.25], [2 / 3, 1.0, 1 / 3, 1 / 3], [0.5, 0.5]):
            live = live_advantages(rewards)
            found.append(compare_values(path, "baseline_gradient", f"live {rewards}", grpo_rows(rewards), live))
    return found


def grpo_rows(rewards: list[float], kind: str = "grpo", weight: float = 0.9) -> list[float]:
    """The advantage of each rollout's one assistant token, by the path that training takes."""
    group = [Scores(reward, [0, 1], [None, -1.0], [None, -2.0]) for reward in rewards]
    return [row[1] for row in group_advantages(kind, group, hybrid_weight=weight)]


def sdpo_path(path: CorrectnessPath) -> list[Comparison]:
    """Our token advantages against the float64 reference's numbers and, with SDPO disabled, against stock GRPO's."""
    found: list[Comparison] = []
    for index, case in enumerate(recorded("sdpo_token")["token_advantage"]):
        scores = Scores(0.5, case["mask"], case["student_logprobs"], case["teacher_logprobs"])
        [row] = group_advantages("sdpo_token", [scores], clip=case["clip"])
        where = f"token_advantage case {index}"
        found.append(compare_values(path, "reference_gradient", where, row, case["advantages"]))
    for index, case in enumerate(recorded("cookbook")["compute_advantages"]):
        if max(case["rewards"]) <= 1:
            rows = grpo_rows(case["rewards"], "hybrid", weight=1.0)
            where = f"SDPO disabled, compute_advantages case {index}"
            found.append(compare_values(path, "baseline_gradient", where, rows, case["advantages"]))
    return found


async def model_comparisons(path: CorrectnessPath) -> list[Comparison]:
    """Loss and gradient of every LoRA B through the embedded server against float64 terms through the same model."""
    sequences = model_batch(path.id)
    served, lora_a = await through_server([sequence.datum() for sequence in sequences])
    expected = through_torch(sequences, lora_a)
    which = "baseline" if path.id.startswith("grpo") else "reference"
    return [
        compare_values(path, f"{which}_loss", "loss through the embedded model", [served.loss], [expected.loss]),
        compare_values(
            path, f"{which}_gradient", "gradient through the embedded model", served.gradient, expected.gradient
        ),
    ]


def model_batch(path_id: str) -> list[Sequence_]:
    """Four fixed token sequences of one group with sampler logprobs off the policy, and the path's advantages."""
    generator = torch.Generator().manual_seed(20)
    composites = [1.0, 2 / 3, 1 / 3, 2 / 3]
    groups: list[Scores] = []
    tokens: list[list[int]] = []
    for length, composite in zip((12, 17, 9, 24), composites, strict=True):
        tokens.append(torch.randint(3, 250, (length,), generator=generator).tolist())
        mask = [0, 0, 0] + [int(t % 5 != 4) for t in range(3, length)]
        sampler = (-5.5 + 0.4 * torch.randn(length, generator=generator)).tolist()
        shifts = torch.randn(length, generator=generator).tolist()
        teacher = [value + shift for value, shift in zip(sampler, shifts, strict=True)]
        groups.append(Scores(composite, mask, sampler, teacher))
    kind = "grpo" if path_id.startswith("grpo") else "sdpo_token"
    rows = group_advantages(kind, groups)
    return [Sequence_(t, s.mask, s.sampler_logprobs, row) for t, s, row in zip(tokens, groups, rows, strict=True)]


def _datum_comparisons(path: CorrectnessPath, case: dict[str, Any]) -> list[Comparison]:
    """The wire's lists for trajectories that extend their prefix (ours always do), without a mask as upstream's."""
    found: list[Comparison] = []
    for index, trajectory in enumerate(case["trajectories"][:2]):
        tokens, mask, logprobs = _flattened(trajectory)
        advantages = [case["advantages"][index] * bit for bit in mask]
        datum = policy_gradient_datum(tokens, mask, logprobs, advantages)
        for name in ("target_tokens", "logprobs", "advantages"):
            where = f"assemble_training_data {name} of trajectory {index}"
            ours, theirs = _numbers(datum, name), case["datums"][index][name]
            found.append(compare_values(path, "baseline_gradient", where, ours, theirs))
    return found


def _loss_comparisons(path: CorrectnessPath, cases: list[dict[str, Any]]) -> list[Comparison]:
    found: list[Comparison] = []
    for index, case in enumerate(cases):
        rows = (case["target_logprobs"], case["sampling_logprobs"], case["advantages"])
        logprobs, sampler, advantages = (torch.tensor(row, dtype=torch.float64) for row in rows)
        loss = policy_gradient.importance_sampling_loss(logprobs, sampler, advantages)
        gradient = policy_gradient.importance_sampling_grad(logprobs, sampler, advantages)
        where = f"importance_sampling case {index}"
        found.append(compare_values(path, "baseline_loss", where, [float(loss)], [case["loss_sum"]]))
        found.append(compare_values(path, "baseline_gradient", where, gradient.tolist(), case["grad_logprobs"]))
    return found


def _flattened(trajectory: list[dict[str, Any]]) -> tuple[list[int], list[int], list[float | None]]:
    """One growing token list of a cookbook trajectory: each observation repeats all before it."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float | None] = []
    for transition in trajectory:
        new = transition["ob"][len(tokens) :]
        tokens += [*new, *transition["ac"]]
        mask += [0] * len(new) + [1] * len(transition["ac"])
        logprobs += [None] * len(new) + transition["logprobs"]
    return tokens, mask, logprobs


def _numbers(datum: Datum, name: str) -> list[float]:
    return [float(value) for value in datum.inputs[name] if not isinstance(value, list)]


def _covered(receipt: ParityReceipt, losses: tuple[str, ...]) -> Record:
    """How often each obligation of the arms' losses was compared, from the receipt."""
    obligations = receipt.part("obligations")
    return {name: value for name, value in obligations.items() if name.partition("/")[0] in losses}


def cookbook_installed() -> bool:
    """Whether tinker-cookbook can be imported here; it is never required."""
    return importlib.util.find_spec("tinker_cookbook") is not None
