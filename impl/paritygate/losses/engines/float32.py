"""SPOD's rows on the CPU by torch in float32, where there is no compiler: a few rows at a time, in buffers used again.

Maximum and sum are kept apart and sums are float64, as in rows.hpp. A gradient `p - q` is a plain difference of float32
where p is small beside the row's largest entry; elsewhere, where what they have in common would cancel, it is
`(p + q) tanh(r / 2)` with r = log p - log q, which keeps the digits of r.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from .. import gate
from ..row_stats import RowStat
from . import float64
from .base import fast_on_cpu

Task = TypeVar("Task")
BLOCK = 5 << 18  # entries whose exponentials are kept: three buffers of float32 stay in a last-level cache
PIECE = 1 << 17  # entries that are worked on at once
CHUNK = 128  # entries of a row that are added up, and mended, together
LARGEST = 8  # chunks of a row that are added up in float64: the others together are many, and their rounding is noise
NEAR = 0.25  # of a row's largest |p - q|: float32 is good to 1e-7 of p and q, the gradient to 3e-7 of that entry


def serves(student: Tensor, teacher: Tensor) -> bool:
    """Whether float32 is enough for these (N, V) logits: on the CPU, one dtype, no float64."""
    return fast_on_cpu(student, teacher)


class Block:
    """Some rows: exp(p - max p), exp(q - max q), the difference of the exponents; whole CHUNKs, 0 beyond V.

    Of each chunk the largest logit of both (2, rows, chunks), and the sums of p, q and q (p - q), (3, rows, chunks).
    """

    def __init__(self, student: Tensor, entries: int) -> None:
        rows, chunks = rows_of(student, entries), -(-student.shape[1] // CHUNK)
        self.step = min(rows, rows_of(student, PIECE))
        self.p, self.q, self.diff = (student.new_empty((rows, chunks * CHUNK), dtype=torch.float32) for _ in range(3))
        for buffer in (self.p, self.q, self.diff):
            buffer[:, student.shape[1] :] = 0.0
        self.buffer = student.new_empty((self.step, chunks * CHUNK), dtype=torch.float32)
        self.tops, self.parts = (student.new_empty((n, rows, chunks), dtype=torch.float32) for n in (2, 3))

    def pieces(self, count: int) -> Iterator[slice]:
        """The first `count` rows, as many at a time as stay in a cache of one core's."""
        return (slice(i, min(i + self.step, count)) for i in range(0, count, self.step))

    def load(self, student: Tensor, teacher: Tensor, *, add_up: bool) -> None:
        """Fill the buffers from logits (n, V); `add_up` says whether the sums are wanted."""
        v = student.shape[1]
        for rows in self.pieces(len(student)):
            for buffer, logits, tops in ((self.p, student, self.tops[0]), (self.q, teacher, self.tops[1])):
                target = buffer[rows, :v]
                values = logits[rows] if logits.dtype == torch.float32 else target.copy_(logits[rows])
                torch.sub(values, largest(values, tops[rows]), out=target)
            p, q, diff = (x[rows, :v] for x in (self.p, self.q, self.diff))
            torch.sub(p, q, out=diff)
            p.exp_()
            q.exp_()
            if add_up:
                product = torch.mul(self.q[rows], self.diff[rows], out=self.buffer[: rows.stop - rows.start])
                for values, parts in zip((self.p[rows], self.q[rows], product), self.parts[:, rows], strict=True):
                    torch.sum(values.unflatten(1, (-1, CHUNK)), -1, out=parts)

    def sums(self, count: int) -> Iterator[Tensor]:
        """Of p, q and q (p - q) in the first `count` rows, each (count,) float64."""
        most = min(LARGEST, self.parts.shape[2])
        for rough, values, factor in zip(
            self.parts[:, :count], (self.p, self.q, self.q), (None, None, self.diff), strict=True
        ):
            at = rough.abs().topk(most).indices
            exact = chunks_at(values[:count], at).double()
            if factor is not None:
                exact *= chunks_at(factor[:count], at)
            yield rough.double().scatter_(1, at, 0.0).sum(-1) + exact.sum((1, 2))

    def measure(self, student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
        """The RowStat columns of these rows, (n, 9) float64."""
        n, v = student.shape
        row_stats = torch.zeros(n, len(RowStat), dtype=torch.float64, device=student.device)
        row_stats[:, RowStat.SLOPE] = torch.nan
        self.load(student, teacher, add_up=True)
        maxima = (RowStat.STUDENT_MAXIMUM, RowStat.TEACHER_MAXIMUM)
        for maximum, tops in zip(maxima, self.tops[:, :n], strict=True):
            row_stats[:, maximum] = tops.amax(-1)
        sum_p, sum_q, cross = self.sums(n)
        row_stats[:, RowStat.STUDENT_SUM], row_stats[:, RowStat.TEACHER_SUM] = sum_p, sum_q
        log_p, log_q = sum_p.log(), sum_q.log()
        for i in (cross.isnan() & ~(log_p.isnan() | log_q.isnan())).nonzero()[:, 0].tolist():
            cross[i] = self.cross_of_excluded(i)
        kl = (log_p - log_q - cross / sum_q).clamp(min=0.0)
        for i in cross.isnan().nonzero()[:, 0].tolist():
            kl[i] = float64.statistics(student[i : i + 1], teacher[i : i + 1], actions[:1] * 0)[0, RowStat.KL]
        row_stats[:, RowStat.KL] = kl
        inside = (actions >= 0) & (actions < v)  # unvalidated input may not read past the row
        at = torch.where(inside, actions, 0)[:, None]
        for column, logits, maximum, log_sum in (
            (RowStat.STUDENT_LOGPROB, student, RowStat.STUDENT_MAXIMUM, log_p),
            (RowStat.TEACHER_LOGPROB, teacher, RowStat.TEACHER_MAXIMUM, log_q),
        ):
            chosen = logits.gather(1, at)[:, 0].double() - row_stats[:, maximum] - log_sum
            row_stats[:, column] = torch.where(inside, chosen, torch.nan)
        for maximum, total in zip(maxima, (RowStat.STUDENT_SUM, RowStat.TEACHER_SUM), strict=True):
            row_stats[row_stats[:, maximum] == -math.inf, total] = 0.0
        return row_stats

    def cross_of_excluded(self, i: int) -> Tensor | float:
        """sum q (p - q) of row i, which holds -inf: its difference becomes 0 where both sides do; NaN if unknown."""
        diff, q = self.diff[i].nan_to_num(0.0, math.inf, -math.inf), self.q[i]
        if bool(((q == 0) & (diff == -math.inf)).any()):
            return math.nan  # there may be teacher mass that float32 cannot hold
        return diff.mul_(q).nan_to_num_(0.0, math.inf, -math.inf).sum(dtype=torch.float64)

    def differentiate(self, out: Tensor, row_stats: Tensor, actions: Tensor, weights: gate.Weights) -> None:
        """`kl (p - q) + floor (p - onehot)` into `out` (n, V), of the rows in the buffers."""
        n, v = out.shape
        kl_weight, floor_weight = weights
        if not bool(kl_weight.any() | floor_weight.any()):
            out.zero_()
            return
        sum_p, sum_q = row_stats[:, RowStat.STUDENT_SUM], row_stats[:, RowStat.TEACHER_SUM]
        log_ratio = sum_p.log() - sum_q.log()
        factors = torch.stack([kl_weight / sum_p, kl_weight / sum_q, floor_weight / sum_p, log_ratio], 1).float()
        of_p, of_q = ((kl_weight + floor_weight) / sum_p)[:, None].float(), factors[:, 1:2]
        near_certain = self.near_certain(row_stats) & (kl_weight != 0)[:, None]
        has_kl, idle = (kl_weight != 0).tolist(), ((kl_weight == 0) & (floor_weight == 0)).tolist()
        direct = out.dtype == torch.float32 and v == self.p.shape[1] and out.is_contiguous()
        for rows in self.pieces(n):
            if all(idle[rows]):
                out[rows] = 0.0
                continue
            buffer = out[rows] if direct else self.buffer[: rows.stop - rows.start]
            torch.mul(self.p[rows], of_p[rows], out=buffer)
            if any(has_kl[rows]):
                torch.addcmul(buffer, self.q[rows], of_q[rows], value=-1.0, out=buffer)
                self.refine(buffer, near_certain[rows], factors[rows], rows)
            if any(idle[rows]):
                buffer[torch.tensor(idle[rows], dtype=torch.bool, device=buffer.device)] = 0.0  # whatever they hold
            if not direct:
                out[rows] = buffer[:, :v]
        l_p, l_q = row_stats[:, RowStat.STUDENT_LOGPROB], row_stats[:, RowStat.TEACHER_LOGPROB]
        taken = ((floor_weight != 0) & ~l_p.isnan()).nonzero()[:, 0]
        l_p, l_q = l_p[taken], l_q[taken]  # in float64: p - 1 of an action that is nearly sure
        of_student = kl_weight[taken] * torch.where(kl_weight[taken] == 0, 0.0, l_p.exp() - l_q.exp())
        out[taken, actions[taken]] = (of_student + floor_weight[taken] * l_p.expm1()).to(out.dtype)

    def near_certain(self, row_stats: Tensor) -> Tensor:
        """(n, chunks) whether p exceeds NEAR of the largest |p - q| among the row's largest p and q."""
        tops = self.tops[:, : len(row_stats)]
        at = tops.argmax(-1).t()
        sum_p = row_stats[:, RowStat.STUDENT_SUM, None, None]
        sum_q = row_stats[:, RowStat.TEACHER_SUM, None, None]
        diff = chunks_at(self.p[: len(row_stats)], at) / sum_p - chunks_at(self.q[: len(row_stats)], at) / sum_q
        bound = NEAR * sum_p[..., 0] * diff.abs().amax((1, 2))[:, None]
        return (tops[0] - row_stats[:, RowStat.STUDENT_MAXIMUM, None]).exp() > bound

    def refine(self, gradient: Tensor, near_certain: Tensor, factors: Tensor, rows: slice) -> None:
        """Replace `p - q` by `(p + q) tanh(r / 2)` in the chunks of these rows that are `near_certain`."""
        row, chunk = near_certain.nonzero(as_tuple=True)
        at = row * near_certain.shape[1] + chunk
        p, q, diff = (x[rows].view(-1, CHUNK).index_select(0, at) for x in (self.p, self.q, self.diff))
        of_p, of_q, floor, shift = factors[row, :, None].unbind(1)
        ratio = diff.nan_to_num_(0.0, math.inf, -math.inf).sub_(shift).mul_(0.5).tanh_()
        both = (p * of_p).addcmul_(q, of_q).mul_(ratio).addcmul_(p, floor)
        gradient.view(-1, CHUNK).index_copy_(0, at, both)


def largest(values: Tensor, tops: Tensor) -> Tensor:
    """The maximum of each row (n, V), (n, 1), and those of its CHUNKs into `tops` (n, chunks)."""
    whole = values.shape[1] // CHUNK
    if whole:
        torch.amax(values[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)), -1, out=tops[:, :whole])
    if whole < tops.shape[1]:
        tops[:, whole] = values[:, whole * CHUNK :].amax(-1)
    return tops.amax(-1, keepdim=True)


def chunks_at(values: Tensor, at: Tensor) -> Tensor:
    """Of each row (n, whole CHUNKs) the chunks `at` (n, k), (n, k, CHUNK)."""
    first = torch.arange(0, values.numel() // CHUNK, values.shape[1] // CHUNK, dtype=torch.int64, device=values.device)[
        :, None
    ]
    return values.view(-1, CHUNK).index_select(0, (at + first).flatten()).view(*at.shape, CHUNK)


def rows_of(student: Tensor, entries: int) -> int:
    """How many rows of (N, V) logits have that many entries, one at least."""
    return max(1, min(len(student), entries // student.shape[1]))


def share(tasks: Sequence[Task], make: Callable[[], Block], work: Callable[[Block, Task], None]) -> None:
    """`work` on every task, on as many threads as torch has: each its own buffers, and no operator is shared by two.

    Two threads that meet after every operator are slower than one, as soon as anything else runs.
    """
    whole, waiting = torch.get_num_threads(), iter(tasks)

    @torch.no_grad()
    def worker() -> None:
        block = make()
        for task in waiting:
            work(block, task)

    if min(whole, len(tasks)) < 2:
        worker()
        return
    try:
        with ThreadPoolExecutor(min(whole, len(tasks)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for done in [pool.submit(worker) for _ in range(min(whole, len(tasks)))]:
                done.result()
    finally:
        torch.set_num_threads(whole)


def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    """The RowStat columns of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions."""
    row_stats = torch.empty(len(student), len(RowStat), dtype=torch.float64, device=student.device)

    def measure(block: Block, rows: slice) -> None:
        row_stats[rows] = block.measure(student[rows], teacher[rows], actions[rows])

    share(_blocks(student), lambda: Block(student, BLOCK), measure)
    return row_stats


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, row_stats: Tensor, coefficients: Tensor
) -> None:
    """out = c0 softmax(student) - c1 softmax(teacher) - c2 onehot(action); c (N, 3) float64, `out` may be `student`.

    c0 is c1 + c2, as in every gradient of SPOD.
    """

    def differentiate(block: Block, piece: slice) -> None:
        weights = gate.Weights(coefficients[piece, 1], coefficients[piece, 2])
        if any(bool(x.any()) for x in weights):
            block.load(student[piece], teacher[piece], add_up=False)
        block.differentiate(out[piece], row_stats[piece], actions[piece], weights)

    share(_blocks(student), lambda: Block(student, BLOCK), differentiate)


def _blocks(student: Tensor) -> list[slice]:
    count, most = len(student), rows_of(student, BLOCK)
    return [slice(i, min(i + most, count)) for i in range(0, count, most)]


def statistics_and_gradient_(
    out: Tensor,
    student: Tensor,
    teacher: Tensor,
    actions: Tensor,
    tokens: Tensor,
    success: Tensor,
    weights: Tensor,
    tau0: float,
    floor_weight: float,
) -> Tensor:
    """As `cpp.statistics_and_gradient_`: rows are read once, but for a successful action that no block holds whole."""
    count, most = len(student), rows_of(student, BLOCK)
    row_stats = torch.empty(count, len(RowStat), dtype=torch.float64, device=student.device)
    row_weights = gate.Weights(*(torch.zeros(count, dtype=torch.float64, device=student.device) for _ in range(2)))

    def both(block: Block, span: gate.Span) -> None:
        rows, actions_of_span = span
        pieces = [slice(i, min(i + most, rows.stop)) for i in range(rows.start, rows.stop, most)]
        for piece in pieces:
            row_stats[piece] = block.measure(student[piece], teacher[piece], actions[piece])
        levels = gate.Levels(tokens[actions_of_span], success[actions_of_span], weights[actions_of_span])
        if rows.stop - rows.start < int(levels.tokens.sum()):  # a piece of an action whose gate cannot open
            row_weights.kl[rows] = levels.weights
        else:
            terms = gate.action_terms(row_stats[rows], levels, tau0, floor_weight)
            row_weights.kl[rows] = terms.kl_weight.repeat_interleave(levels.tokens)
            row_weights.floor[rows] = terms.floor_weight.repeat_interleave(levels.tokens)
        for piece in pieces:
            weighted = gate.Weights(row_weights.kl[piece], row_weights.floor[piece])
            if len(pieces) > 1 and any(bool(x.any()) for x in weighted):
                block.load(student[piece], teacher[piece], add_up=False)
            block.differentiate(out[piece], row_stats[piece], actions[piece], weighted)

    share(gate.plan(tokens.tolist(), success.tolist(), most), lambda: Block(student, BLOCK), both)
    return row_stats
