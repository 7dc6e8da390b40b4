"""SPOD, packed, in place and padded, against the reference, per dtype and regime; the reference against 60 digits."""

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from paritygate.harness import compare
from paritygate.harness.strategies import DTYPES, REGIMES, rounded, tensor
from paritygate_reference import sdpo as sdpo_reference
from paritygate_reference import spod as reference
from tests import oracle
from tests.cases import SpodCase, log_softmax, settled, spod_cases

PARTS = ("student_logprob", "teacher_logprob", "kl", "floor")


def expected_of(case: SpodCase) -> tuple[reference.SpodLoss, list[float], np.ndarray]:
    """The reference's loss, its gates and its gradient, packed."""
    episodes = case.episodes()
    loss = reference.success_preserving_loss(episodes, **case.options)
    gradient = reference.success_preserving_grad(episodes, **case.options)
    return loss, flat(loss.gate), np.concatenate([rows for episode in gradient for rows in episode])


def flat(ragged: list[list[Any]]) -> list[Any]:
    """One list of what episodes hold of their actions."""
    return [value for episode in ragged for value in episode]


@pytest.mark.obligation("spod/loss", "spod/parts", "spod/gate", "spod/gradient")
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed(losses: Any, device: str, dtype: str, regime: str) -> None:
    @settings(max_examples=50)
    @given(spod_cases(dtype, regime))
    def loss_parts_and_gradient_are_the_reference_s(case: SpodCase) -> None:
        expected, gates, slopes = expected_of(case)
        arguments = case.arguments(device)
        arguments["student_logits"].requires_grad_()
        result = losses.spod.success_preserving_loss(**arguments)
        labels = {"dtype": case.dtype, "regime": case.regime}
        compare("spod/gate", result.gate, gates, dtype=case.dtype)
        compare("spod/loss", result.loss, expected.loss, **labels)
        for part in PARTS:
            compare("spod/parts", getattr(result, part), flat(getattr(expected, part)), where=part, **labels)
        (gradient,) = torch.autograd.grad(result.loss, arguments["student_logits"])
        compare("spod/gradient", gradient, slopes, **labels)

    loss_parts_and_gradient_are_the_reference_s()


@pytest.mark.obligation("spod/loss", "spod/parts", "spod/gradient")
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_of_a_large_vocabulary(losses: Any, device: str, dtype: str, regime: str) -> None:
    @settings(max_examples=3)
    @given(spod_cases(dtype, regime, vocabularies=(1000, 4097, 20_011)))
    def loss_parts_and_gradient_are_the_reference_s(case: SpodCase) -> None:
        expected, _, slopes = expected_of(case)
        result, gradient = losses.spod.success_preserving_loss_and_grad(**case.arguments(device))
        labels = {"dtype": case.dtype, "regime": case.regime}
        compare("spod/loss", result.loss, expected.loss, **labels)
        for part in PARTS:
            compare("spod/parts", getattr(result, part), flat(getattr(expected, part)), where=part, **labels)
        compare("spod/gradient", gradient, slopes, **labels)

    loss_parts_and_gradient_are_the_reference_s()


@pytest.mark.obligation("spod/in_place")
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_autograd_and_in_place(losses: Any, device: str, dtype: str, regime: str) -> None:
    @settings(max_examples=15)
    @given(spod_cases(dtype, regime))
    def each_form_of_the_gradient_is_the_reference_s(case: SpodCase) -> None:
        expected, _, slopes = expected_of(case)
        labels = {"dtype": case.dtype, "regime": case.regime}
        for form in ("fresh", "out", "in place"):
            arguments = case.arguments(device)
            logits = arguments["student_logits"]
            out = {"fresh": None, "out": torch.full_like(logits, torch.nan), "in place": logits}[form]
            result, gradient = losses.spod.success_preserving_loss_and_grad(**arguments, out=out)
            assert out is None or gradient.data_ptr() == out.data_ptr(), f"{form}: another tensor came back"
            compare("spod/in_place", result.loss, expected.loss, where=f"{form}, loss", **labels)
            compare("spod/in_place", gradient, slopes, where=f"{form}, gradient", **labels)

    each_form_of_the_gradient_is_the_reference_s()


def padded(case: SpodCase, device: str, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    """The case as (E, S, T, V) with NaN and infinities where nothing is, and the mask."""
    actions_of = np.bincount(case.episode_index)
    shape = (len(actions_of), int(actions_of.max()) + 1, int(np.bincount(case.action_index).max()) + 2)
    student = np.full((*shape, case.student.shape[1]), rng.choice([np.nan, np.inf, -np.inf]))
    teacher, tokens = np.full_like(student, np.nan), np.full(shape, -1)
    mask = np.zeros(shape, dtype=np.int64)
    start = 0
    for a, e in enumerate(case.episode_index):
        s, n = a - int(np.searchsorted(case.episode_index, e)), int((case.action_index == a).sum())
        at = np.sort(rng.choice(shape[2], size=n, replace=False))
        student[e, s, at], teacher[e, s, at] = case.student[start : start + n], case.teacher[start : start + n]
        tokens[e, s, at], mask[e, s, at] = case.actions[start : start + n], 1
        start += n
    return {
        "student_logits": tensor(student, case.dtype, device),
        "teacher_logits": tensor(teacher, case.dtype, device),
        "actions": torch.tensor(tokens, device=device),
        "mask": torch.tensor(mask, device=device),
        "success": torch.tensor(case.success, device=device),
        **case.options,
    }, mask


@pytest.mark.obligation("spod/padded")
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded(losses: Any, device: str, dtype: str, regime: str) -> None:
    @settings(max_examples=12)
    @given(spod_cases(dtype, regime, vocabularies=(2, 7)))
    def the_padded_form_is_the_reference_s(case: SpodCase) -> None:
        expected, _, slopes = expected_of(case)
        arguments, mask = padded(case, device, np.random.default_rng(case.student.size))
        arguments["student_logits"].requires_grad_()
        result = losses.spod.success_preserving_loss_padded(**arguments)
        (gradient,) = torch.autograd.grad(result.loss, arguments["student_logits"])
        labels = {"dtype": case.dtype, "regime": case.regime}
        compare("spod/padded", result.loss, expected.loss, **labels)
        compare("spod/padded", gradient.cpu()[torch.tensor(mask == 1)], slopes, **labels)
        outside = gradient.cpu()[torch.tensor(mask == 0)]
        assert torch.equal(outside, torch.zeros_like(outside)), "a gradient where nothing is"

    the_padded_form_is_the_reference_s()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("spod/fused")
def test_fused_with_the_head(losses: Any, device: str, dtype: str) -> None:
    """Hidden states and heads of halves and quarters, so that the logits are exact in every dtype."""

    form = inspect.signature(losses.spod.fused_linear_success_preserving_loss)
    in_chunks = "chunk_tokens" in form.parameters

    @settings(max_examples=30)
    @given(spod_cases(dtype, "ordinary", vocabularies=(2, 7, 33)))
    def the_fused_form_is_the_reference_s(case: SpodCase) -> None:
        rng = np.random.default_rng(case.student.size)
        rows, vocabulary = case.student.shape
        hidden = [rng.integers(-2, 3, size=(rows, 4)) / 2 for _ in range(2)]
        head = [rng.integers(-4, 5, size=(vocabulary, 4)) / 2 for _ in range(2)]
        case.student, case.teacher = (h @ w.T for h, w in zip(hidden, head, strict=True))
        case.success = settled(case)
        expected, gates, slopes = expected_of(case)
        leaves = [tensor(x, dtype, device).requires_grad_() for x in (hidden[0], head[0])]
        arguments = {k: v for k, v in case.arguments(device).items() if not k.endswith("_logits")}
        if in_chunks:  # actions longer than a chunk, chunks of several actions, one chunk of all
            arguments["chunk_tokens"] = int(rng.choice([1, 2, 3, rows + 1]))
        result = losses.spod.fused_linear_success_preserving_loss(
            *leaves, tensor(hidden[1], dtype, device), tensor(head[1], dtype, device), **arguments
        )
        compare("spod/fused", result.gate, gates, dtype=dtype, where="gate")
        compare("spod/fused", result.loss, expected.loss, dtype=dtype, where="loss")
        gradients = torch.autograd.grad(result.loss, leaves)
        compare("spod/fused", gradients[0], slopes @ head[0], dtype=dtype, where="hidden")
        compare("spod/fused", gradients[1], slopes.T @ hidden[0], dtype=dtype, where="head")

    the_fused_form_is_the_reference_s()


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.obligation("spod/service_weights")
def test_service_weights_have_the_gradient_of_the_loss(losses: Any, device: str, top_k: int | None) -> None:
    """`-sum w log p(x)` over K tokens and the sampled one: SPOD's gradient, its KL over K and a tail where K < V."""

    @settings(max_examples=60)
    @given(spod_cases("float64", "ordinary", vocabularies=(5, 33)))
    def the_weighted_cross_entropy_has_the_loss_s_gradient(case: SpodCase) -> None:
        rows = np.arange(len(case.actions))
        order = np.argsort(-case.student, axis=-1, kind="stable")
        kept = torch.tensor(order[:, :top_k], device=device)
        sampled = torch.tensor(case.actions, device=device)[:, None]
        leaf = torch.tensor(case.student, device=device, requires_grad=True)
        log_p, log_q = leaf.log_softmax(-1), torch.tensor(case.teacher, device=device).log_softmax(-1)
        inputs = [x.gather(1, at) for at in (kept, sampled) for x in (log_p, log_q)]
        indices = {
            k: v for k, v in case.arguments(device).items() if k not in ("student_logits", "teacher_logits", "actions")
        }
        weights = losses.spod.success_preserving_weights(
            *inputs[:2], inputs[2][:, 0], inputs[3][:, 0], tail=top_k is not None, **indices
        )
        cross_entropy = -(weights.weights * inputs[0]).sum() - (weights.sampled * inputs[2][:, 0]).sum()
        (gradient,) = torch.autograd.grad(cross_entropy, leaf)
        _, gates, expected = expected_of(case)
        compare("spod/service_weights", weights.gate, gates, dtype="float64", where="gate")
        if top_k is not None:
            n, s = np.bincount(case.action_index), np.bincount(case.episode_index)
            of_row = 1.0 / (n * s[case.episode_index] * len(s))[case.action_index]
            masses = np.exp(log_softmax(case.student))
            dropped = [float(masses[row, order[row, top_k:]].sum()) < 1e-6 for row in rows]
            compare("spod/service_weights", weights.tail_dropped, dropped, dtype="float64", where="dropped")
            for row in rows[~np.array(gates)[case.action_index]]:
                options = {"divergence": "forward_kl", "top_k": top_k, "tail": not dropped[row]}
                pair = case.student[row][None, None], case.teacher[row][None, None]
                expected[row] = of_row[row] * sdpo_reference.logit_loss_grad(*pair, np.ones((1, 1)), **options)[0, 0]
        compare("spod/service_weights", gradient, expected, dtype="float64")

    the_weighted_cross_entropy_has_the_loss_s_gradient()


@pytest.mark.obligation("spod/tie")
def test_a_tie_is_not_protected(losses: Any, device: str) -> None:
    """Equal rows tie to the last bit in every dtype and shape, and so do rows that differ by nothing that is read."""
    rng = np.random.default_rng(5)
    for dtype in DTYPES:
        for vocabulary, rows in ((2, 1), (7, 5), (1000, 3), (32_003, 2)):
            logits = tensor(rng.normal(size=(rows, vocabulary)) * 5, dtype, device)
            index = torch.zeros(rows, dtype=torch.int64, device=device)
            result = losses.spod.success_preserving_loss(
                logits, logits.clone(), index, index, index[:1], torch.ones(1, dtype=torch.bool, device=device)
            )
            compare("spod/tie", result.gate, [False], dtype=dtype, where=f"V={vocabulary}")
            compare("spod/tie", result.floor, [0.0], dtype=dtype, where=f"V={vocabulary}, floor")


@pytest.mark.obligation("spod/tie")
def test_equal_rows_in_another_order_tie(losses: Any, device: str) -> None:
    """Of a, b, c and a, c, b the differences are 0, x and -x; the two totals may differ in the last bit.

    In float64: a kernel's log-probability of a row need not have the same bits on both sides.
    """
    rng = np.random.default_rng(7)
    index = torch.zeros(3, dtype=torch.int64, device=device)
    success = torch.ones(1, dtype=torch.bool, device=device)
    for vocabulary in (5, 130):
        for _ in range(12):
            rows = tensor(rng.normal(size=(3, vocabulary)) * 3, "float64", device)
            result = losses.spod.success_preserving_loss(rows, rows[[0, 2, 1]], index, index, index[:1], success)
            compare("spod/tie", result.gate, [False], dtype="float64", where=f"V={vocabulary}, another order")


@pytest.mark.obligation("spod/gate")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_trillionth_of_a_nat_decides_beside_a_row_of_100000(losses: Any, device: str, dtype: str) -> None:
    """Row by row log q - log p is 0 and -x / 2; of totals of -100,000.7 nats an ulp is ten times as much."""
    index = torch.zeros(2, dtype=torch.int64, device=device)
    for x in (1e-12, -1e-12):
        student = tensor(np.array([[-1e5, 0.0], [0.0, 0.0]]), dtype, device)
        teacher = tensor(np.array([[-1e5, 0.0], [-x, 0.0]]), dtype, device)
        success = torch.ones(1, dtype=torch.bool, device=device)
        arguments, where = (student, teacher, index, index, index[:1], success), f"x = {x}"
        result, gradient = losses.spod.success_preserving_loss_and_grad(*arguments)
        compare("spod/gate", result.gate, [x > 0.0], dtype=dtype, where=where)
        # Protected, the floor pulls at the second row's token with (p - 1) / 2 = -1/4; else the KL does, with 1e-13.
        compare("spod/gate", gradient[1, 0] < -0.1, x > 0.0, dtype=dtype, where=f"{where}, gradient")


@pytest.mark.obligation("spod/gate")
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_a_millionth_of_a_nat_decides(losses: Any, device: str, dtype: str) -> None:
    """log q - log p is -x / 2 for teacher logits (-x, 0) and student logits (0, 0): protected, by however little."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for x in (1e-6, -1e-6):
        student, teacher = tensor(np.zeros((1, 2)), dtype, device), tensor(np.array([[-x, 0.0]]), dtype, device)
        success = torch.ones(1, dtype=torch.bool, device=device)
        arguments, where = (student, teacher, index, index, index, success), f"teacher logits ({-x}, 0)"
        result, gradient = losses.spod.success_preserving_loss_and_grad(*arguments, tau0=1.0)
        compare("spod/gate", result.gate, [x > 0], dtype=dtype, where=where)
        # Protected, the floor pulls at the action's logit with p - 1 = -1/2; else the KL does, with less than 1e-6.
        compare("spod/gate", gradient[:, 0] < -0.25, [x > 0], dtype=dtype, where=f"{where}, gradient")
        compare("spod/gate", losses.spod.success_preserving_loss(*arguments).gate, [x > 0], dtype=dtype, where=where)


@pytest.mark.obligation("spod/tie")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tie_has_no_gradient(losses: Any, device: str, dtype: str) -> None:
    """Nor has the floor's: the KL's is 0 between equal rows, and only a protected action has the other."""
    rng = np.random.default_rng(6)
    for vocabulary, rows in ((2, 1), (7, 5), (1000, 3)):
        logits = tensor(rng.normal(size=(rows, vocabulary)), dtype, device)
        index = torch.zeros(rows, dtype=torch.int64, device=device)
        given_ = (logits.clone(), index, index, index[:1], torch.ones(1, dtype=torch.bool, device=device))
        where = f"V={vocabulary}, gradient"
        gradient = losses.spod.success_preserving_loss_and_grad(logits, *given_, tau0=1.0)[1]
        compare("spod/tie", gradient, np.zeros((rows, vocabulary)), dtype=dtype, where=where)
        leaf = logits.requires_grad_()
        attached = torch.autograd.grad(losses.spod.success_preserving_loss(leaf, *given_, tau0=1.0).loss, leaf)[0]
        compare("spod/tie", attached, np.zeros((rows, vocabulary)), dtype=dtype, where=where)


@pytest.mark.obligation("spod/negative_control")
def test_keeping_the_kl_at_protected_actions_is_told_apart(losses: Any, device: str) -> None:
    """The source's own negative control: its loss lies above SPOD's by the KL that SPOD leaves out."""

    @settings(max_examples=60)
    @given(spod_cases("float64", "ordinary"))
    def the_sum_of_kl_and_floor_differs(case: SpodCase) -> None:
        case.success[:] = True
        result = losses.spod.success_preserving_loss(**case.arguments(device))
        case.success[:] = False
        kept = losses.spod.success_preserving_loss(**case.arguments(device))
        gate = result.gate.cpu().numpy().astype(bool)
        if gate.any():
            both = np.where(
                gate, case.options["floor_weight"] * result.floor.cpu().numpy() + kept.kl.cpu().numpy(), 0.0
            )
            weights = 1.0 / (np.bincount(case.episode_index)[case.episode_index] * len(case.success))
            left_out = float((weights * np.where(gate, kept.kl.cpu().numpy(), 0.0)).sum())
            control = float((weights * np.where(gate, both, result.kl.cpu().numpy())).sum())
            assert left_out > 0.0
            compare("spod/negative_control", control - float(result.loss), left_out, dtype="float64")

    the_sum_of_kl_and_floor_differs()


@pytest.mark.obligation("spod/oracle")
@pytest.mark.parametrize("regime", REGIMES)
def test_reference_against_sixty_digits(regime: str) -> None:
    @settings(max_examples=20)
    @given(spod_cases("float64", regime, vocabularies=(2, 4)))
    def the_reference_has_sixty_digits_loss_gate_and_gradient(case: SpodCase) -> None:
        expected, gates, slopes = expected_of(case)
        exact = oracle.spod(case.episodes(), **case.options)
        labels = {"dtype": "float64", "regime": case.regime, "oracle": "mpmath"}
        compare("spod/oracle", gates, exact["gate"], **labels)
        compare("spod/oracle", expected.loss, oracle.as_floats(exact["loss"]), **labels)
        if np.isfinite(expected.loss):
            compare("spod/oracle", slopes, oracle.as_floats(exact["gradient"]), **labels)

    the_reference_has_sixty_digits_loss_gate_and_gradient()


def two_actions(dtype: str, device: str, padding: int = 0) -> dict[str, Any]:
    """An action of two tokens and one of one, in an episode that succeeded and one that failed; five entries."""
    rng = np.random.default_rng(6)
    holes = np.full((3, padding), -np.inf)
    student, teacher = (np.concatenate([rounded(rng.normal(size=(3, 5)), dtype), holes], axis=1) for _ in range(2))
    teacher[:2, 0] = -8.0  # the first is protected, and under its floor
    index = torch.tensor([0, 0, 1], device=device)
    return {
        "student_logits": tensor(student, dtype, device).requires_grad_(),
        "teacher_logits": tensor(teacher, dtype, device),
        "actions": torch.tensor([0, 0, 1], device=device),
        "action_index": index,
        "episode_index": index[1:],
        "success": torch.tensor([True, False], device=device),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("spod/padded_vocabulary")
def test_a_padded_vocabulary(losses: Any, device: str, dtype: str) -> None:
    padded = two_actions(dtype, device, padding=3)
    loss = losses.spod.success_preserving_loss(**padded).loss
    (attached,) = torch.autograd.grad(loss, padded["student_logits"])
    detached = {**padded, "student_logits": padded["student_logits"].detach()}
    closed = losses.spod.success_preserving_loss_and_grad(**detached)[1]
    for where, gradient in (("autograd", attached), ("closed form", closed)):
        compare("spod/padded_vocabulary", gradient[:, 5:], np.zeros((3, 3)), dtype=dtype, where=where)
        finite = float(torch.isfinite(gradient).all())
        compare("spod/padded_vocabulary", finite, 1.0, dtype=dtype, where=f"{where} finite")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("spod/factor")
def test_a_factor_of_the_loss(losses: Any, device: str, dtype: str) -> None:
    """By powers of two, which round nothing; 0 makes every gradient 0."""
    given_ = two_actions(dtype, device)
    leaf = given_["student_logits"]
    rest = {k: v for k, v in given_.items() if not k.endswith("_logits")}
    heads = [tensor(x, dtype, device) for x in (np.eye(5)[:3] * 2, np.arange(25.0).reshape(5, 5) / 8)]
    leaves = [x.requires_grad_() for x in heads]
    teachers = [x.detach().flip(0) for x in heads]
    padded_logits = [given_[f"{side}_logits"][None, :, None] for side in ("student", "teacher")]
    ones = torch.ones(1, 3, 1, dtype=torch.bool, device=device)

    def packed() -> torch.Tensor:
        return losses.spod.success_preserving_loss(**given_).loss

    def padded() -> torch.Tensor:
        tokens = given_["actions"][None, :, None]
        return losses.spod.success_preserving_loss_padded(*padded_logits, tokens, ones, given_["success"][:1]).loss

    def fused() -> torch.Tensor:
        return losses.spod.fused_linear_success_preserving_loss(*leaves, *teachers, **rest).loss

    for name, form, inputs in (("packed", packed, [leaf]), ("padded", padded, [leaf]), ("fused", fused, leaves)):
        gradients = torch.autograd.grad(form(), inputs)
        for factor in (4.0, -0.5, 0.0):
            for scaled, gradient in zip(torch.autograd.grad(factor * form(), inputs), gradients, strict=True):
                compare("spod/factor", scaled, factor * gradient, dtype=dtype, where=f"{name} {factor}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.obligation("spod/at_floor")
def test_exactly_at_the_floor(losses: Any, device: str, dtype: str) -> None:
    """log p = -log 2 = log tau0, to the bit in float64: the floor acts below it, not at it."""
    assert math.log(0.5) == -math.log(2.0)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    leaf = tensor([[0.0, 0.0]], dtype, device).requires_grad_()
    rest = {"actions": index, "action_index": index, "episode_index": index}
    arguments = {"teacher_logits": tensor([[-1.0, 0.0]], dtype, device), **rest}
    success = torch.ones(1, dtype=torch.bool, device=device)
    result = losses.spod.success_preserving_loss(leaf, success=success, tau0=0.5, **arguments)
    compare("spod/at_floor", result.gate, [True], dtype=dtype, where="gate")
    compare("spod/at_floor", result.loss, 0.0, dtype=dtype, where="loss")
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    compare("spod/at_floor", gradient, [[0.0, 0.0]], dtype=dtype, where="gradient")
    _, closed = losses.spod.success_preserving_loss_and_grad(leaf.detach(), success=success, tau0=0.5, **arguments)
    compare("spod/at_floor", closed, [[0.0, 0.0]], dtype=dtype, where="closed form")
