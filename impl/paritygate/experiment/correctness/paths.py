"""Both advantage paths against recorded numbers and the live cookbook."""

import importlib.metadata
import math
from collections.abc import Sequence
from typing import Any

import torch

from paritygate.backend import Datum, policy_gradient_datum
from paritygate.experiment.correctness.comparison import Comparison, compare_values, recorded
from paritygate.experiment.step.advantages import group_advantages
from paritygate.losses import policy_gradient
from paritygate.spec.experiment import CorrectnessPath
from paritygate.spec.pins import COOKBOOK

FAR = 1e3  # nats: a clip that nothing here reaches


def grpo_path(path: CorrectnessPath) -> list[Comparison]:
    """Our advantages, datums, loss and gradient against the cookbook's: recorded always, live when installed."""
    numbers = recorded("cookbook")
    comparisons: list[Comparison] = []
    for index, case in enumerate(numbers["compute_advantages"]):
        if max(case["rewards"]) > 1:
            continue  # composites lie in [0, 1]; at 1e8 the cookbook's float32 loses what our float64 keeps
        where, ours = f"compute_advantages case {index}", grpo_rows(case["rewards"])
        comparisons.append(compare_values(path, "baseline_gradient", where, ours, case["advantages"]))
    comparisons += _datum_comparisons(path, numbers["assemble_training_data"])
    for revision in ("baseline", "reference"):  # of this path both are the cookbook, each with its own tolerances
        comparisons += _loss_comparisons(path, revision, numbers["importance_sampling"])
    if cookbook_installed():
        from paritygate.experiment.correctness.cookbook import live_advantages

        for rewards in ([1.0, 0.0, 0.25], [2 / 3, 1.0, 1 / 3, 1 / 3], [0.5, 0.5]):
            live = live_advantages(rewards)
            comparisons.append(compare_values(path, "baseline_gradient", f"live {rewards}", grpo_rows(rewards), live))
    return comparisons


def one_token_advantages(rewards: Sequence[float], kind: str, hybrid_weight: float) -> list[float]:
    """The advantage of each rollout's one assistant token, by the path that training takes."""
    count = len(rewards)
    student, teacher = [[None, -1.0]] * count, [[None, -2.0]] * count
    rows = group_advantages(kind, rewards, [[0, 1]] * count, student, teacher, clip=1.0, hybrid_weight=hybrid_weight)
    return [row[1] for row in rows]


def grpo_rows(rewards: Sequence[float]) -> list[float]:
    """GRPO's advantages of a group with these rewards; neither clip nor hybrid weight enters them."""
    return one_token_advantages(rewards, "grpo", hybrid_weight=0.0)


def sdpo_path(path: CorrectnessPath) -> list[Comparison]:
    """Our token advantages against the float64 reference's numbers and, with SDPO disabled, against stock GRPO's."""
    comparisons: list[Comparison] = []
    for index, case in enumerate(recorded("sdpo_token")["token_advantage"]):
        student, teacher = case["student_logprobs"], case["teacher_logprobs"]
        [row] = group_advantages(
            "sdpo_token", [0.5], [case["mask"]], [student], [teacher], clip=case["clip"], hybrid_weight=0.0
        )
        where = f"token_advantage case {index}"
        comparisons.append(compare_values(path, "reference_gradient", where, row, case["advantages"]))
    for index, case in enumerate(recorded("cookbook")["compute_advantages"]):
        if max(case["rewards"]) <= 1:
            rows = one_token_advantages(case["rewards"], "hybrid", hybrid_weight=1.0)
            where = f"SDPO disabled, compute_advantages case {index}"
            comparisons.append(compare_values(path, "baseline_gradient", where, rows, case["advantages"]))
            comparisons.append(_stock_loss(path, where, rows, case["advantages"]))
    return comparisons + _official_comparisons(path)


def _stock_loss(path: CorrectnessPath, where: str, rows: list[float], stock: list[float]) -> Comparison:
    """The importance-sampling loss of these advantages on fixed logprobs, against its terms with the stock ones."""
    logprobs = [-1.0 - 0.25 * index for index in range(len(rows))]
    sampled = [-1.5 + 0.125 * index for index in range(len(rows))]
    ours = policy_gradient.importance_sampling_loss(
        *(torch.tensor(row, dtype=torch.float64) for row in (logprobs, sampled, rows))
    )
    terms = [-math.exp(p - q) * a for p, q, a in zip(logprobs, sampled, stock, strict=True)]
    return compare_values(path, "baseline_loss", where, [float(ours)], [math.fsum(terms)])


def _official_comparisons(path: CorrectnessPath) -> list[Comparison]:
    """Our token advantages as the loss of the official code (sampled tokens, mean over tokens) and its gradient."""
    case = recorded("sdpo_official")
    masks, students, teachers = case["mask"], case["student_logprobs"], case["teacher_logprobs"]
    rows = group_advantages("sdpo_token", [0.5] * len(masks), masks, students, teachers, clip=FAR, hybrid_weight=0.0)
    tokens = sum(map(sum, masks))
    gradient = [-value / tokens for row in rows for value in row]
    loss = math.fsum(g * s for g, s in zip(gradient, (s for row in students for s in row), strict=True))
    theirs = [value for row in case["gradient"] for value in row]
    return [
        compare_values(path, "reference_loss", "the official code's sampled-token loss", [loss], [case["loss"]]),
        compare_values(path, "reference_gradient", "the official code's gradient", gradient, theirs),
    ]


def _datum_comparisons(path: CorrectnessPath, case: dict[str, Any]) -> list[Comparison]:
    """The wire's lists for trajectories that extend their prefix (ours always do), without a mask as upstream's."""
    comparisons: list[Comparison] = []
    for index, trajectory in enumerate(case["trajectories"][:2]):
        tokens, mask, logprobs = _flattened(trajectory)
        advantages = [case["advantages"][index] * bit for bit in mask]
        datum = policy_gradient_datum(tokens, mask, logprobs, advantages)
        for name in ("target_tokens", "logprobs", "advantages"):
            where = f"assemble_training_data {name} of trajectory {index}"
            ours, theirs = _numbers(datum, name), case["datums"][index][name]
            comparisons.append(compare_values(path, "baseline_gradient", where, ours, theirs))
    return comparisons


def _loss_comparisons(path: CorrectnessPath, revision: str, cases: list[dict[str, Any]]) -> list[Comparison]:
    comparisons: list[Comparison] = []
    for index, case in enumerate(cases):
        rows = (case["target_logprobs"], case["sampling_logprobs"], case["advantages"])
        logprobs, sampler, advantages = (torch.tensor(row, dtype=torch.float64) for row in rows)
        loss = policy_gradient.importance_sampling_loss(logprobs, sampler, advantages)
        gradient = policy_gradient.importance_sampling_grad(logprobs, sampler, advantages)
        where = f"importance_sampling case {index}"
        comparisons.append(compare_values(path, f"{revision}_loss", where, [float(loss)], [case["loss_sum"]]))
        comparisons.append(
            compare_values(path, f"{revision}_gradient", where, gradient.tolist(), case["grad_logprobs"])
        )
    return comparisons


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


def cookbook_installed() -> bool:
    """Whether the pinned version of tinker-cookbook is installed; it is never required, and no other counts."""
    try:
        return importlib.metadata.version("tinker-cookbook") == COOKBOOK.revision.partition("==")[2]
    except importlib.metadata.PackageNotFoundError:
        return False
