"""SPOD from hidden states and heads: chunks of whole actions, the gradient in the forward, no (N, V) anywhere.

The gate belongs to an action, so a chunk of whole actions knows its gradient while its logits are still there: two
GEMMs for the logits and two for the gradients, and only the first two where an action is protected above its floor.
An action longer than a chunk is measured first and, only if it has a gradient, computed again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines.memory import buffer, zeros
from ..gate import Levels, Span, Weights, action_terms, gate, plan
from ..row_stats import RowStat
from . import row_ops
from .levels import SpodBatch, combine, levels_of

TILE = 32 << 20  # bytes of one (chunk, V) block of logits: a GEMM of its height runs at nearly full speed


class Head(NamedTuple):
    """What logits are made of: hidden states (N, D) and a head (V, D)."""

    hidden: Tensor
    head: Tensor

    def logits(self, out: Tensor, rows: slice | Tensor) -> Tensor:
        """hidden[rows] @ head.T into `out`."""
        return torch.mm(self.hidden[rows], self.head.t(), out=out)


def chunk_rows(vocabulary: int, dtype: torch.dtype) -> int:
    """How many rows a chunk has where the caller does not say."""
    return max(16, TILE // max(1, vocabulary * dtype.itemsize))


class Fused:
    """One evaluation: the statistics of every row, and, where wanted, the gradients of hidden states and head."""

    def __init__(
        self, student: Head, teacher: Head, batch: SpodBatch, most: int, *, exact: bool, want: tuple[bool, bool]
    ) -> None:
        count, vocabulary = student.hidden.shape[0], student.head.shape[0]
        self.student, self.teacher, self.batch, self.exact = student, teacher, batch, exact
        self.levels = levels_of(batch)
        self.row_stats = student.hidden.new_zeros(count, len(RowStat), dtype=torch.float64)
        self.precise = precise = torch.float64 if student.hidden.dtype == torch.float64 else torch.float32
        self.want_hidden, self.want_head = want
        self.grad_hidden: Tensor | None = None  # made when there is something to write
        self.grad_head: Tensor | None = None
        # Half precision cannot hold 1 / (n S E) of a large batch: the largest weight is made 1, undone at the end.
        self.scale = 1.0 / float(self.levels.weights.max()) if precise != student.hidden.dtype else 1.0
        self.most = min(most, count)
        tile = torch.Size([self.most, vocabulary])
        self.tiles = [buffer(tile, student.hidden, student.hidden.dtype) for _ in range(2)]

    def run(self) -> None:
        """Every chunk in turn."""
        for span in plan(self.levels.tokens.tolist(), self.levels.success.tolist(), self.most):
            (self.whole if span.rows.stop - span.rows.start <= self.most else self.long)(span)
        if self.scale != 1.0:
            for gradient in (self.grad_hidden, self.grad_head):
                if gradient is not None:
                    gradient.div_(self.scale)
        if self.want_hidden and self.grad_hidden is None:
            self.grad_hidden = zeros(self.student.hidden.shape, self.student.hidden, self.precise)
        if self.want_head and self.grad_head is None:
            self.grad_head = zeros(self.student.head.shape, self.student.head, self.precise)

    def whole(self, span: Span) -> None:
        """Rows that fit the tiles, and whose gates are decided by them or cannot open."""
        p, q = self.compute(span.rows)
        unread = None if self.exact else self.teacher_until_decided(span, p, q)
        if unread is None:
            self.teacher.logits(q, span.rows)
        self.row_stats[span.rows] = row_ops.statistics(p, q, self.batch.actions[span.rows])
        if unread is not None:
            self.row_stats[span.rows][:, RowStat.TEACHER_LOGPROB][unread] = 0.0  # all that is known is log q <= 0
        self.differentiate(span.rows, self.weights(span))

    def long(self, span: Span) -> None:
        """One action that does not fit the tiles and whose gate may open: measured, then computed again if need be."""
        pieces = [
            slice(i, min(i + self.most, span.rows.stop)) for i in range(span.rows.start, span.rows.stop, self.most)
        ]
        if self.exact:
            self.measure(pieces)
        else:
            self.measure_until_decided(span, pieces)
        weights = self.weights(span)
        again = not self.exact and bool(weights[0].any())  # the KL of an unprotected action is not known yet
        for piece in pieces if again or (self.wanted and bool(weights.any())) else ():
            p, q = self.compute(piece)
            if bool(weights[0].any()):
                self.teacher.logits(q, piece)
            if again:
                self.row_stats[piece] = row_ops.statistics(p, q, self.batch.actions[piece])
            self.differentiate(piece, weights[:, piece.start - span.rows.start : piece.stop - span.rows.start])

    def compute(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The tiles for some rows: the student's logits, and a buffer for the teacher's."""
        p, q = (tile[: rows.stop - rows.start] for tile in self.tiles)
        return self.student.logits(p, rows), q

    def measure(self, pieces: list[slice]) -> None:
        """The statistics of these rows."""
        for piece in pieces:
            p, q = self.compute(piece)
            self.row_stats[piece] = row_ops.statistics(p, self.teacher.logits(q, piece), self.batch.actions[piece])

    def measure_until_decided(self, span: Span, pieces: list[slice]) -> None:
        """Log-probabilities of one action: the student's, then the teacher's until it is protected, 0 from there."""
        for piece in pieces:
            p, _ = self.compute(piece)
            self.row_stats[piece] = row_ops.statistics(p, p, self.batch.actions[piece])
        student = self.row_stats[span.rows, RowStat.STUDENT_LOGPROB]
        teacher = self.row_stats[span.rows, RowStat.TEACHER_LOGPROB]
        teacher.zero_()
        for piece in pieces:
            q = self.teacher.logits(self.teacher_tile(piece), piece)
            measured = row_ops.statistics(q, q, self.batch.actions[piece])
            self.row_stats[piece][:, RowStat.TEACHER_LOGPROB].copy_(measured[:, RowStat.STUDENT_LOGPROB])
            if bool(gate(self.levels.success[span.actions], student, teacher, self.levels.tokens[span.actions])):
                return

    def teacher_tile(self, rows: slice) -> Tensor:
        """The second tile, for some rows."""
        return self.tiles[1][: rows.stop - rows.start]

    def teacher_until_decided(self, span: Span, p: Tensor, q: Tensor) -> Tensor | None:
        """Teacher logits into `q`: half of each action that may be protected, then the rest of those undecided.

        Every log q_j <= 0, so what is protected with some of them at 0 stays so. Returns the mask
        (n,) of rows not computed (a copy of the student's stands there), or None where no gate may open: nothing done.
        """
        of_action = self.batch.action_index[span.rows] - span.actions.start
        open_rows = self.levels.success[span.actions][of_action]
        if not bool(open_rows.any()):
            return None
        actions, tokens = self.batch.actions[span.rows], self.levels.tokens[span.actions]
        position = (
            torch.arange(len(actions), dtype=torch.int64, device=actions.device)
            - (tokens.cumsum(0) - tokens)[of_action]
        )
        late = open_rows & (2 * position >= tokens[of_action].clamp(min=2))
        student = row_ops.statistics(p, p, actions)[:, RowStat.STUDENT_LOGPROB]
        q.copy_(p)
        teacher = torch.zeros_like(open_rows, dtype=torch.float64)
        self._scatter_teacher(span.rows, q, teacher, ~late)
        undecided = ~gate(self.levels.success[span.actions], student, teacher, tokens)[of_action]
        self._scatter_teacher(span.rows, q, teacher, late & undecided)
        return late & ~undecided

    def _scatter_teacher(self, rows: slice, q: Tensor, logprobs: Tensor, chosen: Tensor) -> None:
        index = chosen.nonzero()[:, 0]
        if len(index):
            logits = self.teacher.hidden[rows][index] @ self.teacher.head.t()
            measured = row_ops.statistics(logits, logits, self.batch.actions[rows][index])
            logprobs[index] = measured[:, RowStat.STUDENT_LOGPROB]
            q[index] = logits

    @property
    def wanted(self) -> bool:
        """Whether any gradient is."""
        return self.want_hidden or self.want_head

    def weights(self, span: Span) -> Tensor:
        """The factors (2, n) of `p - q` and of `p - onehot` in the gradient of these rows, times the scale."""
        levels = Levels(*(x[span.actions] for x in self.levels))
        if span.rows.stop - span.rows.start < int(levels.tokens.sum()):  # a piece of an action whose gate cannot open
            return (
                torch.stack([levels.weights, torch.zeros_like(levels.weights)]).expand(
                    2, span.rows.stop - span.rows.start
                )
                * self.scale
            )
        terms = action_terms(self.row_stats[span.rows], levels, self.batch.tau0, self.batch.floor_weight)
        of_action = self.batch.action_index[span.rows] - span.actions.start
        return torch.stack([terms.kl_weight, terms.floor_weight])[:, of_action] * self.scale

    def differentiate(self, rows: slice, weights: Tensor) -> None:
        """Adds what some rows, their logits in the tiles, give to the gradients; nothing for rows without one."""
        active = weights.any(0)
        if not (self.wanted and bool(active.any())):
            return
        p, q = (tile[: rows.stop - rows.start] for tile in self.tiles)
        row_ops.gradient_(p, p, q, self.batch.actions[rows], self.row_stats[rows], Weights(*weights))
        index = slice(None) if bool(active.all()) else active.nonzero()[:, 0]
        if isinstance(index, Tensor):
            p = torch.index_select(p, 0, index, out=q[: len(index)])
        hidden, head = self.student
        if self.want_hidden:
            if self.grad_hidden is None:
                self.grad_hidden = zeros(hidden.shape, hidden, self.precise)
            self.grad_hidden[rows][index] = (p @ head).to(self.precise)
        if self.want_head:
            first = self.grad_head is None
            if self.grad_head is None:
                self.grad_head = buffer(head.shape, head, self.precise)
            add_product(self.grad_head, p, hidden[rows][index], first)


def add_product(total: Tensor, gradient: Tensor, hidden: Tensor, first: bool) -> None:
    """total += gradient.T @ hidden; the `first` is written over whatever is there.

    Where `total` is more precise than these, a slice of the vocabulary at a time.
    """
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden, beta=0 if first else 1)
        return
    step = max(1, TILE // max(1, hidden.shape[1] * hidden.itemsize))
    for start in range(0, gradient.shape[1], step):
        part, product = total[start : start + step], gradient[:, start : start + step].t() @ hidden
        part.copy_(product) if first else part.add_(product)


class FusedSpod(torch.autograd.Function):
    """The loss of hidden states and heads; its gradients are made in the forward and handed over once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, teacher: Head, batch: SpodBatch, most: int, exact: bool, validate: bool
    ) -> tuple[Tensor, ...]:
        want = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        work = Fused(Head(hidden, head), teacher, batch, most, exact=exact, want=want)
        work.run()
        if validate:
            row_ops.refuse_unusable(work.row_stats, "spod: hidden @ head.T")
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        result, _ = combine(work.row_stats, batch, work.levels, dtype)
        ctx.made = (work.grad_hidden, work.grad_head)
        ctx.dtypes = (hidden.dtype, head.dtype)
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.made is None:
            raise RuntimeError(
                "spod: the fused loss hands its gradients over once; compute the loss again, without retain_graph"
            )
        made, ctx.made = ctx.made, None
        if grad_loss.device.type != "cpu" or float(grad_loss) != 1.0:
            made = [g if g is None else g.mul_(grad_loss) for g in made]
        converted = (g if g is None else g.to(d) for g, d in zip(made, ctx.dtypes, strict=True))
        return (*converted, *[None] * 5)
