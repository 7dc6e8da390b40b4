"""The Triton rows by Triton's interpreter against the reference; test_triton.py runs this under TRITON_INTERPRET=1."""

import numpy as np
import pytest
import torch

from paritygate.losses import engines, sdpo, spod
from paritygate.losses.buckets import Options
from paritygate.losses.engines.triton import divergence as triton_divergence
from paritygate.losses.engines.triton import rows as triton_rows
from tests.kernels.far_rows import far_apart
from tests.kernels.kernel_batches import answer, batch
from tests.kernels.test_divergence import sure_student_holds
from tests.kernels.test_rows import holds, sure_sides_hold

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # both sides of a `where` are computed
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # bfloat16 stores truncate there


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPOD by the interpreted rows, on CPU tensors, in blocks small enough to need several."""
    monkeypatch.setattr(triton_rows, "BLOCK", dict.fromkeys(triton_rows.BLOCK, 128))
    monkeypatch.setattr(engines, "choose", lambda *_: triton_rows)
    monkeypatch.setattr(triton_divergence, "BLOCK", 128)


@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 128, 259])
@pytest.mark.parametrize("noise", [1e-3, 2.0])
def test_any_vocabulary(vocabulary: int, noise: float, dtype: torch.dtype) -> None:
    data = batch([[1, 2], [1]], vocabulary, dtype, noise=noise)
    holds(data, *spod.success_preserving_loss_and_grad(**data))


@DTYPES
@pytest.mark.parametrize("sure", [3.0, 30.0])
def test_ragged_actions_every_branch_in_place(dtype: torch.dtype, sure: float) -> None:
    data = batch([[1, 3], [9], [2, 1], [2]], 150, dtype, sure=sure)
    result, gradient = spod.success_preserving_loss_and_grad(**data, tau0=0.4, floor_weight=0.7)
    holds(data, result, gradient, tau0=0.4, floor_weight=0.7)
    in_place = data["student_logits"].clone()
    spod.success_preserving_loss_and_grad(
        **{**data, "student_logits": in_place}, out=in_place, tau0=0.4, floor_weight=0.7
    )
    assert torch.equal(in_place, gradient)
    leaf = data["student_logits"].clone().requires_grad_()
    spod.success_preserving_loss(**{**data, "student_logits": leaf}, tau0=0.4, floor_weight=0.7).loss.backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient)


@DTYPES
def test_the_numerics_table(dtype: torch.dtype) -> None:
    top = 65504.0
    data = batch([[2, 1], [3], [2]], 140, dtype)
    for side, sign in (("student_logits", 1.0), ("teacher_logits", -1.0)):
        data[side][:, ::7] = sign * top
        data[side][:, 1::7] = -sign * top
    holds(data, *spod.success_preserving_loss_and_grad(**data))

    data = batch([[2, 2], [3], [2]], 140, dtype)
    data["actions"].clamp_(max=40)
    for side in ("student_logits", "teacher_logits"):
        data[side][:, 130:] = -torch.inf
    data["teacher_logits"][:, 50:60] = -torch.inf
    result, gradient = spod.success_preserving_loss_and_grad(**data)
    holds(data, result, gradient)
    assert (gradient[:, 130:] == 0).all()
    data["success"][:] = False
    data["student_logits"][1, 45] = -torch.inf
    result, gradient = spod.success_preserving_loss_and_grad(**data)
    assert float(result.loss) == torch.inf
    assert torch.isfinite(gradient).all()

    data["teacher_logits"] = data["student_logits"].clone()
    data["success"][:] = True
    result, gradient = spod.success_preserving_loss_and_grad(**data)
    assert not result.gate.any()
    assert float(result.loss) == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize(
    ("value", "words"), [(torch.nan, "holds NaN"), (torch.inf, r"holds \+inf"), (None, "is all -inf")]
)
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_bad_row_is_named(value: float | None, words: str, side: str) -> None:
    data = batch([[2, 2], [3]], 140, torch.float32)
    if value is None:
        data[f"{side}_logits"][4] = -torch.inf
    else:
        data[f"{side}_logits"][4, 135] = value
    with pytest.raises(ValueError, match=f"{side}_logits row 4 {words}"):
        spod.success_preserving_loss(**data)


@DTYPES
@pytest.mark.parametrize(
    ("kind", "mixture"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3), ("jsd", 1 - 1e-6)]
)
@pytest.mark.parametrize("noise", [1e-3, 2.0])
def test_divergences(
    kind: str, mixture: float, noise: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same loss on float64 logits by torch: full rows, padding, a row that is masked and holds NaN."""
    torch.manual_seed(0)
    student = torch.randn(2, 2, 140)
    teacher = (student + noise * torch.randn(2, 2, 140)).to(dtype)
    student, mask = student.to(dtype), torch.tensor([[True, True], [True, False]])
    for side in (student, teacher):
        side[..., 135:] = -torch.inf
        side[1, 1, 3] = torch.nan
    results = []
    for precise in (True, False):
        engine = engines.float64 if precise else triton_divergence
        monkeypatch.setattr(engines, "choose", lambda *_, engine=engine: engine)
        leaf = (student.double() if precise else student.clone()).requires_grad_()
        loss = sdpo.logit_loss(leaf, teacher.to(leaf.dtype), mask, divergence=kind, mixture=mixture, validate=precise)
        results.append((float(loss.detach()), torch.autograd.grad(loss, leaf)[0].double()))
    (exact, slope), (value, gradient) = results
    assert value == pytest.approx(exact, rel=1e-6, abs=1e-12)
    half = 5e-4 if dtype == torch.float16 else 3e-7
    assert (gradient - slope).abs().max() <= half * slope.abs().max() + (2.0**-25 if dtype == torch.float16 else 1e-14)
    assert (gradient[1, 1] == 0).all()
    assert (gradient[..., 135:] == 0).all()


@DTYPES
@pytest.mark.parametrize(("kind", "mixture"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3)])
@pytest.mark.parametrize(("k", "tail"), [(1, True), (40, True), (40, False), (140, True)])
def test_truncated_divergences(
    k: int, tail: bool, kind: str, mixture: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same loss on float64 logits by torch: ties over several blocks, -inf among the kept, a masked row."""
    torch.manual_seed(0)
    student = (torch.randn(2, 2, 140) * 2).to(dtype)
    student[0, 1] = student[0, 1].round()
    teacher, mask = torch.randn(2, 2, 140).to(dtype), torch.tensor([[True, True], [True, False]])
    for side in (student, teacher):
        side[0, :, 135:] = -torch.inf
        side[1, 1, 3] = torch.nan
    results = []
    for precise in (True, False):
        engine = engines.float64 if precise else triton_divergence
        monkeypatch.setattr(engines, "choose", lambda *_, engine=engine: engine)
        leaf = (student.double() if precise else student.clone()).requires_grad_()
        options = {"divergence": kind, "mixture": mixture, "top_k": k, "tail": tail, "validate": precise}
        loss = sdpo.logit_loss(leaf, teacher.to(leaf.dtype), mask, **options)
        results.append((float(loss.detach()), torch.autograd.grad(loss, leaf)[0].double()))
    (exact, slope), (value, gradient) = results
    assert value == pytest.approx(exact, rel=1e-6, abs=1e-12)
    half = 5e-4 if dtype == torch.float16 else 3e-7
    assert (gradient - slope).abs().max() <= half * slope.abs().max() + (2.0**-25 if dtype == torch.float16 else 1e-14)
    assert (gradient[1, 1] == 0).all()


def test_truncated_divergences_where_the_teacher_excludes_an_entry() -> None:
    """+inf, and no gradient, where an entry kept is the teacher's -inf; in the tail it is an entry like any other."""
    student, teacher = torch.linspace(3, -3, 140)[None], torch.linspace(-2, 2, 140)[None]
    row_mask, one = torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    teacher[0, 20] = -torch.inf
    for k, tail in ((10, True), (10, False), (30, True), (30, False)):
        options = Options("reverse_kl", 0.5, k, tail)
        values, saved = triton_divergence.divergence(student, teacher, row_mask, options)
        gradient = triton_divergence.divergence_gradient(student, teacher, row_mask, options, saved, one)
        assert bool(torch.isfinite(values[0])) is (k == 10)
        assert bool(torch.isfinite(gradient).all()) is (k == 10)
        assert bool(gradient.isnan().all()) is (k == 30)


def test_divergences_where_a_side_excludes_an_entry() -> None:
    row_mask = torch.ones(1, dtype=torch.bool)
    table = {"forward_kl": (True, False), "reverse_kl": (False, True), "jsd": (True, True)}  # teacher, student is -inf
    for kind, finite in table.items():
        for hole, claim in enumerate(finite):
            sides = [torch.linspace(3, -3, 140)[None], torch.linspace(-2, 2, 140)[None]]
            sides[hole][0, 130:] = -torch.inf
            teacher, student = sides
            options = Options(kind, 0.3)
            values, saved = triton_divergence.divergence(student, teacher, row_mask, options)
            assert bool(torch.isfinite(values[0])) is claim
            one = torch.ones(1, dtype=torch.float64)
            gradient = triton_divergence.divergence_gradient(student, teacher, row_mask, options, saved, one)
            assert bool(torch.isfinite(gradient).all()) is (claim or kind == "forward_kl")


@DTYPES
@pytest.mark.parametrize("sure", [6.0, 12.0, 18.0])
def test_two_sides_that_are_sure_of_one_token(sure: float, dtype: torch.dtype) -> None:
    sure_sides_hold(sure, dtype)


@DTYPES
@pytest.mark.parametrize("sure", [4.0, 20.0, 40.0])
@pytest.mark.parametrize("vocabulary", [3, 300])
def test_a_sure_student(vocabulary: int, sure: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "choose", lambda *_: triton_divergence)
    sure_student_holds(vocabulary, sure, dtype)


def test_rows_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's number times its stride is a number of 64 bits, where rows begin beyond 2^31 entries."""
    data = batch([[3]], 140, torch.float16)
    far = {side: far_apart(data[side]) for side in ("student_logits", "teacher_logits")}
    for success in (False, True):
        data["success"][:] = success
        expected, gradient = spod.success_preserving_loss_and_grad(**data)
        out = far_apart(torch.zeros_like(gradient))
        result, _ = spod.success_preserving_loss_and_grad(**{**data, **far}, out=out)
        assert torch.equal(out, gradient)
        assert torch.equal(result.loss, expected.loss)
    row_mask, scale = torch.ones(3, dtype=torch.bool), torch.ones(3).double()
    for options in (Options("reverse_kl"), Options("jsd", 0.3), Options("forward_kl", top_k=9)):
        answers = []
        for sides in (data, far):
            student, teacher = sides["student_logits"], sides["teacher_logits"]
            values, saved = triton_divergence.divergence(student, teacher, row_mask, options)
            slope = triton_divergence.divergence_gradient(student, teacher, row_mask, options, saved, scale)
            answers.append((values, slope))
        assert torch.equal(answers[0][0], answers[1][0])
        assert torch.equal(answers[0][1], answers[1][1])


@DTYPES
def test_nearly_equal_rows_with_a_padded_vocabulary(dtype: torch.dtype) -> None:
    """-inf - -inf is no difference: the rows are near, and keep the digits of a KL of 1e-8."""
    data = batch([[2, 1], [3]], 140, dtype, noise=1e-3)
    data["actions"].clamp_(max=40)
    for side in ("student_logits", "teacher_logits"):
        data[side][:, 130:] = -torch.inf
    data["success"][:] = False
    result, gradient = spod.success_preserving_loss_and_grad(**data)
    expected, slope = answer(data)
    np.testing.assert_allclose(result.kl.double().numpy(), expected.kl, rtol=1e-4, atol=1e-13)
    scale = np.abs(slope).max()
    assert np.abs(gradient.double().numpy() - slope).max() <= (5e-4 if dtype == torch.float16 else 3e-6) * scale + 1e-12
    assert (gradient[:, 130:] == 0).all()


@pytest.mark.parametrize("options", [Options("reverse_kl"), Options("jsd", 0.3), Options("forward_kl", top_k=9)])
def test_a_masked_row_has_no_gradient_whatever_its_scale(options: Options) -> None:
    """The scale of a masked row is 0 where the loss asks; the engine has the mask, and does not count on that."""
    student, teacher = torch.randn(3, 140), torch.randn(3, 140)
    row_mask, scale = torch.tensor([True, False, True]), torch.ones(3).double()
    _, saved = triton_divergence.divergence(student, teacher, row_mask, options)
    gradient = triton_divergence.divergence_gradient(student, teacher, row_mask, options, saved, scale)
    assert (gradient[1] == 0).all()
    assert (gradient[[0, 2]] != 0).any()
