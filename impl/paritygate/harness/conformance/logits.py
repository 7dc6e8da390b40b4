"""`sdpo.logit_loss`: divergences of logits (B, T, V) under a mask (B, T), and what hurts them."""

import itertools
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

DIVERGENCES = {"forward_kl": {}, "reverse_kl": {}, "jsd": {"mixture": 0.5}}
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "top 2 and tail": {"top_k": 2, "tail": True},
    "top 2 renormalised": {"top_k": 2, "tail": False},
    "teacher's top 2 and tail": {"top_k": 2, "tail": True, "top_k_of": "teacher"},
    "teacher's top 2 renormalised": {"top_k": 2, "tail": False, "top_k_of": "teacher"},
}
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "token_sum")


def options() -> tuple[Option, ...]:
    """Every divergence, truncation and aggregation."""
    return tuple(
        Option(
            f"{divergence}, {truncation}, {aggregation}",
            {"divergence": divergence, **mixture, **cut, "aggregation": aggregation},
            divergence,
        )
        for (divergence, mixture), (truncation, cut), aggregation in itertools.product(
            DIVERGENCES.items(), TRUNCATIONS.items(), AGGREGATIONS
        )
    )


def draw(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Logits of order one, no ties; 1 to 3 sequences of 2 to 4 tokens, each with a token to read."""
    shape = (int(rng.integers(1, 4)), int(rng.integers(2, 5)), int(rng.choice([3, 5, 8])))
    mask = (rng.random(shape[:2]) < 0.6).astype(np.int64)
    mask[:, 0] = 1
    return {"student_logits": rng.normal(size=shape), "teacher_logits": rng.normal(size=shape), "mask": mask}


def define(arrays: Arrays, keywords: Keywords) -> Outputs:
    """Value and gradient by the reference."""
    given = {**arrays, **keywords}
    sdpo = reference("sdpo")
    return Outputs(np.asarray(sdpo.logit_loss(**given)), np.asarray(sdpo.logit_loss_grad(**given)))


def inside(arrays: Arrays) -> bool:
    """Every row to read has a finite entry in common, no NaN, no +inf."""
    student, teacher = read(arrays)
    if (
        arrays["student_logits"].shape[-1] < 2
        or np.isnan(student).any()
        or np.isnan(teacher).any()
        or (student == np.inf).any()
        or (teacher == np.inf).any()
    ):
        return False
    return bool((np.isfinite(student) & np.isfinite(teacher)).any(-1).all())


def read(arrays: Arrays) -> tuple[Any, Any]:
    """Student and teacher rows (n, V) at mask 1."""
    rows = arrays["mask"] == 1
    return arrays["student_logits"][rows], arrays["teacher_logits"][rows]


def masked_nan(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """NaN where the mask is 0."""
    arrays = draw(rng, keywords)
    arrays["mask"][0, -1] = 0
    hidden = arrays["mask"] == 0
    arrays["student_logits"][hidden] = arrays["teacher_logits"][hidden] = np.nan
    return arrays


def masked_infinity(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Where the mask is 0, a teacher that excludes an entry: its divergence may be +inf."""
    arrays = draw(rng, keywords)
    arrays["mask"][0, -1] = 0
    arrays["teacher_logits"][0, -1, 0] = -np.inf
    return arrays


def empty_row(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """A sequence without a token to read beside one that has some."""
    arrays = {name: np.concatenate([array, array]) for name, array in draw(rng, keywords).items()}
    arrays["mask"][0] = 0
    return arrays


def has_empty_row(arrays: Arrays, keywords: Keywords) -> bool:
    """One sequence without a token, one with some."""
    some = (arrays["mask"] == 1).any(1)
    return bool(some.any() and not some.all())


def padded_vocabulary(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """The last entry at -inf in both."""
    arrays = draw(rng, keywords)
    arrays["student_logits"][..., -1] = arrays["teacher_logits"][..., -1] = -np.inf
    return arrays


def excluded(who: str) -> Any:
    """A draw in which `who` gives one entry no probability, among the student's two largest."""

    def make(rng: np.random.Generator, keywords: Keywords) -> Arrays:
        arrays = draw(rng, keywords)
        arrays["mask"][:] = 1  # what a mask does to an infinite divergence is the masked rows' question
        order = np.sort(arrays["student_logits"], axis=-1)
        arrays[f"{who}_logits"][arrays["student_logits"] == order[..., -2:-1]] = -np.inf
        return arrays

    return make


def is_excluded(who: str, other: str) -> Any:
    """Whether `who` alone has an entry at -inf in a row that is read."""

    def still(arrays: Arrays, keywords: Keywords) -> bool:
        rows = arrays["mask"] == 1
        mine, theirs = arrays[f"{who}_logits"][rows], arrays[f"{other}_logits"][rows]
        excluded = bool(((mine == -np.inf) & np.isfinite(theirs)).any() and not (theirs == -np.inf).any())
        return excluded and bool(rows.all())

    return still


def ties(rng: np.random.Generator, keywords: Keywords) -> Arrays | None:
    """The student's k-th and (k+1)-th largest are equal, the teacher tells them apart."""
    if "top_k" not in keywords:
        return None
    arrays = draw(rng, keywords)
    arrays["mask"][:] = 1
    student = arrays["teacher_logits" if keywords.get("top_k_of") == "teacher" else "student_logits"]
    order = np.argsort(-student, axis=-1)
    student[...] = np.take_along_axis(student, order, -1)
    k = keywords["top_k"]
    student[..., k] = student[..., k - 1]
    return arrays


def tied_pair(arrays: Arrays, keywords: Keywords) -> tuple[int, int]:
    """The two entries that tie in every row of `ties`."""
    return keywords["top_k"] - 1, keywords["top_k"]


def are_ties(arrays: Arrays, keywords: Keywords) -> bool:
    """The vocabulary as it was drawn: another one would tie elsewhere."""
    ranked = arrays["teacher_logits" if keywords.get("top_k_of") == "teacher" else "student_logits"]
    i, j = tied_pair(arrays, keywords)
    if ranked.shape[-1] <= j or (arrays["mask"] != 1).any():
        return False
    above, below = ranked[..., :i], ranked[..., j + 1 :]
    tie = (ranked[..., i] == ranked[..., j]).all()
    return bool(tie and (above > ranked[..., i:j]).all() and (below < ranked[..., i:j]).all())


def near_equal(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Teacher and student 1e-4 apart."""
    arrays = draw(rng, keywords)
    arrays["teacher_logits"] = arrays["student_logits"] + 1e-4 * rng.normal(size=arrays["student_logits"].shape)
    return arrays


def is_near_equal(arrays: Arrays, keywords: Keywords) -> bool:
    """At most 1e-2 apart, and not equal, in rows that are read."""
    student, teacher = read(arrays)
    diff = np.abs(student - teacher)
    return bool(np.isfinite(diff).all() and (diff <= 1e-2).all() and (diff.max(-1) > 1e-5).any())


def large_logits(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Logits in the hundreds: exp of one overflows float32 and float64."""
    arrays = draw(rng, keywords)
    for name in ("student_logits", "teacher_logits"):
        arrays[name] = np.round(arrays[name]) + 1000.0 + arrays[name]
    return arrays


def importance_ratio(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Each token times a ratio of its own."""
    arrays = draw(rng, keywords)
    arrays["importance_ratio"] = rng.choice([0.25, 0.5, 1.5, 2.0], size=arrays["mask"].shape)
    return arrays


def fully_masked(rng: np.random.Generator, keywords: Keywords) -> Arrays:
    """Nothing to read at all."""
    arrays = draw(rng, keywords)
    arrays["mask"][:] = 0
    return arrays


def anything(arrays: Arrays, keywords: Keywords) -> bool:
    """Nothing more is asked of the arrays."""
    return True


STRESSES = (
    Stress(
        "masked NaN", masked_nan, lambda arrays, _: bool(np.isnan(arrays["student_logits"][arrays["mask"] == 0]).any())
    ),
    Stress(
        "masked infinity",
        masked_infinity,
        lambda arrays, _: (
            bool((arrays["teacher_logits"][arrays["mask"] == 0] == -np.inf).any())
            and bool(np.isfinite(read(arrays)[1]).all())
        ),
    ),
    Stress("empty row", empty_row, has_empty_row),
    Stress(
        "padded vocabulary",
        padded_vocabulary,
        lambda arrays, _: bool(((read(arrays)[0] == -np.inf) & (read(arrays)[1] == -np.inf)).any()),
    ),
    Stress("excluded teacher entry", excluded("teacher"), is_excluded("teacher", "student")),
    Stress("excluded student entry", excluded("student"), is_excluded("student", "teacher")),
    Stress("ties in the top k", ties, are_ties, either=tied_pair),
    Stress("near-equal", near_equal, is_near_equal, ("float32",), (1e-2, 1e-12)),
    Stress(
        "large logits",
        large_logits,
        lambda arrays, _: bool((np.abs(read(arrays)[0]) >= 900).any()),
        ("float32", "float64"),
        (1e-3, 1e-3),
    ),
    Stress("importance ratio", importance_ratio, lambda arrays, _: "importance_ratio" in arrays),
    Stress("fully masked batch", fully_masked, lambda arrays, _: not (arrays["mask"] == 1).any(), zero_is_fine=True),
    Stress("half precision", draw, anything, ("float16", "bfloat16")),
)


def refused() -> tuple[Refused, ...]:
    """Shapes that differ, NaN and a row of -inf where it is read, a mask of 2, a top_k beyond the vocabulary."""
    zeros, one = np.zeros((1, 1, 2)), np.ones((1, 1), dtype=np.int64)

    def changed(**arrays: Any) -> Arrays:
        return {"student_logits": zeros, "teacher_logits": zeros, "mask": one, **arrays}

    return (
        Refused("NaN in a row that is read", changed(student_logits=np.array([[[np.nan, 0.0]]])), {}),
        Refused("+inf in a row that is read", changed(student_logits=np.array([[[np.inf, 0.0]]])), {}),
        Refused("a row of -inf alone", changed(teacher_logits=np.full((1, 1, 2), -np.inf)), {}),
        Refused("shapes that differ", changed(teacher_logits=np.zeros((1, 1, 3))), {}),
        Refused("a mask of 2", changed(mask=2 * one), {}),
        Refused("a fully masked batch", changed(mask=0 * one), {}),
        Refused("top_k beyond the vocabulary", changed(), {"top_k": 3}),
    )


LOGIT_LOSS = Function(
    "sdpo.logit_loss",
    {"student_logits": "BTV", "teacher_logits": "BTV", "mask": "BT", "importance_ratio": "BT"},
    "student_logits",
    options(),
    draw,
    define,
    inside,
    STRESSES,
    refused(),
    frozenset({"importance_ratio"}),
    tie_order=True,
)
