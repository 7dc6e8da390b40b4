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
from ..row_stats import COLUMNS
from . import float64
from .base import DTYPES, PLAIN

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


class Block:
    """Some rows: exp(p - max p), exp(q - max q), the difference of the exponents; whole CHUNKs, 0 beyond V.

    Of each chunk the largest logit of both (2, rows, chunks), and the sums of p, q and q (p - q), (3, rows, chunks).
    """

    def __init__(self, student: Tensor, entries: int) -> None:
        rows, chunks = rows_of(student, entries), -(-student.shape[1] // CHUNK)
        self.step = min(rows, rows_of(student, PIECE))
        self.p, self.q, self.apart = (torch.empty(rows, chunks * CHUNK) for _ in range(3))
        for buffer in (self.p, self.q, self.apart):
            buffer[:, student.shape[1] :] = 0.0
        self.room = torch.empty(self.step, chunks * CHUNK)
        self.tops, self.parts = torch.empty(2, rows, chunks), torch.empty(3, rows, chunks)

    def pieces(self, count: int) -> Iterator[slice]:
        """The first `count` rows, as many at a time as stay in a cache of one core's."""
        return (slice(i, min(i + self.step, count)) for i in range(0, count, self.step))

    def read(self, student: Tensor, teacher: Tensor, *, add_up: bool) -> None:
        """Fill the buffers from logits (n, V); `add_up` says whether the sums are wanted."""
        v = student.shape[1]
        for rows in self.pieces(len(student)):
            for buffer, logits, tops in ((self.p, student, self.tops[0]), (self.q, teacher, self.tops[1])):
                own = buffer[rows, :v]
                values = logits[rows] if logits.dtype == torch.float32 else own.copy_(logits[rows])
                torch.sub(values, largest(values, tops[rows]), out=own)
            p, q, apart = (x[rows, :v] for x in (self.p, self.q, self.apart))
            torch.sub(p, q, out=apart)
            p.exp_()
            q.exp_()
            if add_up:
                product = torch.mul(self.q[rows], self.apart[rows], out=self.room[: rows.stop - rows.start])
                for values, parts in zip((self.p[rows], self.q[rows], product), self.parts[:, rows], strict=True):
                    torch.sum(values.unflatten(1, (-1, CHUNK)), -1, out=parts)

    def sums(self, count: int) -> Iterator[Tensor]:
        """Of p, q and q (p - q) in the first `count` rows, each (count,) float64."""
        most = min(LARGEST, self.parts.shape[2])
        for rough, values, factor in zip(
            self.parts[:, :count], (self.p, self.q, self.q), (None, None, self.apart), strict=True
        ):
            at = rough.abs().topk(most).indices
            exact = chunks_at(values[:count], at).double()
            if factor is not None:
                exact *= chunks_at(factor[:count], at)
            yield rough.double().scatter_(1, at, 0.0).sum(-1) + exact.sum((1, 2))

    def measure(self, student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
        """The COLUMNS of these rows, (n, 9) float64."""
        n, v = student.shape
        known = torch.zeros(n, len(COLUMNS), dtype=torch.float64)
        known[:, 7] = torch.nan
        self.read(student, teacher, add_up=True)
        known[:, 0], known[:, 2] = self.tops[:, :n].amax(-1)
        known[:, 1], known[:, 3], cross = self.sums(n)
        log_p, log_q = known[:, 1].log(), known[:, 3].log()
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
        apart, q = self.apart[i].nan_to_num(0.0, math.inf, -math.inf), self.q[i]
        if bool(((q == 0) & (apart == -math.inf)).any()):
            return math.nan  # there may be teacher mass that float32 cannot hold
        return apart.mul_(q).nan_to_num_(0.0, math.inf, -math.inf).sum(dtype=torch.float64)

    def differentiate(self, out: Tensor, known: Tensor, actions: Tensor, weights: gate.Weights) -> None:
        """`kl (p - q) + floor (p - onehot)` into `out` (n, V), of the rows in the buffers."""
        n, v = out.shape
        of_kl, of_floor = weights
        if not bool(of_kl.any() | of_floor.any()):
            out.zero_()
            return
        sum_p, sum_q = known[:, 1], known[:, 3]
        factors = torch.stack([of_kl / sum_p, of_kl / sum_q, of_floor / sum_p, sum_p.log() - sum_q.log()], 1).float()
        of_p, of_q = ((of_kl + of_floor) / sum_p)[:, None].float(), factors[:, 1:2]
        hot = self.hot(known) & (of_kl != 0)[:, None]
        has_kl, idle = (of_kl != 0).tolist(), ((of_kl == 0) & (of_floor == 0)).tolist()
        direct = out.dtype == torch.float32 and v == self.p.shape[1] and out.is_contiguous()
        for rows in self.pieces(n):
            if all(idle[rows]):
                out[rows] = 0.0
                continue
            room = out[rows] if direct else self.room[: rows.stop - rows.start]
            torch.mul(self.p[rows], of_p[rows], out=room)
            if any(has_kl[rows]):
                torch.addcmul(room, self.q[rows], of_q[rows], value=-1.0, out=room)
                self.sharpen(room, hot[rows], factors[rows], rows)
            if any(idle[rows]):
                room[torch.tensor(idle[rows])] = 0.0  # whatever they hold
            if not direct:
                out[rows] = room[:, :v]
        taken = ((of_floor != 0) & ~known[:, 4].isnan()).nonzero()[:, 0]
        l_p, l_q = known[taken, 4], known[taken, 5]  # in float64: p - 1 of an action that is nearly sure
        of_student = of_kl[taken] * torch.where(of_kl[taken] == 0, 0.0, l_p.exp() - l_q.exp())
        out[taken, actions[taken]] = (of_student + of_floor[taken] * l_p.expm1()).to(out.dtype)

    def hot(self, known: Tensor) -> Tensor:
        """(n, chunks) whether p exceeds NEAR of the largest |p - q| among the row's largest p and q."""
        tops = self.tops[:, : len(known)]
        at = tops.argmax(-1).t()
        sum_p, sum_q = known[:, 1, None, None], known[:, 3, None, None]
        apart = chunks_at(self.p[: len(known)], at) / sum_p - chunks_at(self.q[: len(known)], at) / sum_q
        bound = NEAR * sum_p[..., 0] * apart.abs().amax((1, 2))[:, None]
        return (tops[0] - known[:, 0, None]).exp() > bound

    def sharpen(self, gradient: Tensor, hot: Tensor, factors: Tensor, rows: slice) -> None:
        """Replace `p - q` by `(p + q) tanh(r / 2)` in the chunks of these rows that are `hot`."""
        row, chunk = hot.nonzero(as_tuple=True)
        at = row * hot.shape[1] + chunk
        p, q, apart = (x[rows].view(-1, CHUNK).index_select(0, at) for x in (self.p, self.q, self.apart))
        of_p, of_q, floor, shift = factors[row, :, None].unbind(1)
        ratio = apart.nan_to_num_(0.0, math.inf, -math.inf).sub_(shift).mul_(0.5).tanh_()
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
    first = torch.arange(0, values.numel() // CHUNK, values.shape[1] // CHUNK)[:, None]
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
    """The COLUMNS of each row, (N, 9) float64, of (N, V) logits and (N,) int64 actions."""
    known = torch.empty(len(student), len(COLUMNS), dtype=torch.float64)

    def measure(block: Block, rows: slice) -> None:
        known[rows] = block.measure(student[rows], teacher[rows], actions[rows])

    share(_blocks(student), lambda: Block(student, BLOCK), measure)
    return known


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, coefficients: Tensor
) -> None:
    """out = c0 softmax(student) - c1 softmax(teacher) - c2 onehot(action); c (N, 3) float64, `out` may be `student`.

    c0 is c1 + c2, as in every gradient of SPOD.
    """

    def differentiate(block: Block, own: slice) -> None:
        weights = gate.Weights(coefficients[own, 1], coefficients[own, 2])
        if any(bool(x.any()) for x in weights):
            block.read(student[own], teacher[own], add_up=False)
        block.differentiate(out[own], rows[own], actions[own], weights)

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
    known = torch.empty(count, len(COLUMNS), dtype=torch.float64)
    given = gate.Weights(*(torch.zeros(count, dtype=torch.float64) for _ in range(2)))

    def both(block: Block, span: gate.Span) -> None:
        rows, own = span
        pieces = [slice(i, min(i + most, rows.stop)) for i in range(rows.start, rows.stop, most)]
        for piece in pieces:
            known[piece] = block.measure(student[piece], teacher[piece], actions[piece])
        levels = gate.Levels(tokens[own], success[own], weights[own])
        if rows.stop - rows.start < int(levels.tokens.sum()):  # a piece of an action whose gate cannot open
            given.kl[rows] = levels.weights
        else:
            parts = gate.parts_of(known[rows], levels, tau0, floor_weight)
            given.kl[rows] = parts.of_kl.repeat_interleave(levels.tokens)
            given.floor[rows] = parts.of_floor.repeat_interleave(levels.tokens)
        for piece in pieces:
            weighted = gate.Weights(given.kl[piece], given.floor[piece])
            if len(pieces) > 1 and any(bool(x.any()) for x in weighted):
                block.read(student[piece], teacher[piece], add_up=False)
            block.differentiate(out[piece], known[piece], actions[piece], weighted)

    share(gate.plan(tokens.tolist(), success.tolist(), most), lambda: Block(student, BLOCK), both)
    return known
