"""Known mistakes in the compiled kernels: expressions of their C++ sources."""

import ctypes
import re
from typing import Any

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "a-tie-is-protected",
        "a tie is protected",
        "spod/tie",
        "losses/engines/cpp/spod.cpp",
        "success && diff < 0",
        "success && diff <= 0",
    ),
    Mutant(
        "totals-compared-in-the-kernel",
        "totals of an action compared, not summed differences of its rows: an ulp of -100,000 nats decides nothing",
        "spod/gate",
        "losses/engines/cpp/spod.cpp",
        "gate(x.success[action], diff)",
        "gate(x.success[action], q - p)",
    ),
    Mutant(
        "the-gate-not-asked",
        "the gate not asked",
        "spod/gradient",
        "losses/engines/cpp/spod.cpp",
        "!may_open(action) || !x.gate[action]",
        "!may_open(action)",
    ),
    Mutant(
        "the-floor-above-tau0",
        "the floor above tau0",
        "spod/gradient",
        "losses/engines/cpp/spod.cpp",
        "x.logprobs[2 * action] < x.log_tau0",
        "x.logprobs[2 * action] > x.log_tau0",
    ),
    Mutant(
        "lambda-forgotten",
        "lambda forgotten",
        "spod/gradient",
        "losses/engines/cpp/spod.cpp",
        "w * x.floor_weight",
        "w",
    ),
    Mutant(
        "infinity-not-looked-for",
        "-inf not looked for",
        "spod/parts",
        "losses/engines/cpp/rows.hpp",
        "dq > -745.0f ? eq * (dq - dp) : Vec{}",
        "eq * (dq - dp)",
    ),
    Mutant(
        "one-maximum-for-both-sides",
        "one maximum for both sides",
        "spod/parts",
        "losses/engines/cpp/rows.hpp",
        "splat(row.p.centre())",
        "splat(row.q.centre())",
    ),
    Mutant(
        "p-and-q-exchanged",
        "p and q exchanged",
        "spod/gradient",
        "losses/engines/cpp/rows.hpp",
        "wp * exponential(dp) - teacher",
        "teacher - wp * exponential(dp)",
    ),
    Mutant(
        "the-log-sums-exchanged",
        "the log sums exchanged",
        "sdpo/logit_loss",
        "losses/engines/cpp/divergence.cpp",
        "cross / of_a.sum - (there - of_b.maximum) - std::log(of_a.sum) + std::log(of_b.sum)",
        "cross / of_a.sum - (there - of_b.maximum) + std::log(of_a.sum) - std::log(of_b.sum)",
    ),
    Mutant(
        "the-mixture's-weight",
        "the mixture's weight",
        "sdpo/logit_loss",
        "losses/engines/cpp/divergence.cpp",
        "(1 - mixture) * p_part + mixture * q_part",
        "0.5 * (p_part + q_part)",
    ),
    Mutant(
        "the-mixture's-slope",
        "the mixture's slope",
        "sdpo/logit_gradient",
        "losses/engines/cpp/divergence.cpp",
        "scale * (1 - mixture)",
        "scale * mixture",
    ),
    Mutant(
        "the-tail-dropped",
        "the tail dropped",
        "sdpo/logit_loss",
        "losses/engines/cpp/truncated.cpp",
        "sum_of(kept_sum) + rest",
        "sum_of(kept_sum)",
    ),
    Mutant(
        "the-cap-forgotten",
        "the cap forgotten",
        "sdpo/logit_loss",
        "losses/engines/cpp/truncated.cpp",
        "rest < smallest",
        "rest < 0",
    ),
    Mutant(
        "a-capped-tail-with-a-gradient",
        "a capped tail with a gradient",
        "sdpo/logit_gradient",
        "losses/engines/cpp/truncated.cpp",
        "tail && p.capped",
        "false",
    ),
    Mutant(
        "log-ratios-of-kept-logprobs",
        "of the entries kept log p - log q of log-probabilities: beside 1e30 they have lost -1 and 0",
        "sdpo/logit_gradient",
        "losses/engines/cpp/truncated.cpp",
        "(p.logit[b] - p.logit[top]) - (q.logit[b] - q.logit[top])",
        "(p.log[b] - q.log[b]) - largest",
    ),
    Mutant(
        "ties-to-the-highest-index",
        "ties to the highest index",
        "sdpo/logit_loss",
        "losses/engines/cpp/truncated.cpp",
        "a.value == b.value && a.at < b.at",
        "a.value == b.value && a.at > b.at",
    ),
    Mutant(
        "the-teacher-is-the-student",
        "the teacher is the student",
        "sdpo/logit_loss",
        "losses/engines/cpp/truncated.cpp",
        "fill(q, this->teacher(i), at)",
        "fill(q, this->student(i), at)",
    ),
    Mutant(
        "no-slope-outside",
        "no slope outside",
        "sdpo/logit_gradient",
        "losses/engines/cpp/truncated.cpp",
        "weighted[k] / std::exp(p.log[k]) - total",
        "-total",
    ),
)


def switched_library(*, halves: bool = False) -> bytes:
    """A library with every mistake, of which a number chooses one; not optimised, for float32 alone: two seconds.

    With `halves` it serves bfloat16 and float16 too.
    """
    from paritygate.losses.engines import cpp
    from paritygate.native import libraries

    texts = {path.name: path.read_text() for path in cpp.SOURCES}
    texts["vector.hpp"] = texts["vector.hpp"].replace(
        "#pragma once", '#pragma once\nextern "C" { inline int mistake = 0; }'
    )
    for number, mutant in enumerate(MUTANTS, 1):
        file = mutant.file.rpartition("/")[2]
        if texts[file].count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: {file} holds {mutant.old!r} {texts[file].count(mutant.old)} times")
        texts[file] = texts[file].replace(mutant.old, f"(mistake == {number} ? ({mutant.new}) : ({mutant.old}))")
    if not halves:
        texts = {name: re.sub(r"\n    if \(x->dtype == [12]\)[^\n]*", "", text) for name, text in texts.items()}
    units = {name: text.encode() for name, text in texts.items()}
    return libraries.build((libraries.compiler_command()[0], "-O0"), units)


def use(data: bytes, number: int, monkeypatch: Any = None) -> None:
    """Compute by that library with the mistake of MUTANTS[number - 1], none for 0; here, or for one test."""
    from paritygate.losses.engines import cpp
    from paritygate.native import libraries

    library = libraries.open_library(data)
    ctypes.c_int.in_dll(library, "mistake").value = number
    replace = setattr if monkeypatch is None else monkeypatch.setattr
    replace(cpp, "library", lambda: library)
