"""Mistakes in the kernels' own source: each is compiled from a copy, and the comparison with the reference goes red."""

import ctypes
import re

import numpy as np
import pytest
import torch

from paritygate.losses import sdpo, spod
from paritygate.losses.engines import cpp
from paritygate.native import libraries
from paritygate_reference import sdpo as reference
from tests.kernels.kernel_batches import batch
from tests.kernels.test_compiled import sources
from tests.kernels.test_divergence import both, logits
from tests.kernels.test_rows import holds, needs_compiler

pytestmark = needs_compiler
MISTAKES = {  # name -> file, the expression that stands there once, the mistaken one
    "a tie is protected": ("spod.cpp", "x.success[action] && apart < 0", "x.success[action] && apart <= 0"),
    "the gate not asked": ("spod.cpp", "!x.success[action] || !x.gate[action]", "!x.success[action]"),
    "the floor above tau0": ("spod.cpp", "x.logprobs[2 * action] < x.log_tau0", "x.logprobs[2 * action] > x.log_tau0"),
    "lambda forgotten": ("spod.cpp", "w * x.floor_weight", "w"),
    "-inf not looked for": ("rows.hpp", "dq > -745.0f ? eq * (dq - dp) : Vec{}", "eq * (dq - dp)"),
    "one maximum for both sides": ("rows.hpp", "splat(row.p.centre())", "splat(row.q.centre())"),
    "p and q exchanged": ("rows.hpp", "wp * exponential(dp) - teacher", "teacher - wp * exponential(dp)"),
    "the log sums exchanged": (
        "divergence.cpp",
        "cross / of_a.sum - (there - of_b.maximum) - std::log(of_a.sum) + std::log(of_b.sum)",
        "cross / of_a.sum - (there - of_b.maximum) + std::log(of_a.sum) - std::log(of_b.sum)",
    ),
    "the mixture's weight": ("divergence.cpp", "(1 - mixture) * p_part + mixture * q_part", "0.5 * (p_part + q_part)"),
    "the mixture's slope": ("divergence.cpp", "scale * (1 - mixture)", "scale * mixture"),
    "the tail dropped": ("truncated.cpp", "sum_of(kept_sum) + rest", "sum_of(kept_sum)"),
    "the cap forgotten": ("truncated.cpp", "rest < smallest", "rest < 0"),
    "a capped tail with a gradient": ("truncated.cpp", "tail && p.capped", "false"),
    "ties to the highest index": (
        "truncated.cpp",
        "a.value == b.value && a.at < b.at",
        "a.value == b.value && a.at > b.at",
    ),
    "the teacher is the student": ("truncated.cpp", "fill(q, this->teacher(i), at)", "fill(q, this->student(i), at)"),
    "no slope outside": ("truncated.cpp", "weighted[k] / std::exp(p.log[k]) - total", "-total"),
}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """One library with every mistake, of which a number chooses one; not optimised, for float32 alone: two seconds."""
    texts = {name: source.decode() for name, source in sources().items()}
    texts["vector.hpp"] = texts["vector.hpp"].replace(
        "#pragma once", '#pragma once\nextern "C" { inline int mistake = 0; }'
    )
    for number, (file, right, wrong) in enumerate(MISTAKES.values(), 1):
        assert texts[file].count(right) == 1, f"{file} holds the text to edit {texts[file].count(right)} times: {right}"
        texts[file] = texts[file].replace(right, f"(mistake == {number} ? ({wrong}) : ({right}))")
    units = {name: re.sub(r"\n    if \(x->dtype == [12]\)[^\n]*", "", text).encode() for name, text in texts.items()}
    return libraries.open_library(libraries.build((libraries.compiler_command()[0], "-O0"), units))


def spod_holds() -> None:
    """Every branch of the gate, both sides of the floor, nearly equal and equal rows, entries of -inf."""
    for sure, noise in ((0.0, 2.0), (6.0, 2.0), (30.0, 2.0), (2.0, 1e-3)):
        data = batch([[1, 3], [9, 2], [2, 1], [17]], 67, torch.float32, sure=sure, noise=noise)
        if noise > 1:
            data["actions"].clamp_(max=40)
            data["student_logits"][:, 60:] = data["teacher_logits"][:, 50:] = -torch.inf
        result, gradient = spod.success_preserving_loss_and_grad(**data, tau0=0.4, floor_weight=0.7)
        holds(data, result, gradient, tau0=0.4, floor_weight=0.7)
        data["teacher_logits"], data["success"][:] = data["student_logits"].clone(), True
        result, gradient = spod.success_preserving_loss_and_grad(**data)
        assert not result.gate.any()
        assert (gradient == 0).all()


def divergences_hold(ks: tuple[int | None, ...]) -> None:
    """Each divergence against the reference, with ties; a top k whose tail is under the cap."""
    for kind, k in ((kind, k) for kind in sdpo.DIVERGENCES for k in ks):
        student, teacher, mask = logits(67, torch.float32)
        student, teacher = student.round(), teacher - student.round()
        student[0, 0, :3] += 60
        options = {"divergence": kind, "mixture": 0.3, "top_k": k}
        arrays = (student.double().numpy(), teacher.double().numpy(), mask.numpy())
        loss, gradient = both(student, teacher, mask, kind, 0.3, top_k=k)
        slope = reference.logit_loss_grad(*arrays, **options)
        assert float(loss) == pytest.approx(reference.logit_loss(*arrays, **options), rel=1e-6, abs=1e-12)
        assert np.abs(gradient.double().numpy() - slope).max() <= 3e-7 * np.abs(slope).max() + 1e-14


COMPARISONS = {
    "spod.cpp": spod_holds,
    "rows.hpp": spod_holds,
    "divergence.cpp": lambda: divergences_hold((None,)),
    "truncated.cpp": lambda: divergences_hold((1, 3, 20)),
}


@pytest.mark.parametrize("name", [None, *MISTAKES])
def test_the_comparison_goes_red(name: str | None, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """... with a mistake, and is green without one."""
    monkeypatch.setattr(cpp, "library", lambda: library)
    chosen = ctypes.c_int.in_dll(library, "mistake")
    if name is None:
        chosen.value = 0
        for holds_up in COMPARISONS.values():
            holds_up()
        return
    chosen.value = list(MISTAKES).index(name) + 1
    with pytest.raises(AssertionError):
        COMPARISONS[MISTAKES[name][0]]()
