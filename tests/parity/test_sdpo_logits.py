"""SDPO at logit level against the reference, and that against 60 digits; its weights for a service."""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paritygate.harness import compare
from paritygate.harness.strategies import DTYPES, REGIMES, rounded, tensor
from paritygate_reference import sdpo as reference
from tests import oracle
from tests.cases import LogitCase, logit_cases
from tests.served import served, server_gradients, wanted_gradients


@pytest.mark.obligation("sdpo/empty")
def test_a_fully_masked_sum_is_zero_and_attached(losses: Any, device: str) -> None:
    for dtype, shape in itertools.product(DTYPES, [(1, 1, 2), (2, 3, 5)]):
        student = tensor(np.full(shape, np.nan), dtype, device).requires_grad_()
        mask = torch.zeros(shape[:2], device=device)
        loss = losses.sdpo.logit_loss(student, student.detach(), mask, aggregation="token_sum")
        compare("sdpo/empty", loss, 0.0, dtype=dtype)
        compare("sdpo/empty", loss.requires_grad, True, dtype=dtype, where="attached to the graph")
        compare("sdpo/empty", torch.autograd.grad(loss, student)[0], np.zeros(shape), dtype=dtype, where="gradient")


def outcome(loss: Any, arguments: dict[str, Any]) -> Any:
    """The loss, or None where the teacher has nothing among the student's top k, which every side has to refuse."""
    try:
        return loss(**arguments)
    except ValueError as error:
        if not re.search("among the (student|teacher)'s top_k", str(error)):
            raise
        return None


def check_logit_case(losses: Any, device: str, case: LogitCase) -> None:
    """Value and gradient of one case."""
    arguments = case.arguments(device)
    arguments["student_logits"].requires_grad_()
    loss = outcome(losses.sdpo.logit_loss, arguments)
    expected = outcome(reference.logit_loss, case.reference())
    assert (loss is None) == (expected is None), f"{case.options}: refused by one side alone"
    if expected is None:
        return
    labels = {"dtype": case.dtype, "regime": case.regime, "where": str(case.options)}
    compare("sdpo/logit_loss", loss, expected, **labels)
    if np.isfinite(expected):
        slopes = reference.logit_loss_grad(**case.reference())
        scale = loss_scale(slopes) if case.dtype == "float16" else 1.0
        (gradient,) = torch.autograd.grad(loss * scale, arguments["student_logits"])
        compare("sdpo/logit_gradient", gradient.double() / scale, slopes, **labels)


def loss_scale(slopes: np.ndarray) -> float:
    """The power of two that brings the largest slope to between 16 and 32, from 1 to 2^24: float16 is trained that way.

    A mixture weight of 0.001 leaves slopes of a few 1e-7, where float16 has steps of 6e-8 and rounding turns them.
    """
    largest = float(np.abs(slopes[np.isfinite(slopes)]).max(initial=0.0))
    return 2.0 ** min(max(0, 5 - math.frexp(largest)[1]), 24) if largest else 1.0


@pytest.mark.obligation("sdpo/logit_loss", "sdpo/logit_gradient")
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logit_loss(losses: Any, device: str, dtype: str, regime: str) -> None:
    @settings(max_examples=60)
    @given(logit_cases(dtype, regime))
    def value_and_gradient_are_the_reference_s(case: LogitCase) -> None:
        check_logit_case(losses, device, case)

    value_and_gradient_are_the_reference_s()


@pytest.mark.obligation("sdpo/logit_loss", "sdpo/logit_gradient")
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logit_loss_of_a_large_vocabulary(losses: Any, device: str, dtype: str, regime: str) -> None:
    @settings(max_examples=3)
    @given(logit_cases(dtype, regime, vocabularies=(50_021,)))
    def value_and_gradient_are_the_reference_s(case: LogitCase) -> None:
        case.student, case.teacher, case.mask = case.student[:1, :2], case.teacher[:1, :2], case.mask[:1, :2]
        case.ratio = None if case.ratio is None else case.ratio[:1, :2]
        case.mask[0, 0] = 1
        check_logit_case(losses, device, case)

    value_and_gradient_are_the_reference_s()


FAR = [("float64", 1e30), ("float64", 1e308), ("float32", 1e6), ("float32", 3e38), ("bfloat16", 3e38)]
TRUNCATIONS: list[dict[str, Any]] = [{}, {"top_k": 2}, {"top_k": 2, "tail": False}]


@pytest.mark.obligation("sdpo/logit_gradient")
@pytest.mark.parametrize(("dtype", "far"), FAR)
def test_gradients_of_logits_far_from_zero(losses: Any, device: str, dtype: str, far: float) -> None:
    """Beside 1e30 float64 has no -1 any more; where the student excludes that entry -1 and 0 count still."""
    rows = [[-far, -1, -1], [-far, 0, 1], [far, 0, -1], [-1, far, far], [far, -far, 0], [-far] * 3, [0, 0, -1]]
    pairs = np.array(list(itertools.product(rows, [*rows, [far, -1, 0], [-1, -far, far], [-far, -1, -far]])))
    student, teacher = (tensor(side[None], dtype, device) for side in (pairs[:, 0], pairs[:, 1]))
    rounded_rows = [side[0].double().cpu().numpy()[:, None, None] for side in (student, teacher)]
    assert reference.logit_loss_grad([[[-1e30, -1, -1]]], [[[1e30, -1, 0]]], [[1]]).tolist() == [[[0, 0.25, -0.25]]]
    for divergence, truncation in itertools.product(reference.DIVERGENCES, TRUNCATIONS):
        options = {"divergence": divergence, "mixture": 0.3, "aggregation": "token_sum", **truncation}
        mask = torch.ones(1, len(pairs), device=device)
        gradient = losses.sdpo.logit_loss_grad(student, teacher, mask, validate=False, **options)[0]
        slopes = [reference.logit_loss_grad(*row, [[1]], **options)[0, 0] for row in zip(*rounded_rows, strict=True)]
        expected = tensor(np.array(slopes), dtype, device).double().cpu().numpy()
        finite = np.isfinite(expected).all(axis=-1)
        assert finite.sum() >= len(pairs) / 2
        largest = np.maximum(np.abs(expected).max(axis=-1), 1.0)[finite, None]
        actual = gradient.double().cpu().numpy()[finite] / largest  # every row by its own largest
        labels = {"dtype": dtype, "regime": "extreme", "where": str(options)}
        compare("sdpo/logit_gradient", actual, expected[finite] / largest, **labels)


@pytest.mark.obligation("sdpo/logit_loss", "sdpo/teacher_top_k", "sdpo/oracle")
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_teachers_top_k(losses: Any, device: str, dtype: str, regime: str) -> None:
    @settings(max_examples=25)
    @given(logit_cases(dtype, regime, vocabularies=(3, 5, 9)), st.integers(1, 3))
    def value_and_gradient_are_the_reference_s(case: LogitCase, top_k: int) -> None:
        case.options |= {"top_k": top_k, "top_k_of": "teacher"}
        labels = {"dtype": dtype, "regime": regime, "where": str(case.options)}
        arguments = case.arguments(device)
        arguments["student_logits"].requires_grad_()
        loss, expected = outcome(losses.sdpo.logit_loss, arguments), outcome(reference.logit_loss, case.reference())
        assert (loss is None) == (expected is None), f"{case.options}: refused by one side alone"
        if expected is None or not np.isfinite(expected):
            return
        slopes = reference.logit_loss_grad(**case.reference())
        scale = loss_scale(slopes) if dtype == "float16" else 1.0
        (gradient,) = torch.autograd.grad(loss * scale, arguments["student_logits"])
        compare("sdpo/logit_loss", loss, expected, **labels)
        compare("sdpo/teacher_top_k", gradient.double() / scale, slopes, **labels)
        if dtype == "float64":
            rows = oracle.logit_rows(case.student, case.teacher, case.mask == 1, case.options)
            weight = np.ones(case.mask.shape) if case.ratio is None else case.ratio
            values = {at: value if weight[at] != 0.0 else 0 for at, (value, _) in rows.items()}
            exact = oracle.as_floats(oracle.aggregate(values, weight, case.options["aggregation"]))
            compare("sdpo/oracle", expected, exact, dtype=dtype, regime=regime, oracle="mpmath", where=labels["where"])

    value_and_gradient_are_the_reference_s()


@pytest.mark.obligation("sdpo/excluded_teacher", "sdpo/logit_gradient")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_that_the_teacher_excludes(losses: Any, device: str, dtype: str) -> None:
    """Student [0, 0], teacher [0, -inf]: forward log 2, reverse +inf, jsd as by hand; at a masked token nothing."""
    jsd = 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) + 0.5 * math.log(1.0 / 0.75)
    slope = 0.25 * (math.log(0.5 / 0.75) - 0.5 * (math.log(0.5 / 0.75) + math.log(2.0)))
    values = {"forward_kl": math.log(2.0), "reverse_kl": math.inf, "jsd": jsd}
    slopes = {"forward_kl": [-0.5, 0.5], "jsd": [slope, -slope]}
    for divergence, masked in itertools.product(values, (False, True)):
        student = tensor([[[0.0, 0.0], [0.0, 0.0]]], dtype, device).requires_grad_()
        teacher = tensor([[[0.0, 0.0], [0.0, -np.inf]]], dtype, device)
        mask = torch.tensor([[1, 0 if masked else 1]], device=device)
        options = {"divergence": divergence, "aggregation": "token_sum"}
        loss = losses.sdpo.logit_loss(student, teacher, mask, **options)
        wanted = 0.0 if masked else values[divergence]
        labels = {"dtype": dtype, "oracle": "by hand", "where": f"{divergence}, masked {masked}"}
        compare("sdpo/excluded_teacher", loss, wanted, **labels)
        ours = reference.logit_loss(student.detach().double().cpu(), teacher.double().cpu(), mask.cpu(), **options)
        compare("sdpo/excluded_teacher", ours, wanted, dtype="float64", oracle="by hand", where=divergence)
        if np.isfinite(wanted):
            (gradient,) = torch.autograd.grad(loss, student)
            expected = [[[0.0, 0.0], [0.0, 0.0] if masked else slopes[divergence]]]
            compare("sdpo/logit_gradient", gradient, expected, **labels)


def two_and_a_tail(kept: float, tail: float) -> np.ndarray:
    """Logits (1, 1, 5): two entries that share 1 - tail, the first with `kept` of it, and three that share the tail."""
    masses = np.array([kept * (1 - tail), (1 - kept) * (1 - tail), 0.5 * tail, 0.3 * tail, 0.2 * tail])
    with np.errstate(divide="ignore"):
        return np.log(masses)[None, None]


@pytest.mark.obligation("sdpo/logit_loss", "sdpo/logit_gradient", "sdpo/oracle")
@pytest.mark.parametrize("divergence", reference.DIVERGENCES)
def test_tails_around_the_cap(losses: Any, device: str, divergence: str) -> None:
    """A tail under 1e-7 is held there and has no gradient: the kept then sum to less than 1, and a KL's +1 shows."""
    options = {"divergence": divergence, "mixture": 0.3, "top_k": 2, "tail": True}
    tails = (0.0, 1e-9, 5e-8, 1.1e-7, 1e-3)
    for student_tail, teacher_tail in itertools.product(tails, tails[::2]):
        student, teacher, mask = (
            two_and_a_tail(0.7, student_tail),
            two_and_a_tail(0.4, teacher_tail),
            np.ones((1, 1), dtype=np.int64),
        )
        check_logit_case(losses, device, LogitCase("float64", "ordinary", student, teacher, mask, None, options))
        value, slopes = oracle.logit_rows(student, teacher, mask == 1, options)[0, 0]
        labels = {
            "dtype": "float64",
            "oracle": "mpmath",
            "where": f"{divergence}, tails {student_tail:g} and {teacher_tail:g}",
        }
        expected = reference.logit_loss(student, teacher, mask, **options)
        compare("sdpo/oracle", expected, oracle.as_floats(value), **labels)
        gradient = reference.logit_loss_grad(student, teacher, mask, **options)
        compare("sdpo/oracle", gradient[0, 0], oracle.as_floats(slopes), **labels)


@pytest.mark.obligation("sdpo/oracle")
@pytest.mark.parametrize("regime", REGIMES)
def test_reference_against_sixty_digits(regime: str) -> None:
    @settings(max_examples=30)
    @given(logit_cases("float64", regime, vocabularies=(2, 3, 5)))
    def the_reference_has_sixty_digits_value_and_gradient(case: LogitCase) -> None:
        expected = outcome(reference.logit_loss, case.reference())
        if expected is None:
            return
        rows = oracle.logit_rows(case.student, case.teacher, case.mask == 1, case.options)
        weight = np.ones(case.mask.shape) if case.ratio is None else case.ratio
        masked_in = {at: value for at, (value, _) in rows.items() if weight[at] != 0.0}
        values = {at: value if at in masked_in else 0 for at, (value, _) in rows.items()}
        exact = oracle.aggregate(values, weight, case.options["aggregation"])
        labels = {"dtype": "float64", "regime": case.regime, "oracle": "mpmath", "where": str(case.options)}
        compare("sdpo/oracle", expected, oracle.as_floats(exact), **labels)
        if not np.isfinite(expected):
            return
        gradient = reference.logit_loss_grad(**case.reference())
        for at in masked_in:
            share = oracle.aggregate({other: int(other == at) for other in rows}, weight, case.options["aggregation"])
            slopes = oracle.as_floats([share * slope for slope in rows[at][1]])
            compare("sdpo/oracle", gradient[at], slopes, **labels)

    the_reference_has_sixty_digits_value_and_gradient()


def softmax(logits: np.ndarray) -> np.ndarray:
    """Plain float64 softmax of (..., V): only to look at a case."""
    masses = np.exp(logits - logits.max(-1, keepdims=True))
    return masses / masses.sum(-1, keepdims=True)


@pytest.mark.obligation("sdpo/service_weights")
@pytest.mark.parametrize("regime", ["ordinary", "near_equal"])
def test_service_weights_have_the_gradient_of_the_divergence(losses: Any, device: str, regime: str) -> None:
    """`-sum w log p(x)` of a service that knows only cross-entropy, on policy, against the reference's gradient."""

    @settings(max_examples=80)
    @given(logit_cases("float64", regime))
    def the_weighted_cross_entropy_has_the_divergence_s_gradient(case: LogitCase) -> None:
        options, vocabulary = case.options, case.student.shape[-1]
        top_k = options["top_k"] or vocabulary
        student, teacher = case.student[0, :1], case.teacher[0, :1]
        kept = [int(i) for i in oracle.top_k(student[0].tolist(), top_k)]
        log_p = torch.tensor(student, device=device).log_softmax(-1)[:, kept]
        log_q = torch.tensor(teacher, device=device).log_softmax(-1)[:, kept]
        chosen = {name: options[name] for name in ("divergence", "mixture")}
        weights, dropped = losses.sdpo.cross_entropy_weights(log_p, log_q, tail=options["tail"], **chosen)
        leaf = torch.tensor(student, device=device, requires_grad=True)
        cross_entropy = -(weights * leaf.log_softmax(-1)[:, kept]).sum()
        (gradient,) = torch.autograd.grad(cross_entropy, leaf)
        dropping = options["tail"] and float(np.delete(softmax(student[0]), kept).sum()) < 1e-6
        labels = {"regime": case.regime, "where": f"{chosen}, top_k={top_k}, tail={options['tail']}"}
        compare("sdpo/service_weights", dropped, [dropping], dtype="float64", **labels)
        tail = options["tail"] and not dropping
        expected = reference.logit_loss_grad(
            student[None], teacher[None], np.ones((1, 1)), top_k=top_k, tail=tail, **chosen
        )
        compare("sdpo/service_weights", gradient[None], expected, dtype="float64", **labels)

    the_weighted_cross_entropy_has_the_divergence_s_gradient()


SERVICE_ROWS = [
    ("forward_kl", 480, False),
    ("forward_kl", 20, True),
    ("forward_kl", 20, False),
    ("reverse_kl", 20, True),
]
SERVICE_ROWS += [("reverse_kl", 480, False), ("reverse_kl", 20, False), ("jsd", 20, True), ("jsd", 20, False)]


@pytest.mark.parametrize(("divergence", "top_k", "tail"), SERVICE_ROWS)
@pytest.mark.obligation("sdpo/service_gradient")
def test_logit_level_through_the_embedded_server(
    losses: Any, device: str, divergence: str, top_k: int, tail: bool
) -> None:
    """(N, K) weights sent as `cross_entropy` move the server's adapters as the reference's gradient does."""
    tokens = [(37 * i + 11) % 480 for i in range(24)]
    with torch.no_grad():
        student = served().plain(torch.tensor([tokens])).logits[0]
    teacher = student + torch.randn(student.shape, generator=torch.Generator().manual_seed(top_k), dtype=torch.float64)
    mask = torch.tensor([0] * 9 + [1] * 15)
    kept = torch.tensor([oracle.top_k(row, top_k) for row in student.tolist()])
    pair = ((x.log_softmax(-1).gather(1, kept)).to(device) for x in (student, teacher))
    weights = losses.sdpo.cross_entropy_weights(*pair, divergence=divergence, mixture=0.3, tail=tail).weights.cpu()
    got = server_gradients(tokens, kept, weights * mask[:, None] / mask.sum())
    slopes = reference.logit_loss_grad(
        student[None].numpy(),
        teacher[None].numpy(),
        mask[None].numpy(),
        divergence=divergence,
        mixture=0.3,
        top_k=top_k,
        tail=tail,
    )
    wanted = wanted_gradients(tokens, torch.tensor(slopes[0]))
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        compare("sdpo/service_gradient", gradient, wanted[name], dtype="float32", where=name)


def two_rows(dtype: str, device: str, padding: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student and teacher logits (1, 2, 5) and `padding` entries of -inf, and a mask of ones."""
    rng = np.random.default_rng(5)
    sides = [rounded(rng.normal(size=(1, 2, 5)), dtype) for _ in range(2)]
    holes = np.full((1, 2, padding), -np.inf)
    pair = [tensor(np.concatenate([side, holes], axis=-1), dtype, device) for side in sides]
    return pair[0], pair[1], torch.ones(1, 2, dtype=torch.bool, device=device)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("sdpo/padded_vocabulary")
def test_a_padded_vocabulary(losses: Any, device: str, dtype: str, divergence: str) -> None:
    for top_k in (None, 3):
        options = {"divergence": divergence, "top_k": top_k}
        student, teacher, mask = two_rows(dtype, device, 3)
        leaf = student.requires_grad_()
        (attached,) = torch.autograd.grad(losses.sdpo.logit_loss(leaf, teacher, mask, **options), leaf)
        closed = losses.sdpo.logit_loss_grad(student.detach(), teacher, mask, **options)
        for where, gradient in (("autograd", attached), ("closed form", closed)):
            compare("sdpo/padded_vocabulary", gradient[..., 5:], np.zeros((1, 2, 3)), dtype=dtype, where=where)
            finite = float(torch.isfinite(gradient).all())
            compare("sdpo/padded_vocabulary", finite, 1.0, dtype=dtype, where=f"{where} finite")


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("sdpo/factor")
def test_a_factor_of_the_loss(losses: Any, device: str, dtype: str, divergence: str) -> None:
    """By powers of two, which round nothing; 0 makes every gradient 0."""
    student, teacher, mask = two_rows(dtype, device, 0)
    leaf = student.requires_grad_()
    (gradient,) = torch.autograd.grad(losses.sdpo.logit_loss(leaf, teacher, mask, divergence=divergence), leaf)
    for factor in (4.0, -0.5, 0.0):
        loss = factor * losses.sdpo.logit_loss(leaf, teacher, mask, divergence=divergence)
        compare("sdpo/factor", torch.autograd.grad(loss, leaf)[0], factor * gradient, dtype=dtype, where=f"{factor}")
