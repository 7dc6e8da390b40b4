"""Functions of rewards (G,) and of the log-probabilities of sampled tokens (B, T), and what hurts them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from paritygate.harness.conformance.functions import (
    Arrays,
    Function,
    Keywords,
    Option,
    Outputs,
    Refused,
    Stress,
    reference,
)

POLICY = ("logprobs", "sampler_logprobs", "advantages")


def rewards(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """A group of 3 to 8 rewards."""
    return {"rewards": np.round(rng.normal(size=int(rng.integers(3, 9))), 3)}


def group_mean(arrays: Arrays, keywords: Keywords) -> Outputs:
    """Advantages by the reference."""
    return Outputs(reference("grpo").group_mean_advantage(arrays["rewards"]), None)


def policy_draw(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Off policy, advantages of both signs; gspo's mask is 1 at every second token at least."""
    shape = (int(rng.integers(1, 4)), int(rng.integers(2, 6)))
    sampler = -rng.exponential(2.0, size=shape)
    arrays: Arrays = {
        "logprobs": np.minimum(sampler + rng.normal(size=shape) * 0.4, -1e-3),
        "sampler_logprobs": sampler,
        "advantages": rng.normal(size=shape),
    }
    if "mask" in keywords.get("needs", ()):
        mask = np.ones(shape, dtype=np.int64)
        mask[:, 1::2] = rng.integers(0, 2, size=mask[:, 1::2].shape)
        arrays["sequence_ratio_mask"] = mask
        arrays["advantages"] = arrays["advantages"] * mask
    return arrays


def by_rows(module: str, name: str, arguments: tuple[str, ...]) -> Callable[[Arrays, Keywords], Outputs]:
    """Value and gradient of a loss whose batch is the sum of its sequences."""

    def define(arrays: Arrays, keywords: Keywords) -> Outputs:
        loss, grad = (getattr(reference(module), f"{name}_{what}") for what in ("loss", "grad"))
        rows = list(zip(*(arrays[argument] for argument in arguments), strict=True))
        value = math.fsum(loss(*row, **keywords) for row in rows)
        return Outputs(np.asarray(value), np.stack([grad(*row, **keywords) for row in rows]))

    return define


def far(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """A log ratio of 30 at a token of negative advantage, which no clipping from above stops."""
    arrays = policy_draw(rng, keywords)
    arrays["sampler_logprobs"][0, 0], arrays["logprobs"][0, 0], arrays["advantages"][0, 0] = -31.0, -1.0, -1.0
    return arrays


def is_far(arrays: Arrays, keywords: Keywords) -> bool:
    """Some log ratio of more than 25."""
    return bool((arrays["logprobs"] - arrays["sampler_logprobs"] > 25.0).any())


def unread(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """NaN where the advantage is 0: what is not an action is not read."""
    arrays = policy_draw(rng, keywords)
    arrays["advantages"][0, -1] = 0.0
    hidden = arrays["advantages"] == 0.0
    if "sequence_ratio_mask" in arrays:
        arrays["sequence_ratio_mask"][hidden] = 0
    arrays["logprobs"][hidden] = arrays["sampler_logprobs"][hidden] = np.nan
    return arrays


def is_unread(arrays: Arrays, keywords: Keywords) -> bool:
    """NaN somewhere, and an advantage of 0 wherever it is."""
    hidden = np.isnan(arrays["logprobs"])
    return bool(hidden.any() and (arrays["advantages"][hidden] == 0.0).all())


POLICY_STRESSES = (
    Stress("masked NaN", unread, is_unread),
    Stress("large log ratio", far, is_far),
    Stress("half precision", policy_draw, lambda _, __: True, ("float16", "bfloat16"), (3e-2, 3e-2)),
)


def policy(name: str, keywords: dict[str, Any], label: str, mask: bool = False) -> Function:
    """A policy loss, under bounds that are given."""
    arguments = (*POLICY, "sequence_ratio_mask") if mask else POLICY
    one = {argument: np.full((1, 1), -1.0) for argument in POLICY} | (
        {"sequence_ratio_mask": np.ones((1, 1), dtype=np.int64)} if mask else {}
    )
    needs: dict[str, Any] = {"needs": ("mask",)} if mask else {}
    stresses = tuple(
        Stress(
            stress.name, bound(stress.make, needs), stress.inside, stress.dtypes, stress.tolerance, stress.zero_is_fine
        )
        for stress in POLICY_STRESSES
        if not (name == "dro" and stress.name == "masked NaN")  # dro reads tokens of advantage 0
    )
    return Function(
        f"policy_gradient.{name}_loss",
        dict.fromkeys(arguments, "BT"),
        "logprobs",
        (Option(label, keywords),),
        bound(policy_draw, needs),
        by_rows("policy_gradient", name, arguments),
        lambda arrays: all(
            bool((array[~np.isnan(array)] <= 0.0).all()) for array in (arrays["logprobs"], arrays["sampler_logprobs"])
        ),
        stresses,
        (
            Refused("NaN at a token that is read", {**one, "logprobs": np.array([[np.nan]])}, keywords),
            Refused("an advantage of NaN", {**one, "advantages": np.array([[np.nan]])}, keywords),
            Refused("shapes that differ", {**one, "advantages": np.ones((1, 2))}, keywords),
        ),
    )


def bound(make: Callable[[np.random.Generator, Keywords], Any], needs: Keywords) -> Any:
    """`make` with what the function needs besides the option's keywords."""
    return lambda rng, keywords: make(rng, {**keywords, **needs})


def advantage_draw(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Teacher and student log-probabilities of sampled tokens, a mask with a token in each sequence."""
    shape = (int(rng.integers(1, 4)), int(rng.integers(2, 6)))
    student = -rng.exponential(2.0, size=shape)
    teacher = np.minimum(student + rng.normal(size=shape), -1e-3)
    mask = (rng.random(shape) < 0.7).astype(np.int64)
    mask[:, 0] = 1
    return {"teacher_logprobs": teacher, "student_logprobs": student, "mask": mask}


def advantages(name: str) -> Callable[[Arrays, Keywords], Outputs]:
    """SDPO's token or sequence advantage by the reference, sequence by sequence."""

    def define(arrays: Arrays, keywords: Keywords) -> Outputs:
        function = getattr(reference("sdpo"), name)
        rows = zip(arrays["teacher_logprobs"], arrays["student_logprobs"], arrays["mask"], strict=True)
        return Outputs(np.stack([function(*row, **keywords) for row in rows]), None)

    return define


def advantage_nan(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """NaN where the mask is 0."""
    arrays = advantage_draw(rng, keywords)
    arrays["mask"][0, -1] = 0
    hidden = arrays["mask"] == 0
    arrays["teacher_logprobs"][hidden] = arrays["student_logprobs"][hidden] = np.nan
    return arrays


def advantage(name: str, options: tuple[Option, ...]) -> Function:
    """SDPO's advantages."""
    one = {"teacher_logprobs": np.full((1, 1), -1.0), "student_logprobs": np.full((1, 1), -1.0)}
    mask = np.ones((1, 1), dtype=np.int64)

    def inside(arrays: Arrays) -> bool:
        used = arrays["mask"] == 1
        return all(bool((arrays[who][used] <= 0.0).all()) for who in one)

    def empty(rng: np.random.Generator, keywords: Keywords) -> Arrays:
        arrays = advantage_draw(rng, keywords)
        arrays["mask"][0] = 0
        return arrays

    return Function(
        f"sdpo.{name}",
        {"teacher_logprobs": "BT", "student_logprobs": "BT", "mask": "BT"},
        None,
        options,
        advantage_draw,
        advantages(name),
        inside,
        (
            Stress(
                "masked NaN",
                advantage_nan,
                lambda arrays, _: bool(np.isnan(arrays["student_logprobs"][arrays["mask"] == 0]).any()),
            ),
            Stress("empty row", empty, lambda arrays, _: not (arrays["mask"] == 1).any(1).all()),
            Stress("half precision", advantage_draw, lambda _, __: True, ("float16", "bfloat16")),
        ),
        (
            Refused("a student of -inf", {**one, "student_logprobs": np.full((1, 1), -np.inf), "mask": mask}, {}),
            Refused(
                "NaN at a token that is read", {**one, "teacher_logprobs": np.full((1, 1), np.nan), "mask": mask}, {}
            ),
            Refused("a mask of 2", {**one, "mask": 2 * mask}, {}),
        ),
    )


def large_rewards(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Around 1e8 and one apart: float32 has steps of 8 there."""
    return {"rewards": 1e8 + np.arange(-1.0, 2.0)}


GROUP_MEAN = Function(
    "grpo.group_mean_advantage",
    {"rewards": "G"},
    None,
    (Option("centred", {}),),
    rewards,
    group_mean,
    lambda arrays: bool(np.isfinite(arrays["rewards"]).all()),
    (
        Stress("group of one", lambda _, __: {"rewards": np.ones(1)}, lambda arrays, _: arrays["rewards"].size == 1),
        Stress("equal rewards", lambda _, __: {"rewards": np.full(3, 0.1)}, lambda a, _: np.ptp(a["rewards"]) == 0),
        Stress(
            "large rewards",
            large_rewards,
            lambda arrays, _: bool(np.ptp(arrays["rewards"]) > 0 and (np.abs(arrays["rewards"]) > 9e7).all()),
        ),
    ),
    (
        Refused("an empty group", {"rewards": np.zeros(0)}, {}),
        Refused("a reward of NaN", {"rewards": np.array([np.nan, 1.0])}, {}),
        Refused("a reward of +inf", {"rewards": np.array([np.inf, 1.0])}, {}),
    ),
)


def sampled_pair(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Log-probabilities of sampled tokens by the policy and by a reference, some tenths of a nat apart."""
    shape = (int(rng.integers(1, 4)), int(rng.integers(2, 6)))
    logprobs = -rng.exponential(2.0, size=shape) - 1e-3
    return {"logprobs": logprobs, "reference_logprobs": np.minimum(logprobs + 0.5 * rng.normal(size=shape), -1e-3)}


def estimated(name: str) -> Callable[[Arrays, Keywords], Outputs]:
    """An estimator's values (B, T) by the reference, and their derivatives in the policy's log-probabilities."""

    def define(arrays: Arrays, keywords: Keywords) -> Outputs:
        mask = arrays.get("mask", np.ones(arrays["logprobs"].shape, dtype=np.int64))
        rows = list(zip(arrays["logprobs"], arrays["reference_logprobs"], mask, strict=True))
        value, grad = (getattr(reference("kl_estimators"), f"{name}{what}") for what in ("", "_grad"))
        return Outputs(np.stack([value(*row) for row in rows]), np.stack([grad(*row) for row in rows]))

    return define


def log_ratio_between(low: float, high: float) -> Callable[[Arrays, Keywords], bool]:
    """Whether the largest log ratio of a token is at least `low` and at most `high`, in size."""

    def still(arrays: Arrays, keywords: Keywords) -> bool:
        largest = np.abs(arrays["logprobs"] - arrays["reference_logprobs"]).max()
        return bool(low <= largest <= high)

    return still


def moved(distance: float) -> Callable[[np.random.Generator, Keywords], Arrays]:
    """The reference `distance` nats above the policy at the first token, at the others as near as in `sampled_pair`."""

    def make(rng: np.random.Generator, keywords: Keywords) -> Arrays:
        arrays = sampled_pair(rng, keywords)
        if distance < 1.0:
            arrays["reference_logprobs"] = arrays["logprobs"] - distance
        else:
            arrays["logprobs"][0, 0], arrays["reference_logprobs"][0, 0] = -1.0 - distance, -1.0
        return arrays

    return make


def hidden_pair(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """NaN where the mask is 0."""
    arrays = sampled_pair(rng, keywords)
    mask = np.ones(arrays["logprobs"].shape, dtype=np.int64)
    mask[0, -1] = 0
    arrays["logprobs"][mask == 0] = arrays["reference_logprobs"][mask == 0] = np.nan
    return arrays | {"mask": mask}


def estimator(name: str) -> Function:
    """An estimator of KL(p || q), token by token; its sum is differentiated."""
    one = {"logprobs": np.full((1, 1), -1.0), "reference_logprobs": np.full((1, 1), -1.0)}
    return Function(
        f"kl_estimators.{name}",
        {"logprobs": "BT", "reference_logprobs": "BT", "mask": "BT"},
        "logprobs",
        (Option("each token", {}),),
        sampled_pair,
        estimated(name),
        lambda arrays: all(
            bool((array[arrays.get("mask", np.ones_like(array)) == 1] <= 0.0).all())
            for array in (arrays["logprobs"], arrays["reference_logprobs"])
        ),
        (
            Stress(
                "masked NaN",
                hidden_pair,
                lambda arrays, _: bool(np.isnan(arrays["logprobs"][arrays["mask"] == 0]).any()),
            ),
            Stress("large log ratio", moved(30.0), log_ratio_between(25.0, 40.0)),
            Stress("near-equal", moved(1e-4), log_ratio_between(1e-5, 1e-2), ("float32",), (1e-2, 1e-12)),
            Stress("half precision", sampled_pair, lambda _, __: True, ("float16", "bfloat16"), (3e-2, 3e-2)),
        ),
        (
            Refused("NaN at a token that is read", {**one, "logprobs": np.full((1, 1), np.nan)}, {}),
            Refused("a reference of -inf", {**one, "reference_logprobs": np.full((1, 1), -np.inf)}, {}),
            Refused("shapes that differ", {**one, "reference_logprobs": np.full((1, 2), -1.0)}, {}),
        ),
        frozenset({"mask"}),
    )


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
FUNCTIONS = (
    GROUP_MEAN,
    policy("importance_sampling", {}, "sum"),
    policy("ppo", CLIP, "clip 0.8 to 1.2"),
    policy("cispo", CLIP, "clip 0.8 to 1.2"),
    policy("dro", {"beta": 0.05}, "beta 0.05"),
    policy("gspo", CLIP, "clip 0.8 to 1.2", mask=True),
    advantage("token_advantage", (Option("clip 5", {"clip": 5.0}), Option("unclipped", {"clip": math.inf}))),
    advantage("sequence_advantage", (Option("mean", {}),)),
    *map(estimator, ("k1", "k2", "k3", "surrogate")),
)
