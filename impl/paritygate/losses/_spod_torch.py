"""SPOD's rows in float32 by torch alone, where no compiler is: a few rows at a time in buffers that stay in the cache.

What float32 cannot do is left to `_spod_rows` in float64, row by row: nearly equal rows, and entries of -inf.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from . import _spod_rows as precise
from .kernels.cpu import COLUMNS, DTYPES

NEAR = 0.25
BLOCK = 1 << 17  # entries at a time: three float32 buffers of half a MiB


def serves(student: Tensor, teacher: Tensor) -> bool:
    """Whether (N, V) logits are of dtypes that float32 holds."""
    return {student.dtype, teacher.dtype} <= DTYPES.keys() and student.shape[1] > 0


def statistics(student: Tensor, teacher: Tensor, actions: Tensor) -> Tensor:
    """The COLUMNS of each row, (N, 9) float64; a slope that is not NaN marks a row that is left to float64."""
    known = torch.full((student.shape[0], len(COLUMNS)), torch.nan, dtype=torch.float64, device=student.device)
    for i, j, (x, y, z) in _blocks(student):
        pm, qm = (side[i:j].amax(-1, keepdim=True).float() for side in (student, teacher))
        torch.sub(student[i:j], pm, out=x)
        torch.sub(teacher[i:j], qm, out=y)
        low, high = torch.aminmax(torch.sub(y, x, out=z), dim=-1)
        exact = torch.maximum(high.abs(), low.abs()) <= NEAR
        ps, qs = x.exp_().sum(-1).double(), y.exp_().sum(-1).double()
        cross = z.mul_(y).sum(-1).double()
        kl = (cross / qs - qs.log() + ps.log()).clamp(min=0.0)
        picked = actions[i:j, None].clamp(0, student.shape[1] - 1)
        inside = actions[i:j] == picked[:, 0]
        log_p = student[i:j].gather(1, picked).double() - pm - ps.log()[:, None]
        log_q = teacher[i:j].gather(1, picked).double() - qm - qs.log()[:, None]
        logprobs = (torch.where(inside, log[:, 0], torch.nan) for log in (log_p, log_q))
        none = torch.full_like(kl, torch.nan)
        known[i:j] = torch.stack([pm[:, 0], ps, qm[:, 0], qs, *logprobs, kl, none, none], dim=1)
        exact |= ~torch.isfinite(kl) & torch.isfinite(ps + qs)
        for row in (i + exact.nonzero()[:, 0]).tolist():
            kl, _, _ = precise.statistics(student[row : row + 1], teacher[row : row + 1], picked[row - i])
            known[row, COLUMNS.index("kl")], known[row, COLUMNS.index("slope")] = kl[0], 0.0
    return known


def gradient_(
    out: Tensor, student: Tensor, teacher: Tensor, actions: Tensor, rows: Tensor, coefficients: Tensor
) -> None:
    """out = c0 softmax(student) - c1 softmax(teacher) - c2 onehot(action); c (N, 3) float64, `out` may be `student`."""
    single = coefficients.float()
    pm, ps, qm, qs = (rows[:, k, None].float() for k in range(4))
    exact = ~rows[:, COLUMNS.index("slope")].isnan() & (coefficients != 0).any(-1)
    for i, j, (x, y, _) in _blocks(student):
        kept = [(r, student[r : r + 1].clone()) for r in (i + exact[i:j].nonzero()[:, 0]).tolist()]
        torch.sub(student[i:j], pm[i:j], out=x).exp_().mul_(single[i:j, :1] / ps[i:j])
        torch.sub(teacher[i:j], qm[i:j], out=y).exp_()
        x.addcmul_(y, single[i:j, 1:2] / qs[i:j], value=-1)
        inside = (actions[i:j] >= 0) & (actions[i:j] < student.shape[1])
        at = torch.where(inside, actions[i:j], 0)[:, None]
        x.scatter_add_(1, at, -torch.where(inside, single[i:j, 2], 0.0)[:, None])
        out[i:j] = x
        for r, own in kept:
            kl, floor = coefficients[r : r + 1, 1], coefficients[r : r + 1, 2]
            weights = precise.Weights(kl, floor)
            out[r : r + 1] = precise.gradient(own, teacher[r : r + 1], actions[r : r + 1], weights)


def _blocks(student: Tensor) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Rows i to j, and three float32 buffers of their shape."""
    count, vocabulary = student.shape
    step = max(1, BLOCK // vocabulary)
    buffers = [torch.empty(min(step, count), vocabulary, device=student.device) for _ in range(3)]
    for i in range(0, count, step):
        j = min(i + step, count)
        yield i, j, [buffer[: j - i] for buffer in buffers]
