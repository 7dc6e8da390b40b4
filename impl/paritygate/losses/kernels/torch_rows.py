"""SPOD's rows on the CPU by torch in float32, where there is no compiler: a few rows at a time, in buffers used again.

Maximum and sum are kept apart and sums are float64, as in rows.hpp. A gradient `p - q` is a plain difference of float32
where p is small beside the row's largest entry; elsewhere, where what they have in common would cancel, it is
`(p + q) tanh(r / 2)` with r = log p - log q, which keeps the digits of r.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from .. import _spod_rows as float64
from .cpu import COLUMNS, DTYPES, PLAIN

Task = TypeVar("Task")
BLOCK = 5 << 18  # entries whose exponentials are kept: three buffers of float32 stay in a last-level cache
PIECE = 1 << 17  # entries that are worked on at once
CHUNK = 128  # entries of a row that are added up, and mended, together
LARGEST = 8  # chunks of a row that are added up in float64: the others together are many, and their rounding is noise
NEAR = 0.25  # of a row's largest |p - q|: float32 is good to 1e-7 of p and q, the gradient to 3e-7 of that entry


def serves(student: Tensor, teacher: Tensor) -> bool:
    """Whether float32 is enough for these (N, V) logits: on the CPU, one dtype, no float64."""
    kinds = (student.device.type, teacher.device.type, student.dtype)
    plain = type(student) in PLAIN and type(teacher) in PLAIN
    return plain and kinds == ("cpu", "cpu", teacher.dtype) and student.dtype in DTYPES and student.shape[1] > 0


def sums(values: Tensor) -> Tensor:
    """Of each row (n, whole CHUNKs) of float32, float64."""
    n, chunks = values.shape[0], values.shape[1] // CHUNK
    if chunks <= 2 * LARGEST:
        return values.sum(-1, dtype=torch.float64)
    parts = values.view(n, chunks, CHUNK)
    rough = parts.sum(-1)
    at = rough.abs().topk(LARGEST).indices
    first = torch.arange(0, n * chunks, chunks)[:, None]
    largest = parts.view(-1, CHUNK).index_select(0, (at + first).flatten()).view(n, -1)
    return rough.double().scatter_(1, at, 0.0).sum(-1) + largest.sum(-1, dtype=torch.float64)


class Block:
    """Some rows: exp(p - max p), exp(q - max q), the difference of the exponents, room; whole CHUNKs, 0 beyond V."""

    def __init__(self, student: Tensor, entries: int) -> None:
        rows, wide = rows_of(student, entries), -(-student.shape[1] // CHUNK) * CHUNK
        self.step = rows_of(student, PIECE)
        self.p, self.q, self.apart = (torch.zeros(rows, wide) for _ in range(3))
        self.room = torch.zeros(min(rows, self.step), wide)

    def pieces(self, rows: slice) -> Iterator[tuple["Block", slice]]:
        """Blocks on the same buffers, `step` rows each, and the rows that they are for."""
        for i in range(rows.start, rows.stop, self.step):
            own = slice(i, min(i + self.step, rows.stop))
            part = copy.copy(self)
            inside = slice(i - rows.start, own.stop - rows.start)
            part.p, part.q, part.apart = (x[inside] for x in (self.p, self.q, self.apart))
            yield part, own

    def read(self, student: Tensor, teacher: Tensor, known: Tensor, *, find: bool = False) -> None:
        """Fill the buffers from logits (n, V) and their maxima, which are `known`, or found and noted there."""
        v = student.shape[1]
        for buffer, logits, column in ((self.p, student, 0), (self.q, teacher, 2)):
            values = logits if logits.dtype == torch.float32 else buffer[:, :v].copy_(logits)
            if find:
                known[:, column] = values.amax(-1)
            torch.sub(values, known[:, column, None].float(), out=buffer[:, :v])
        torch.sub(self.p[:, :v], self.q[:, :v], out=self.apart[:, :v])
        self.p[:, :v].exp_()
        self.q[:, :v].exp_()

    def measure(self, student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
        """The COLUMNS of these rows, (n, 9) float64."""
        n, v = student.shape
        known = torch.zeros(n, len(COLUMNS), dtype=torch.float64)
        known[:, 7] = torch.nan
        self.read(student, teacher, known, find=True)
        known[:, 1], known[:, 3] = sums(self.p), sums(self.q)
        log_p, log_q = known[:, 1].log(), known[:, 3].log()
        cross = sums(torch.mul(self.q, self.apart, out=self.room[:n]))
        for i in (cross.isnan() & ~(log_p.isnan() | log_q.isnan())).nonzero()[:, 0].tolist():
            cross[i] = self.cross_of_excluded(i)
        kl = (log_p - log_q - cross / known[:, 3]).clamp(min=0.0)
        for i in cross.isnan().nonzero()[:, 0].tolist():
            kl[i] = float64.statistics(student[i : i + 1], teacher[i : i + 1], actions[:1] * 0)[0][0]
        known[:, 6] = kl
        inside = (actions >= 0) & (actions < v)  # unvalidated input may not read past the row
        at = torch.where(inside, actions, 0)[:, None]
        for column, logits, log_sum in ((4, student, log_p), (5, teacher, log_q)):
            chosen = logits.gather(1, at)[:, 0].double() - known[:, column * 2 - 8] - log_sum
            known[:, column] = torch.where(inside, chosen, torch.nan)
        for top in (0, 2):
            known[known[:, top] == -math.inf, top + 1] = 0.0
        return known

    def cross_of_excluded(self, i: int) -> Tensor | float:
        """sum q (p - q) of row i, which holds -inf: its difference becomes 0 where both sides do; NaN if unknown."""
        apart, q = self.apart[i].nan_to_num_(0.0, math.inf, -math.inf), self.q[i]
        if bool(((q == 0) & (apart == -math.inf)).any()):
            return math.nan  # there may be teacher mass that float32 cannot hold
        return torch.mul(q, apart).nan_to_num_(0.0, math.inf, -math.inf).sum(dtype=torch.float64)

    def differentiate(self, out: Tensor, known: Tensor, actions: Tensor, weights: float64.Weights) -> None:
        """`kl (p - q) + floor (p - onehot)` into `out` (n, V); uses the buffers up."""
        n, v = out.shape
        of_kl, of_floor = weights
        p, q = self.p, self.q
        direct = out.dtype == torch.float32 and v == p.shape[1] and out.is_contiguous()
        room = out if direct else self.room[:n]
        sum_p, sum_q = known[:, 1], known[:, 3]
        kl, floor = bool(of_kl.any()), bool(of_floor.any())
        if not (kl or floor):
            out.zero_()
            return
        student = None if not floor else torch.mul(p, (of_floor / sum_p).float()[:, None], out=None if kl else room)
        if kl:
            p.mul_((of_kl / sum_p).float()[:, None])
            q.mul_((of_kl / sum_q).float()[:, None])
            torch.sub(p, q, out=room)
            self.sharpen(room, (sum_p.log() - sum_q.log()).float())
            room = room if student is None else room.add_(student)
        idle = (of_kl == 0) & (of_floor == 0)
        if bool(idle.any()):
            room[idle] = 0.0
        taken = ((of_floor != 0) & ~known[:, 4].isnan()).nonzero()[:, 0]
        l_p, l_q = known[taken, 4], known[taken, 5]  # in float64: p - 1 of an action that is nearly sure
        of_student = of_kl[taken] * torch.where(of_kl[taken] == 0, 0.0, l_p.exp() - l_q.exp())
        room[taken, actions[taken]] = (of_student + of_floor[taken] * l_p.expm1()).float()
        if not direct:
            out.copy_(room[:, :v])

    def sharpen(self, gradient: Tensor, shift: Tensor) -> None:
        """Replace `p - q` by `(p + q) tanh(r / 2)` in every chunk where p exceeds NEAR of the row's largest."""
        bound = NEAR * torch.maximum(gradient.amax(-1), -gradient.amin(-1))
        chunks = self.p.view(len(gradient), -1, CHUNK)
        hot = (chunks.amax(-1) > bound[:, None]).flatten().nonzero()[:, 0]
        p, q, apart = (x.view(-1, CHUNK).index_select(0, hot) for x in (self.p, self.q, self.apart))
        of_row = shift[hot // chunks.shape[1], None]
        gradient.view(-1, CHUNK).index_copy_(0, hot, p.add_(q).mul_(apart.sub_(of_row).mul_(0.5).tanh_()))


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
    """The COLUMNS of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions."""
    known = torch.empty(len(student), len(COLUMNS), dtype=torch.float64)

    def measure(block: Block, rows: slice) -> None:
        _measure(block, known, student, teacher, actions, rows)

    share(_blocks(student), lambda: Block(student, PIECE), measure)
    return known


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, coefficients: Tensor
) -> None:
    """out = c0 softmax(student) - c1 softmax(teacher) - c2 onehot(action); c (N, 3) float64, `out` may be `student`.

    c0 is c1 + c2, as in every gradient of SPOD.
    """
    weights = float64.Weights(coefficients[:, 1], coefficients[:, 2])

    def differentiate(block: Block, own: slice) -> None:
        _differentiate(block, out, student, teacher, actions, rows, weights, own, again=True)

    share(_blocks(student), lambda: Block(student, PIECE), differentiate)


def _blocks(student: Tensor) -> list[slice]:
    count, most = len(student), rows_of(student, PIECE)
    return [slice(i, min(i + most, count)) for i in range(0, count, most)]


def _measure(block: Block, known: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, rows: slice) -> None:
    for part, own in block.pieces(rows):
        known[own] = part.measure(student[own], teacher[own], actions[own])


def _differentiate(
    block: Block,
    out: Tensor,
    student: Tensor,
    teacher: Tensor,
    actions: Tensor,
    known: Tensor,
    weights: float64.Weights,
    rows: slice,
    *,
    again: bool,
) -> None:
    """The gradient of some rows, from the block, which is filled `again` where it holds others by now."""
    for part, own in block.pieces(rows):
        given = float64.Weights(*(x[own] for x in weights))
        if again and any(bool(x.any()) for x in given):
            part.read(student[own], teacher[own], known[own])
            part.apart.nan_to_num_(0.0, math.inf, -math.inf)
        part.differentiate(out[own], known[own], actions[own], given)


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
    """As `cpu.statistics_and_gradient_`: rows are read once, but for a successful action that no block holds whole."""
    from .._spod_levels import Levels, parts_of

    count, most = len(student), rows_of(student, BLOCK)
    known = torch.empty(count, len(COLUMNS), dtype=torch.float64)
    given = float64.Weights(*(torch.zeros(count, dtype=torch.float64) for _ in range(2)))

    def both(block: Block, span: float64.Span) -> None:
        rows, own = span
        pieces = [slice(i, min(i + most, rows.stop)) for i in range(rows.start, rows.stop, most)]
        for piece in pieces:
            _measure(block, known, student, teacher, actions, piece)
        levels = Levels(tokens[own], success[own], weights[own])
        if rows.stop - rows.start < int(levels.tokens.sum()):  # a piece of an action whose gate cannot open
            given.kl[rows] = levels.weights
        else:
            parts = parts_of(known[rows], levels, tau0, floor_weight)
            given.kl[rows] = parts.of_kl.repeat_interleave(levels.tokens)
            given.floor[rows] = parts.of_floor.repeat_interleave(levels.tokens)
        for piece in pieces:
            _differentiate(block, out, student, teacher, actions, known, given, piece, again=len(pieces) > 1)

    share(float64.plan(tokens.tolist(), success.tolist(), most), lambda: Block(student, BLOCK), both)
    return known
