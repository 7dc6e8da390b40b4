"""SDPO at token and sequence level, its teachers and siblings, against the reference, and that against 60 digits."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paritygate.harness import compare
from paritygate.harness.strategies import DTYPES, logprob_rows, rounded, tensor
from paritygate_reference import sdpo as reference
from tests import oracle


def as_rows(*arrays: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """The (T,) rows of batched (..., T) arrays, together."""
    return list(zip(*(array.reshape(-1, array.shape[-1]) for array in arrays), strict=True))


@pytest.mark.obligation("sdpo/token_advantage")
@pytest.mark.parametrize("dtype", DTYPES)
def test_token_advantage(losses: Any, device: str, dtype: str) -> None:
    @settings(max_examples=50)
    @given(logprob_rows(dtype), st.sampled_from([5.0, 0.3, 1e6]))
    def advantages_are_clipped_differences_on_the_mask(
        rows: tuple[np.ndarray, np.ndarray, np.ndarray], clip: float
    ) -> None:
        teacher, student, mask = rows
        hidden = mask == 0
        actual = losses.sdpo.token_advantage(
            tensor(np.where(hidden, np.nan, teacher), dtype, device),
            tensor(np.where(hidden, np.inf, student), dtype, device),
            torch.tensor(mask, device=device),
            clip=clip,
        )
        expected = [reference.token_advantage(*row, clip=clip) for row in as_rows(teacher, student, mask)]
        compare("sdpo/token_advantage", actual.reshape(-1, mask.shape[-1]), expected, dtype=dtype)

    advantages_are_clipped_differences_on_the_mask()


@pytest.mark.obligation("sdpo/sequence_advantage")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequence_advantage(losses: Any, device: str, dtype: str) -> None:
    @settings(max_examples=40)
    @given(logprob_rows(dtype))
    def each_sequence_has_its_mean_difference(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        teacher, student, mask = rows
        teacher = np.where(teacher == -np.inf, student, teacher)
        hidden = mask == 0
        actual = losses.sdpo.sequence_advantage(
            tensor(np.where(hidden, np.nan, teacher), dtype, device),
            tensor(np.where(hidden, -np.inf, student), dtype, device),
            torch.tensor(mask, device=device),
        )
        expected = [reference.sequence_advantage(*row) for row in as_rows(teacher, student, mask)]
        compare("sdpo/sequence_advantage", actual.reshape(-1, mask.shape[-1]), expected, dtype=dtype)

    each_sequence_has_its_mean_difference()


@pytest.mark.obligation("sdpo/hybrid_advantage")
def test_hybrid_advantage(losses: Any, device: str) -> None:
    rng = np.random.default_rng(1)
    for dtype, weight, _ in itertools.product(DTYPES, (0.0, 0.3, 0.9, 1.0), range(4)):
        a, b = (rounded(np.abs(rng.normal(size=(3, 5))), dtype) for _ in range(2))
        actual = losses.sdpo.hybrid_advantage(tensor(a, dtype, device), tensor(b, dtype, device), weight)
        compare("sdpo/hybrid_advantage", actual, reference.hybrid_advantage(a, b, weight), dtype=dtype)


@pytest.mark.obligation("sdpo/teacher")
def test_teachers(losses: Any, device: str) -> None:
    rng = np.random.default_rng(2)
    for dtype, rate, _ in itertools.product(DTYPES, (0.0, 0.05, 0.5, 1.0), range(4)):
        a, b = (rounded(np.abs(rng.normal(size=(2, 5))) + 0.5, dtype) for _ in range(2))
        pair = tensor(a, dtype, device), tensor(b, dtype, device)
        for name in ("ema", "trust_region"):
            expected = getattr(reference, name)(a, b, rate)
            compare("sdpo/teacher", getattr(losses.sdpo, name)(*pair, rate), expected, dtype=dtype, where=name)


@pytest.mark.obligation("sdpo/unmixed_teacher")
def test_teachers_that_mix_nothing(losses: Any, device: str) -> None:
    rng = np.random.default_rng(3)
    for dtype, _ in itertools.product(DTYPES, range(4)):
        a, b = (rounded(rng.normal(size=(2, 5)), dtype) for _ in range(2))
        pair = tensor(a, dtype, device), tensor(b, dtype, device)
        for name in ("frozen_initial", "current"):
            expected = getattr(reference, name)(a, b)
            compare("sdpo/unmixed_teacher", getattr(losses.sdpo, name)(*pair), expected, dtype=dtype, where=name)


@pytest.mark.obligation("sdpo/sibling")
def test_select_sibling(losses: Any) -> None:
    composite = st.none() | st.sampled_from([0.0, 0.5, 0.79999, 0.8, 0.9, 1.0])
    group = st.lists(composite, min_size=1, max_size=6).flatmap(
        lambda scores: st.tuples(st.just(scores), st.integers(0, len(scores) - 1))
    )

    @settings(max_examples=200)
    @given(group, st.sampled_from([0.8, 0.5, 0.0]), st.sampled_from(["best", "first"]))
    def the_sibling_is_the_reference_s(drawn: tuple[list[float | None], int], threshold: float, rule: str) -> None:
        scores, index = drawn
        actual = losses.sdpo.select_sibling(scores, index, threshold=threshold, rule=rule)
        expected = reference.select_sibling(scores, index, threshold=threshold, rule=rule)
        numbers = [-1 if i is None else i for i in (actual, expected)]
        compare("sdpo/sibling", *numbers, dtype="int64", where=f"{scores}, {index}, {threshold}, {rule}")

    the_sibling_is_the_reference_s()
    for tenths in range(11):  # at or above: exactly at the threshold counts, just below does not
        for below in (0.0, 1e-6):
            actual = losses.sdpo.select_sibling([1.0, tenths / 10 - below], 0, threshold=tenths / 10)
            numbers = -1 if actual is None else actual, -1 if below else 1
            compare("sdpo/sibling", *numbers, dtype="int64", where=f"{below} below {tenths} / 10")


def refuses(advantage: Any, *rows: Any) -> bool:
    """Whether it raises ValueError."""
    try:
        advantage(*rows)
    except ValueError:
        return True
    return False


@pytest.mark.obligation("sdpo/refusal")
def test_what_is_no_logprob_is_refused_where_it_is_read_and_ignored_elsewhere(losses: Any, device: str) -> None:
    """The leading None of a service's log-probabilities among them: it is not 0.0."""
    for name in ("token_advantage", "sequence_advantage"):
        for value, who, mask_bit in itertools.product((None, np.nan, np.inf, -np.inf), (0, 1), (0, 1)):
            rows: list[list[Any]] = [[-1.0, -2.0], [-1.5, -1.0]]
            rows[who][0] = value
            expected = refuses(getattr(reference, name), *rows, [mask_bit, 1])
            inputs = [[tensor([np.nan if v is None else v for v in row], "float64", device) for row in rows], rows]
            if device != "cpu":
                inputs.pop()  # lists live on the CPU
            for pair in inputs:
                actual = refuses(
                    getattr(losses.sdpo, name), *pair, torch.tensor([mask_bit, 1], device=pair_device(pair))
                )
                where = f"{name}, {value} as {('teacher', 'student')[who]}, mask {mask_bit}"
                compare("sdpo/refusal", actual, expected, dtype="float64", where=where)


def pair_device(pair: Any) -> str:
    """Where a pair of rows lives."""
    return str(pair[0].device) if isinstance(pair[0], torch.Tensor) else "cpu"


@pytest.mark.obligation("sdpo/oracle")
def test_advantages_against_sixty_digits() -> None:
    @settings(max_examples=40)
    @given(logprob_rows("float64", batched=False))
    def the_reference_has_sixty_digits_advantages(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        teacher, student, mask = rows
        pairs = zip(oracle.numbers(teacher), oracle.numbers(student), mask, strict=True)
        exact = [max(min(q - p, 5), -5) * int(m) for q, p, m in pairs]
        actual = reference.token_advantage(teacher, student, mask)
        compare("sdpo/oracle", actual, oracle.as_floats(exact), dtype="float64", oracle="mpmath")
        places = [i for i in range(len(mask)) if mask[i]]
        if places and np.isfinite(teacher[places]).all():
            mean = sum(oracle.numbers(teacher[places])) - sum(oracle.numbers(student[places]))
            broadcast = [float(mean / len(places)) * int(m) for m in mask]
            actual = reference.sequence_advantage(teacher, student, mask)
            compare("sdpo/oracle", actual, broadcast, dtype="float64", oracle="mpmath")

    the_reference_has_sixty_digits_advantages()


@pytest.mark.obligation("sdpo/enumeration")
def test_token_advantage_is_the_negative_gradient_of_the_full_kl(losses: Any, device: str) -> None:
    """Every sequence of V = 4, T = 3, weighted: the surrogate's gradient is minus that of sum_t KL(pi || sg q)."""
    V, T = 4, 3
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        # One row of logits for each prefix: the policy is a table.
        student = [torch.randn(V**t, V, generator=generator, dtype=torch.float64).to(device) for t in range(T)]
        teacher = [torch.randn(V**t, V, generator=generator, dtype=torch.float64).to(device) for t in range(T)]
        surrogate = [torch.zeros_like(table) for table in student]
        full = [torch.zeros_like(table) for table in student]
        for sequence in itertools.product(range(V), repeat=T):
            prefixes = [sum(token * V ** (t - 1 - i) for i, token in enumerate(sequence[:t])) for t in range(T)]
            log_p = [student[t][prefixes[t]].log_softmax(0) for t in range(T)]
            log_q = [teacher[t][prefixes[t]].log_softmax(0) for t in range(T)]
            probability = sum(log_p[t][sequence[t]] for t in range(T)).exp()
            picked_p = torch.stack([log_p[t][sequence[t]] for t in range(T)])
            picked_q = torch.stack([log_q[t][sequence[t]] for t in range(T)])
            advantage = losses.sdpo.token_advantage(picked_q, picked_p, torch.ones(T, device=device), clip=1e6)
            for t in range(T):
                row, grad_log = prefixes[t], -log_p[t].exp()
                grad_log[sequence[t]] += 1.0
                surrogate[t][row] += probability * advantage[t] * grad_log
                logits = student[t][row][None, None].requires_grad_()
                kl = losses.sdpo.logit_loss(logits, teacher[t][row][None, None], torch.ones(1, 1, device=device))
                full[t][row] += probability * torch.autograd.grad(kl, logits)[0][0, 0]
        for t in range(T):
            compare("sdpo/enumeration", surrogate[t], -full[t], dtype="float64", oracle="enumeration", where=f"t={t}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("sdpo/default_clip")
def test_the_clip_is_five_where_none_is_given(losses: Any, device: str, dtype: str) -> None:
    rows = [tensor(x, dtype, device) for x in ([-1.0, -9.0, -0.5, -1.0], [-2.0, -1.0, -8.0, -5.5])]
    mask = torch.ones(4, dtype=torch.bool, device=device)
    compare("sdpo/default_clip", losses.sdpo.token_advantage(*rows, mask), [1.0, -5.0, 5.0, 4.5], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("sdpo/constants")
def test_advantages_and_teachers_are_constants(losses: Any, device: str, dtype: str) -> None:
    """Nothing is attached, and what was made does not move when what it was made of does, as an optimizer's step."""
    mask = torch.ones(3, dtype=torch.bool, device=device)

    def made(name: str, rate: float, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if name.endswith("_advantage"):
            return getattr(losses.sdpo, name)(a, b, 0.25 if name == "hybrid_advantage" else mask)
        return getattr(losses.sdpo, name)(a, b, *(() if name in ("current", "frozen_initial") else (rate,)))

    teachers = [("ema", 0.0), ("ema", 0.5), ("ema", 1.0), ("trust_region", 0.0), ("trust_region", 0.5)]
    plain = ["token_advantage", "sequence_advantage", "hybrid_advantage", "current", "frozen_initial"]
    for name, rate in (*teachers, *((name, 0.0) for name in plain)):
        leaves = [tensor(x, dtype, device).requires_grad_() for x in ([-1.0, -2.0, -0.5], [-1.5, -0.25, -3.0])]
        value = made(name, rate, *leaves)
        compare("sdpo/constants", float(value.requires_grad), 0.0, dtype=dtype, where=f"{name} attached")
        before = value.detach().clone()
        for leaf in leaves:
            leaf.data.sub_(1.0)
        compare("sdpo/constants", value, before, dtype=dtype, where=f"{name} aliased")
    student, teacher = (tensor(x, dtype, device).requires_grad_() for x in ([[[0.0, 1.0]]], [[[1.0, 0.5]]]))
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        loss = losses.sdpo.logit_loss(student, teacher, mask[:1][None], divergence=divergence)
        (gradient,) = torch.autograd.grad(loss, (teacher,), allow_unused=True)
        reached = torch.zeros_like(teacher) if gradient is None else gradient
        compare("sdpo/constants", reached, [[[0.0, 0.0]]], dtype=dtype, where=f"teacher of {divergence}")
