"""Losses of packed actions (N,): three-level averaging and SPOD, and what hurts them."""

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

INDICES = ("action_index", "episode_index")


def levels(rng: np.random.Generator) -> Arrays:
    """1 to 3 episodes of 1 to 3 actions of 1 to 3 tokens: `action_index` (N,), `episode_index` (A,)."""
    actions = rng.integers(1, 4, size=int(rng.integers(1, 4)))
    tokens = rng.integers(1, 4, size=int(actions.sum()))
    return {
        "action_index": np.repeat(np.arange(tokens.size), tokens),
        "episode_index": np.repeat(np.arange(actions.size), actions),
    }


def are_levels(arrays: Arrays) -> bool:
    """Both indices nondecreasing from 0 without a gap, and as long as what they name."""
    action, episode = (arrays[name] for name in INDICES)
    if not action.size or not episode.size or action[-1] + 1 != episode.size:
        return False
    return all(index[0] == 0 and bool(np.isin(np.diff(index), (0, 1)).all()) for index in (action, episode))


def nested(arrays: Arrays, rows: Any) -> list[list[Any]]:
    """`rows` (N, ...) as the reference has them: episode by episode, action by action."""
    action, episode = (arrays[name] for name in INDICES)
    return [[rows[action == a] for a in np.flatnonzero(episode == e)] for e in range(int(episode[-1]) + 1)]


def averaged(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Values of both signs of tokens in actions in episodes."""
    indices = levels(rng)
    return {"values": rng.normal(size=indices["action_index"].size), **indices}


def average(arrays: Arrays, keywords: Keywords) -> Outputs:
    """The mean by the reference; it is linear, so its gradient are its values at the unit vectors."""
    mean = reference("averaging").three_level_mean
    units = [mean(nested(arrays, unit)) for unit in np.eye(arrays["values"].size)]
    return Outputs(np.asarray(mean(nested(arrays, arrays["values"]))), np.asarray(units))


def outlier(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """One token of 1e6 beside others of order one: how much it weighs is the whole answer."""
    arrays = averaged(rng, keywords)
    arrays["values"][0] = 1e6
    return arrays


AVERAGE = Function(
    "averaging.three_level_mean",
    {"values": "N", "action_index": "N", "episode_index": "A"},
    "values",
    (Option("tokens, actions, episodes", {}),),
    averaged,
    average,
    lambda arrays: are_levels(arrays) and bool(np.isfinite(arrays["values"]).all()),
    (
        Stress("outlier", outlier, lambda arrays, _: bool((arrays["values"] >= 1e5).any())),
        Stress("half precision", averaged, lambda _, __: True, ("float16", "bfloat16")),
    ),
    (
        Refused(
            "an action without a token",
            {"values": np.ones(2), "action_index": np.array([0, 2]), "episode_index": np.zeros(3, dtype=np.int64)},
            {},
        ),
        Refused(
            "an episode without an action",
            {"values": np.ones(2), "action_index": np.array([0, 1]), "episode_index": np.array([0, 2])},
            {},
        ),
    ),
)

LOGITS = ("student_logits", "teacher_logits")


def batch(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Logits (N, V) of order one, sampled tokens, episodes of which about half succeeded."""
    indices, vocabulary = levels(rng), int(rng.choice([3, 4, 6]))
    tokens, episodes = indices["action_index"].size, int(indices["episode_index"][-1]) + 1
    return {
        **{name: rng.normal(size=(tokens, vocabulary)) for name in LOGITS},
        "actions": rng.integers(0, vocabulary, size=tokens),
        **indices,
        "success": rng.random(episodes) < 0.6,
    }


def by_reference(arrays: Arrays, keywords: Keywords) -> Outputs:
    """Loss and gradient in the student's logits by the reference."""
    spod = reference("spod")
    columns = [nested(arrays, arrays[name]) for name in (*LOGITS, "actions")]
    episodes = [
        {
            "success": bool(success),
            "actions": [
                {"student_logits": student, "teacher_logits": teacher, "tokens": tokens}
                for student, teacher, tokens in zip(*actions, strict=True)
            ],
        }
        for success, *actions in zip(arrays["success"], *columns, strict=True)
    ]
    loss = spod.success_preserving_loss(episodes, **keywords).loss
    gradients = spod.success_preserving_grad(episodes, **keywords)
    return Outputs(np.asarray(loss), np.concatenate([row for episode in gradients for row in episode]))


def inside(arrays: Arrays) -> bool:
    """Levels that fit, tokens of the vocabulary, rows with a finite entry in common, no NaN, no +inf."""
    student, teacher = (arrays[name] for name in LOGITS)
    actions, vocabulary = arrays["actions"], student.shape[-1]
    fits = are_levels(arrays) and arrays["success"].size == int(arrays["episode_index"][-1]) + 1
    if not fits or vocabulary < 2 or actions.min() < 0 or actions.max() >= vocabulary:
        return False
    if any(np.isnan(rows).any() or (rows == np.inf).any() for rows in (student, teacher)):
        return False
    sampled = student[np.arange(actions.size), actions]
    return bool(np.isfinite(sampled).all() and (np.isfinite(student) & np.isfinite(teacher)).any(-1).all())


def tie(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """The teacher is the student, in episodes that succeeded: a tie protects nothing, and the KL is 0."""
    arrays = batch(rng, keywords)
    arrays["teacher_logits"], arrays["success"] = arrays["student_logits"].copy(), np.ones_like(arrays["success"])
    return arrays


def is_tie(arrays: Arrays, keywords: Keywords) -> bool:
    """Equal logits, successful episodes."""
    return bool((arrays["teacher_logits"] == arrays["student_logits"]).all() and arrays["success"].all())


def not_sampled(arrays: Arrays) -> Any:
    """Which entries (N, V) are the smallest of those that were not sampled in their row."""
    student = arrays["student_logits"].copy()
    student[np.arange(len(student)), arrays["actions"]] = np.inf
    return student == student.min(-1, keepdims=True)


def hidden(*names: str) -> Any:
    """A draw in which `names` have an entry at -inf that was not sampled."""

    def make(rng: np.random.Generator, keywords: Keywords) -> Arrays:
        arrays = batch(rng, keywords)
        entries = not_sampled(arrays)
        for name in names:
            arrays[name][entries] = -np.inf
        return arrays

    return make


def is_hidden(*names: str) -> Any:
    """Whether `names`, and no other logits, have an entry at -inf."""
    return lambda arrays, _: all(bool((arrays[name] == -np.inf).any()) == (name in names) for name in LOGITS)


def large(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Logits in the hundreds: exp of one overflows float32 and float64."""
    arrays = batch(rng, keywords)
    return arrays | {name: np.round(arrays[name]) + 1000.0 + arrays[name] for name in LOGITS}


ONE = {
    **{name: np.zeros((1, 2)) for name in LOGITS},
    **{name: np.zeros(1, dtype=np.int64) for name in ("actions", *INDICES)},
    "success": np.ones(1, dtype=np.bool_),
}

SPOD = Function(
    "spod.success_preserving_loss",
    {**dict.fromkeys(LOGITS, "NV"), "actions": "N", "action_index": "N", "episode_index": "A", "success": "E"},
    "student_logits",
    (
        Option("tau0 0.5, floor weight 1", {"tau0": 0.5, "floor_weight": 1.0}),
        Option("tau0 0.1, floor weight 0.25", {"tau0": 0.1, "floor_weight": 0.25}),
    ),
    batch,
    by_reference,
    inside,
    (
        Stress("tied gate", tie, is_tie),
        Stress("padded vocabulary", hidden(*LOGITS), is_hidden(*LOGITS)),
        Stress("excluded teacher entry", hidden("teacher_logits"), is_hidden("teacher_logits")),
        Stress("excluded student entry", hidden("student_logits"), is_hidden("student_logits")),
        Stress(
            "large logits", large, lambda arrays, _: bool((np.abs(arrays["student_logits"]) >= 900).any()),
            ("float32", "float64"), (1e-3, 1e-3),
        ),
        Stress("half precision", batch, lambda _, __: True, ("float16", "bfloat16")),
    ),
    (
        Refused("NaN in a row", {**ONE, "student_logits": np.array([[np.nan, 0.0]])}, {}),
        Refused("a row of -inf alone", {**ONE, "teacher_logits": np.full((1, 2), -np.inf)}, {}),
        Refused("a token outside the vocabulary", {**ONE, "actions": np.array([2])}, {}),
        Refused("tau0 of 0", ONE, {"tau0": 0.0}),
    ),
)  # fmt: skip
FUNCTIONS = (AVERAGE, SPOD)
