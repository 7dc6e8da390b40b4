"""The fused loss against the loss of its logits: any chunk, long actions, protection, early exit, gradients."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paritygate.losses import gate, spod
from paritygate.losses.spod import fused, row_ops
from tests.kernels.kernel_batches import batch

VOCABULARY, WIDTH, TEACHER_WIDTH = 301, 24, 40
EPISODES = [[1, 3, 2], [40], [5, 1], [2, 2], [9, 20, 1]]
LIMIT = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", LIMIT, ids=str)


def heads(dtype: torch.dtype, sure: float = 0.0) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Student hidden and head, the teacher's, and what comes with them; the action taken gains about `sure` nats."""
    data = batch(EPISODES, VOCABULARY, dtype)
    generator, count = torch.Generator().manual_seed(1), len(data["actions"])  # its own: threads call this

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    head, hidden = normal(VOCABULARY, WIDTH) * 0.3, normal(count, WIDTH)
    hidden += sure * head[data["actions"]] / head[data["actions"]].square().sum(1, keepdim=True)
    teacher = [normal(count, TEACHER_WIDTH), normal(VOCABULARY, TEACHER_WIDTH) * 0.3]
    rest = {name: data[name] for name in ("actions", "action_index", "episode_index", "success")}
    return [hidden.to(dtype), head.to(dtype)], [x.to(dtype) for x in teacher], rest


def expected(student: list[Tensor], teacher: list[Tensor], rest: dict[str, Tensor], **options: Any) -> Any:
    """The loss of the logits, and its gradients for hidden states and head by the chain rule in float64."""
    logits = (student[0] @ student[1].t()).requires_grad_()
    result = spod.success_preserving_loss(logits, teacher[0] @ teacher[1].t(), **rest, **options)
    (slope,) = torch.autograd.grad(result.loss, logits)
    return result, slope.double() @ student[1].double(), slope.double().t() @ student[0].double()


def close(actual: Tensor, target: Tensor, limit: float) -> None:
    assert (actual.double() - target).abs().max() <= limit * target.abs().max() + 1e-12


@DTYPES
@pytest.mark.parametrize("sure", [0.0, 3.0, 40.0])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 3, 7, 16])
def test_the_loss_of_the_logits(dtype: torch.dtype, sure: float, exact: bool, chunk: int | None) -> None:
    student, teacher, rest = heads(dtype, sure)
    result, of_hidden, of_head = expected(student, teacher, rest, floor_weight=0.6)
    leaves = [x.clone().requires_grad_() for x in student]
    fused = spod.fused_linear_success_preserving_loss(
        *leaves, *teacher, **rest, floor_weight=0.6, chunk_tokens=chunk, exact_teacher_logprob=exact
    )
    (3.0 * fused.loss).backward()
    limit = LIMIT[dtype]
    assert torch.equal(fused.gate, result.gate)
    assert fused.gate.any()
    assert not fused.gate.all()
    close(fused.loss.detach(), result.loss.detach().double(), limit)
    for name in ("student_logprob", "kl", "floor"):
        close(getattr(fused, name), getattr(result, name).double(), limit)
    for leaf, target in zip(leaves, (of_hidden, of_head), strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        close(leaf.grad, 3.0 * target, limit)
    if exact:
        close(fused.teacher_logprob, result.teacher_logprob.double(), limit)
    else:
        assert (fused.teacher_logprob >= result.teacher_logprob - limit * result.teacher_logprob.abs()).all()
        assert torch.allclose(
            fused.teacher_logprob[~fused.gate], result.teacher_logprob[~fused.gate], rtol=limit, atol=0
        )


class Counted:
    """How many multiplications a run does, in units of one GEMM of all rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        self.done, self.rows = 0.0, rows
        logits, product = fused.Head.logits, fused.add_product

        def counted_logits(head: Any, out: Tensor, rows: slice) -> Tensor:
            self.done += out.shape[0] / self.rows
            return logits(head, out, rows)

        def counted_product(total: Tensor, gradient: Tensor, hidden: Tensor, first: bool) -> None:
            self.done += 2 * hidden.shape[0] / self.rows  # dH has as many rows
            product(total, gradient, hidden, first)

        monkeypatch.setattr(fused.Head, "logits", counted_logits)
        monkeypatch.setattr(fused, "add_product", counted_product)


@pytest.mark.parametrize(
    ("sure", "success", "chunk", "multiplications"),
    [
        (0.0, False, 16, 4.0),  # nothing protected: logits twice, gradients twice
        (0.0, False, 7, 4.0),  # long actions of failed episodes wait for no gate
        (40.0, True, 16, 2.0),  # everything protected and above the floor: no backward at all, long actions too
        (40.0, True, 7, 2.0),
    ],
)
def test_protected_actions_cost_no_backward(
    sure: float, success: bool, chunk: int, multiplications: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher, rest = heads(torch.float32, sure)
    rest["success"][:] = success
    counted = Counted(monkeypatch, len(rest["actions"]))
    leaves = [x.clone().requires_grad_() for x in student]
    result = spod.fused_linear_success_preserving_loss(*leaves, *teacher, **rest, chunk_tokens=chunk)
    assert bool(result.gate.all()) is success
    assert counted.done == pytest.approx(multiplications)


def test_an_early_exit_reads_less_of_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher, rest = heads(torch.float32, 40.0)
    rest["success"][:] = True
    rows = 0
    scatter, logits = fused.Fused._scatter_teacher, fused.Head.logits

    def counted_scatter(self: Any, span: slice, q: Tensor, logprobs: Tensor, chosen: Tensor) -> None:
        nonlocal rows
        rows += int(chosen.sum())
        scatter(self, span, q, logprobs, chosen)

    def counted_logits(head: Any, out: Tensor, span: slice) -> Tensor:
        nonlocal rows
        rows += out.shape[0] if head.hidden.shape[1] == TEACHER_WIDTH else 0
        return logits(head, out, span)

    monkeypatch.setattr(fused.Fused, "_scatter_teacher", counted_scatter)
    monkeypatch.setattr(fused.Head, "logits", counted_logits)
    spod.fused_linear_success_preserving_loss(*student, *teacher, **rest, chunk_tokens=24, exact_teacher_logprob=False)
    assert 0 < rows <= 0.7 * len(rest["actions"])


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("late", [50.0, 0.0])
def test_what_an_early_exit_has_not_read_may_have_been_certain(late: float, chunk: int | None) -> None:
    """The first token decides; the second counts as log q = 0, which is no less than what it is."""
    student, teacher = torch.zeros(2, 4), torch.tensor([[-20.0, 0.0, 0.0, 0.0], [late, 0.0, 0.0, 0.0]])
    index, head = torch.tensor([0, 0]), torch.eye(4)
    given = student, head, teacher, head, index, index, index[:1], torch.tensor([True])
    result = spod.fused_linear_success_preserving_loss(*given, chunk_tokens=chunk, exact_teacher_logprob=False)
    assert result.gate.tolist() == [True]
    assert result.teacher_logprob.item() == pytest.approx(-20.0 - math.log(3.0), rel=1e-6, abs=0.0)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_early_exit_does_not_decide_at_a_tie(dtype: torch.dtype, chunk: int | None) -> None:
    """Student 0 and -log 4, teacher -log 4 and -log 4: the first token alone ties, both protect."""
    student, teacher = torch.tensor([[0.0, -1e4, -1e4, -1e4], [0.0] * 4], dtype=dtype), torch.zeros(2, 4, dtype=dtype)
    index, head = torch.tensor([0, 0]), torch.eye(4, dtype=dtype)
    given = student, head, teacher, head, index, index, index[:1], torch.tensor([True])
    result = spod.fused_linear_success_preserving_loss(*given, chunk_tokens=chunk, exact_teacher_logprob=False)
    assert result.gate.tolist() == [True]
    assert result.teacher_logprob.item() == pytest.approx(-math.log(16.0), rel=1e-6, abs=0.0)


def test_a_gradient_that_is_zero_is_never_written() -> None:
    """Everything protected above the floor: the head's gradient is zeros in memory that is not resident."""
    resident = Path("/proc/self/statm")
    if not resident.exists():
        pytest.skip("the system does not tell what is resident")

    def pages() -> int:
        return int(resident.read_text().split()[1])

    student, teacher, rest = heads(torch.float32, 40.0)
    rest["success"][:] = True
    width = 1 << 16  # the head, and so its gradient, is 75 MiB
    wide = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in student]
    leaves = [x.requires_grad_() for x in wide]
    before = pages()
    loss = spod.fused_linear_success_preserving_loss(*leaves, *teacher, **rest)
    loss.loss.backward()
    assert loss.gate.all()
    assert leaves[1].grad is not None
    assert (pages() - before) * os.sysconf("SC_PAGE_SIZE") < 2**25
    assert not leaves[1].grad.any()


def test_no_tile_is_larger_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of N x V entries is ever made: every operator that sees logits sees a chunk of them."""
    student, teacher, rest = heads(torch.float32)
    seen: list[int] = []
    statistics = row_ops.statistics

    def watched(p: Tensor, q: Tensor, actions: Tensor) -> Tensor:
        seen.append(p.shape[0])
        return statistics(p, q, actions)

    monkeypatch.setattr(row_ops, "statistics", watched)
    spod.fused_linear_success_preserving_loss(*student, *teacher, **rest, chunk_tokens=8)
    assert max(seen) <= 8
    assert sum(seen) == len(rest["actions"])


@pytest.mark.parametrize(
    ("tokens", "long_may_open", "spans"),
    [
        ([1, 3, 2, 7, 2, 2, 1], True, [(0, 4, 0, 2), (4, 6, 2, 3), (6, 13, 3, 4), (13, 17, 4, 6), (17, 18, 6, 7)]),
        (
            [1, 3, 2, 7, 2, 2, 1],
            False,
            [(0, 4, 0, 2), (4, 6, 2, 3), (6, 10, 3, 4), (10, 13, 3, 4), (13, 17, 4, 6), (17, 18, 6, 7)],
        ),
        ([4, 4, 1], False, [(0, 4, 0, 1), (4, 8, 1, 2), (8, 9, 2, 3)]),
        ([2, 2, 2, 2, 2], True, [(0, 4, 0, 2), (4, 8, 2, 4), (8, 10, 4, 5)]),
        ([1, 1, 1, 1, 1], True, [(0, 4, 0, 4), (4, 5, 4, 5)]),
    ],
)
def test_chunks_are_whole_actions_and_full(tokens: list[int], long_may_open: bool, spans: list[Any]) -> None:
    """At most 4 rows: first and last row, first and last action of each chunk; a longer action is cut or alone."""
    chunks = gate.plan(tokens, [long_may_open] * len(tokens), 4)
    assert [(x.rows.start, x.rows.stop, x.actions.start, x.actions.stop) for x in chunks] == spans


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "rows"),
    [
        (1000, torch.float32, 8388),
        (151_936, torch.bfloat16, 110),
        (151_936, torch.float64, 27),
        (1 << 20, torch.bfloat16, 16),
        (1 << 24, torch.float32, 16),
        (0, torch.float32, 1 << 25),
    ],
)
def test_a_chunk_has_32_mib_of_logits_and_16_rows_at_least(vocabulary: int, dtype: torch.dtype, rows: int) -> None:
    assert fused.chunk_rows(vocabulary, dtype) == rows


class Products(TorchDispatchMode):
    """Rows of the left side of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("tile", "rows"), [(30, [5, 5, 2]), (1, [1] * 12), (1 << 20, [12])])
def test_half_precision_is_added_a_slice_of_the_vocabulary_at_a_time(
    tile: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TILE bytes of the product at once; whole numbers, so that every order of addition gives the same."""
    monkeypatch.setattr(fused, "TILE", tile)
    gradient, hidden = torch.arange(48).view(4, 12) % 5 - 2, torch.arange(12).view(4, 3) % 7 - 3
    total = torch.ones(12, 3)
    with Products() as seen:
        fused.add_product(total, gradient.bfloat16(), hidden.bfloat16(), False)
    assert torch.equal(total, 1.0 + gradient.t() @ hidden)
    assert seen.rows == rows


@pytest.mark.parametrize("which", [0, 1])
def test_only_the_gradients_that_are_wanted(which: int) -> None:
    student, teacher, rest = heads(torch.float32)
    _, *targets = expected(student, teacher, rest)
    leaves = [x.clone().requires_grad_(i == which) for i, x in enumerate(student)]
    spod.fused_linear_success_preserving_loss(*leaves, *teacher, **rest, chunk_tokens=16).loss.backward()
    assert leaves[1 - which].grad is None
    assert leaves[which].grad is not None
    close(leaves[which].grad, targets[which], 5e-6)


def test_the_teacher_is_frozen_and_a_second_backward_is_refused() -> None:
    student, teacher, rest = heads(torch.float32)
    leaves = [x.clone().requires_grad_() for x in (*student, *teacher)]
    loss = spod.fused_linear_success_preserving_loss(*leaves, **rest).loss
    loss.backward(retain_graph=True)
    assert leaves[2].grad is None
    assert leaves[3].grad is None
    with pytest.raises(RuntimeError, match="hands its gradients over once"):
        loss.backward()


def test_float16_gradients_survive_a_large_batch() -> None:
    """1 / (n S E) of thousands of rows is no float16: it is applied to float32 sums."""
    student, teacher, rest = heads(torch.float16)
    rest["episode_index"] = torch.arange(len(rest["episode_index"]))
    rest["success"] = torch.zeros(len(rest["episode_index"]), dtype=torch.bool)
    many = 400
    stacked = [student[0].repeat(many, 1), student[1], teacher[0].repeat(many, 1), teacher[1]]
    actions = len(rest["episode_index"])
    shift = torch.arange(many).repeat_interleave(len(rest["actions"])) * actions
    wide = {
        "actions": rest["actions"].repeat(many),
        "action_index": rest["action_index"].repeat(many) + shift,
        "episode_index": torch.arange(actions * many),
        "success": rest["success"].repeat(many),
    }
    leaves = [stacked[0].requires_grad_(), stacked[1].requires_grad_()]
    (2.0**14 * spod.fused_linear_success_preserving_loss(*leaves, *stacked[2:], **wide).loss).backward()
    _, of_hidden, of_head = expected(student, teacher, rest)
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    close(leaves[0].grad[: len(rest["actions"])] / 2.0**14, of_hidden / many, 2e-3)
    close(leaves[1].grad / 2.0**14, of_head, 2e-3)


def test_autocast_computes_logits_in_its_dtype() -> None:
    student, teacher, rest = heads(torch.float32)
    half = [x.to(torch.bfloat16) for x in (*student, *teacher)]
    wanted = spod.fused_linear_success_preserving_loss(*half, **rest)
    leaves = [x.clone().requires_grad_() for x in student]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = spod.fused_linear_success_preserving_loss(*leaves, *teacher, **rest)
    result.loss.backward()
    assert float(result.loss.detach()) == float(wanted.loss)
    assert leaves[0].grad is not None
    assert leaves[0].grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, t, _: s.__setitem__(0, s[0][:, 1:]), "shapes differ"),
        (lambda s, t, _: t.__setitem__(0, t[0][1:]), "shapes differ"),
        (lambda s, t, _: t.__setitem__(1, t[1].double()), "one float dtype is expected"),
        (lambda s, t, r: r.__setitem__("chunk_tokens", 0), "chunk_tokens is 0"),
        (lambda s, t, r: r.__setitem__("tau0", 0.0), "tau0 is 0.0"),
        (lambda s, t, r: r["actions"].__setitem__(3, VOCABULARY), "token at position 3 is 301"),
        (lambda s, t, _: s[0][2].fill_(math.nan), "student_logits row 2 holds NaN"),
        (lambda s, t, _: t[0][5].fill_(math.nan), "teacher_logits row 5 holds NaN"),
    ],
)
def test_bad_input_is_named(change: Any, words: str) -> None:
    student, teacher, rest = heads(torch.float32)
    change(student, teacher, rest)
    with pytest.raises(ValueError, match=words):
        spod.fused_linear_success_preserving_loss(*student, *teacher, **rest)
