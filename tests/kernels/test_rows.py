"""SPOD's rows, compiled and by torch in float32, where parity does not reach: widths, tails, strides, schedules."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paritygate.losses import engines, spod
from paritygate.losses.engines import cpp, float32
from paritygate.losses.row_stats import RowStat
from tests.kernels.kernel_batches import answer, batch

HALF_ULP = {torch.float32: 3e-7, torch.bfloat16: 2.0**-8, torch.float16: 5e-4}
DTYPES = pytest.mark.parametrize("dtype", HALF_ULP, ids=str)
RAGGED = [[1, 3, 2], [17], [40, 5], [1, 1], [2, 16, 1]]

needs_compiler = pytest.mark.skipif(cpp.unavailable() is not None, reason=f"no kernels: {cpp.unavailable()}")
ENGINES = ["torch", pytest.param("compiled", marks=needs_compiler)]


@pytest.fixture(autouse=True, params=ENGINES)
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The rows under test: what there is without a compiler too."""
    if request.param == "compiled":
        return cpp
    monkeypatch.setattr(cpp, "serves", lambda *_: False)
    for size in ("BLOCK", "PIECE"):  # several blocks, and actions that none holds
        monkeypatch.setattr(float32, size, {"BLOCK": 4096, "PIECE": 1024}[size])
    return float32


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def holds(data: dict[str, Tensor], result: Any, gradient: Tensor, **options: Any) -> None:
    """The result is the reference's, to the tolerances of spec/losses.json."""
    expected, slope = answer(data, **options)
    assert result.gate.tolist() == expected.gate.tolist()
    np.testing.assert_allclose(float(result.loss), expected.loss, rtol=1e-6, atol=1e-7)
    for name in ("student_logprob", "teacher_logprob", "kl", "floor"):
        np.testing.assert_allclose(getattr(result, name).numpy(), getattr(expected, name), rtol=1e-6, atol=2e-6)
    worst = np.abs(gradient.double().numpy() - slope).max()
    largest = np.abs(slope).max()
    allowed = HALF_ULP[gradient.dtype] * largest + (2.0**-25 if gradient.dtype == torch.float16 else 0.0)
    assert worst <= allowed, f"gradient off by {worst:.3g}, largest entry {largest:.3g}"


@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 15, 16, 17, 31, 33, 64, 257, 2047, 2048, 2049, 4099])
def test_any_vocabulary(vocabulary: int, dtype: torch.dtype) -> None:
    data = batch([[1, 2], [3]], vocabulary, dtype, seed=vocabulary)
    holds(data, *spod.success_preserving_loss_and_grad(**data))


@DTYPES
@pytest.mark.parametrize("sure", [0.0, 6.0, 30.0])
@pytest.mark.parametrize("noise", [1e-3, 2.0])
def test_ragged_actions_every_branch(dtype: torch.dtype, sure: float, noise: float) -> None:
    """Short and long actions, protected below and above the floor, failed episodes; nearly equal rows too."""
    data = batch(RAGGED, 301, dtype, sure=sure, noise=noise)
    result, gradient = spod.success_preserving_loss_and_grad(**data, tau0=0.4, floor_weight=0.7)
    assert result.gate.any()
    assert not result.gate.all()
    holds(data, result, gradient, tau0=0.4, floor_weight=0.7)


@DTYPES
def test_out_in_place_and_autograd_are_the_same_bits(dtype: torch.dtype) -> None:
    data = batch(RAGGED, 519, dtype, sure=5.0)
    result, fresh = spod.success_preserving_loss_and_grad(**data)
    reused = torch.full_like(fresh, torch.nan)
    assert spod.success_preserving_loss_and_grad(**data, out=reused)[1] is reused
    in_place = data["student_logits"].clone()
    placed, gradient = spod.success_preserving_loss_and_grad(**{**data, "student_logits": in_place}, out=in_place)
    assert gradient is in_place
    leaf = data["student_logits"].clone().requires_grad_()
    through = spod.success_preserving_loss(**{**data, "student_logits": leaf})
    through.loss.backward()
    assert leaf.grad is not None
    for other in (reused, in_place, leaf.grad):
        assert torch.equal(fresh, other)
    for other in (placed, through):
        assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(result, other, strict=True))


@DTYPES
def test_the_thread_count_changes_no_bit(dtype: torch.dtype) -> None:
    data = batch(RAGGED * 3, 1031, dtype, sure=4.0)
    with threads(1):
        result, gradient = spod.success_preserving_loss_and_grad(**data)
    for count in (2, 3, 7):
        with threads(count):
            again, other = spod.success_preserving_loss_and_grad(**data)
        assert torch.equal(gradient, other)
        assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))


def layouts(logits: Tensor) -> dict[str, Tensor]:
    """The same logits laid out otherwise."""
    count, vocabulary = logits.shape
    odd = logits.new_zeros(count * vocabulary + 1)[1:].view(count, vocabulary)
    wide = logits.new_zeros(count, 2 * vocabulary + 3)[:, 3 : 3 + vocabulary]
    turned = logits.new_zeros(vocabulary, count).t()
    every_other = logits.new_zeros(2 * count, vocabulary)[::2]
    views = {"misaligned": odd, "inside a wider matrix": wide, "transposed": turned, "every other row": every_other}
    for view in views.values():
        view.copy_(logits)
    return views


@DTYPES
def test_any_layout_of_logits_and_out(dtype: torch.dtype) -> None:
    data = batch([[2, 3], [4], [20]], 261, dtype)
    result, expected = spod.success_preserving_loss_and_grad(**data)
    students, teachers = layouts(data["student_logits"]), layouts(data["teacher_logits"])
    for name, student in students.items():
        for teacher in teachers.values():
            for out in (None, torch.empty_like(expected), layouts(expected * 0)[name], student.clone()):
                moved = {**data, "student_logits": student, "teacher_logits": teacher}
                again, gradient = spod.success_preserving_loss_and_grad(**moved, out=out)
                assert torch.equal(gradient, expected), name
                assert torch.equal(again.loss, result.loss)
        view = layouts(data["student_logits"])[name]
        assert torch.equal(
            spod.success_preserving_loss_and_grad(**{**data, "student_logits": view}, out=view)[1], expected
        )
        assert torch.equal(student, data["student_logits"]), "the input was changed"


@DTYPES
def test_float16_extremes_keep_the_maximum_apart(dtype: torch.dtype) -> None:
    data = batch([[2, 1], [3], [2]], 96, dtype)
    top = 65504.0 if dtype == torch.float16 else 65280.0
    for side, sign in (("student_logits", 1.0), ("teacher_logits", -1.0)):
        data[side][:, ::7] = sign * top
        data[side][:, 1::7] = -sign * top
    data["student_logits"][0] += 0.5
    holds(data, *spod.success_preserving_loss_and_grad(**data))


@DTYPES
def test_entries_of_minus_infinity(dtype: torch.dtype) -> None:
    data = batch([[2, 2], [3], [2]], 83, dtype)
    data["actions"].clamp_(max=40)
    for side in ("student_logits", "teacher_logits"):
        data[side][:, 70:] = -math.inf  # a padded vocabulary: nothing, and gradient 0
    data["teacher_logits"][:, 50:60] = -math.inf  # teacher alone: nothing
    result, gradient = spod.success_preserving_loss_and_grad(**data)
    holds(data, result, gradient)
    assert (gradient[:, 70:] == 0).all()
    data["success"] = torch.zeros(3, dtype=torch.bool)
    data["student_logits"][1, 45] = -math.inf  # student alone, under teacher mass: the loss is +inf
    result, gradient = spod.success_preserving_loss_and_grad(**data)
    assert float(result.loss) == math.inf
    assert result.kl[0] == math.inf
    assert torch.isfinite(gradient).all()


def test_mass_too_small_for_float32_is_still_mass(rows: ModuleType) -> None:
    """exp(-200) is no float32, but it is teacher mass; exp(-131008) is none in float64 either."""
    student, teacher = torch.zeros(2, 4), torch.tensor([[0.0, 0, 0, -200], [0, 0, 0, -131008]])
    student[:, 3] = -math.inf
    kl = rows.statistics(student, teacher, torch.zeros(2, dtype=torch.int64))[:, RowStat.KL]
    assert kl[0] == math.inf
    assert kl[1] == pytest.approx(0.0, abs=1e-7)


@DTYPES
@pytest.mark.parametrize("noise", [0.0, 0.1, 2.0])
def test_a_sure_token_among_many_unlikely_ones_keeps_its_logprob(noise: float, dtype: torch.dtype) -> None:
    """exp(-16.7) is less than half an ulp of 1: added to it in float32, a hundred thousand of them are nothing."""
    torch.manual_seed(0)
    levels, places = [-16.3, -16.7, -17.25, -18.0, -20.0], [0, 5, 2047, 70_000, 100_002]
    student = torch.stack([torch.full((100_003,), level) for level in levels for _ in places])
    student += 0.05 * torch.rand(student.shape)
    teacher = student + noise * torch.rand(student.shape)
    at = torch.tensor(places * len(levels))
    rows = torch.arange(len(at))
    student[rows, at], teacher[rows, at] = 0.0, -0.125
    student, teacher = student.to(dtype), teacher.to(dtype)
    data = {"actions": at, "action_index": rows, "episode_index": rows, "success": rows < 0}
    result, gradient = spod.success_preserving_loss_and_grad(student, teacher, **data)
    log_p, log_q = (x.double().log_softmax(-1) for x in (student, teacher))
    wanted = {
        "student_logprob": log_p[rows, at],
        "teacher_logprob": log_q[rows, at],
        "kl": (log_q.exp() * (log_q - log_p)).sum(-1),
    }
    for name, exact in wanted.items():
        assert ((getattr(result, name).double() - exact).abs() <= 1e-7 + 1e-6 * exact.abs()).all(), name
    slope = (log_p.exp() - log_q.exp()) / len(at)
    half_an_ulp = 6e-8 / len(at) + (2.0**-25 if dtype == torch.float16 else 0.0)  # of a probability, and of float16
    allowed = HALF_ULP[dtype] * slope.abs().amax(-1) + half_an_ulp
    assert ((gradient.double() - slope).abs().amax(-1) <= allowed).all()


@DTYPES
def test_identical_rows_tie_exactly(dtype: torch.dtype) -> None:
    data = batch(RAGGED, 1000, dtype)
    data["teacher_logits"] = data["student_logits"].clone()
    data["success"][:] = True
    result, gradient = spod.success_preserving_loss_and_grad(**data)
    assert not result.gate.any()
    assert float(result.loss) == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "holds NaN"), (math.inf, r"holds \+inf"), (None, "is all -inf")]
)
@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("form", ["autograd", "fresh", "in place"])
def test_a_bad_row_is_named(value: float | None, words: str, side: str, form: str) -> None:
    data = batch([[2, 2], [3]], 40, torch.float32)
    row = data[f"{side}_logits"][4]
    if value is None:
        row.fill_(-math.inf)
    else:
        row[17] = value
    calls = {
        "autograd": spod.success_preserving_loss,
        "fresh": spod.success_preserving_loss_and_grad,
        "in place": partial(spod.success_preserving_loss_and_grad, out=data["student_logits"]),
    }
    with pytest.raises(ValueError, match=f"{side}_logits row 4 {words}"):
        calls[form](**data)
    assert math.isnan(float(spod.success_preserving_loss(**data, validate=False).loss)) or side == "student"


def test_unvalidated_tokens_read_and_write_inside_their_rows() -> None:
    data = batch([[2, 1]], 40, torch.float32)
    data["actions"] = torch.tensor([-1, 40, 10**12])
    guarded = torch.full((5, 40), 7.0)
    result, _ = spod.success_preserving_loss_and_grad(**data, out=guarded[1:4], validate=False)
    assert result.student_logprob.isnan().all()
    assert not result.gate.any()
    assert (guarded[0] == 7).all()
    assert (guarded[4] == 7).all()


@DTYPES
def test_backward_scales_before_it_rounds_and_can_be_called_twice(dtype: torch.dtype) -> None:
    """As a gradient scaler needs: 2^14 times the loss has 2^14 times the gradient, where that would vanish too."""
    data = batch([[4, 4]] * 40, 400, dtype)
    leaf = data["student_logits"].clone().requires_grad_()
    loss = spod.success_preserving_loss(**{**data, "student_logits": leaf}).loss * 2.0**14
    (once,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(once, twice)
    _, slope = answer(data)
    assert np.abs(once.double().numpy() / 2.0**14 - slope).max() <= HALF_ULP[dtype] * np.abs(slope).max()


@DTYPES
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1])
def test_a_nan_from_outside_is_a_nan_everywhere(bits: int, dtype: torch.dtype) -> None:
    """Rounding adds to the bits of a number: those of a full NaN would become a zero."""
    data = batch(RAGGED, 301, dtype, sure=5.0)
    leaf = data["student_logits"].requires_grad_()
    outer = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    result = spod.success_preserving_loss(**data)
    result.loss.backward(outer.to(result.loss.dtype))
    assert leaf.grad is not None
    idle = result.gate[data["action_index"]]
    assert leaf.grad[~idle].isnan().all()


def test_the_gradient_is_differentiable_where_asked() -> None:
    data = batch([[2, 1], [2]], 11, torch.float32, sure=2.0)
    leaf = data["student_logits"].clone().requires_grad_()
    loss = spod.success_preserving_loss(**{**data, "student_logits": leaf}).loss
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), leaf)
    assert torch.isfinite(second).all()
    assert second.abs().max() > 0


@DTYPES
def test_mixed_dtypes_and_float64_are_torch_s(dtype: torch.dtype) -> None:
    data = batch([[2, 1], [2]], 50, dtype)
    data["teacher_logits"] = data["teacher_logits"].double()
    assert engines.choose("rows", data["student_logits"], data["teacher_logits"]) is engines.float64
    holds(data, *spod.success_preserving_loss_and_grad(**data))


@DTYPES
@pytest.mark.parametrize("sure", [6.0, 12.0, 18.0])
def test_two_sides_that_are_sure_of_one_token_differ_in_the_rest(sure: float, dtype: torch.dtype) -> None:
    sure_sides_hold(sure, dtype)


def sure_sides_hold(sure: float, dtype: torch.dtype) -> None:
    """p and q are 1 but for e^-sure there: what is left of p - q has its digits, of the sure token too.

    The others are exponentials of float32 differences of `sure` and up to 8 nats more; half an ulp of both shows.
    """
    data = batch([[2, 1], [3]], 40, dtype, seed=int(sure))
    for logits_of, more in ((data["student_logits"], 0.0), (data["teacher_logits"], 2.0)):
        logits_of[:, 7] = logits_of.amax(-1) + sure + more
    data["success"][:] = False
    result, gradient = spod.success_preserving_loss_and_grad(**data)
    _, slope = answer(data)
    rows = np.abs(slope).max(1, keepdims=True)
    allowed = (HALF_ULP[dtype] + 2.0**-23 * (sure + 8)) * rows + (2.0**-25 if dtype == torch.float16 else 0.0)
    assert (np.abs(gradient.double().numpy() - slope) <= allowed).all()
    assert float(result.loss) > 0


@pytest.mark.parametrize("far", [30.0, 300.0, 65504.0])
@pytest.mark.parametrize("below", [1.3, 4.586, 7.77, 11.1])
@pytest.mark.parametrize("vocabulary", [2, 300])
def test_one_entry_that_makes_the_whole_divergence(vocabulary: int, below: float, far: float, rows: ModuleType) -> None:
    """An entry that the teacher finds unlikely and the student impossible: q times thousands of nats.

    q is the exponential of a float32 difference; the compiled rows know what that lost, torch's do not.
    """
    data = batch([[1] * 64], vocabulary, torch.float32)
    torch.manual_seed(int(10 * below))
    student, teacher = torch.zeros(64, vocabulary), torch.full((64, vocabulary), -60.0)
    student[:, -1] -= far
    teacher[:, 0] = 0.1 + 0.9 * torch.rand(64)
    teacher[:, -1] = -below * (1.0 + 0.1 * torch.rand(64))
    data["student_logits"], data["teacher_logits"], data["success"][:] = student, teacher, False
    result, _ = spod.success_preserving_loss_and_grad(**data)
    expected, _ = answer(data)
    lost = 2.0**-23 * (below + 2) if rows is float32 else 0.0
    np.testing.assert_allclose(result.kl.double().numpy(), expected.kl, rtol=2.5e-7 + lost, atol=1e-7)


@pytest.mark.parametrize("huge", [1e8, 3e10, 1e30])
def test_logits_beside_which_a_nat_is_nothing(huge: float) -> None:
    """Float32 logits whose ulp is more than the reach of an exponential: what is below the largest has no mass."""
    data = batch([[1], [2]], 300, torch.float32)
    data["teacher_logits"][:, 5] = data["student_logits"][:, 5] = huge
    data["teacher_logits"][1, 6] = huge
    data["success"][:] = False
    result, gradient = spod.success_preserving_loss_and_grad(**data)
    expected, slope = answer(data)
    np.testing.assert_allclose(result.kl.double().numpy(), expected.kl, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient.double().numpy(), slope, rtol=1e-6, atol=1e-7)
