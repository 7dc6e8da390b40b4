"""SPOD fused with the head, forward and backward: ours at several shares of protected actions, Liger, TRL's tiles.

The floor is four GEMMs of the whole batch, measured in the same run. Peers are measured where installed (`pip install
--no-deps trl==1.16.0 liger-kernel`); none of them has a gate, so they compute the forward KL alone, like ours where
nothing is protected. Gradients are compared before anything is timed.
"""

import argparse
from typing import Any

import torch
from measure import Run, agree, extra_bytes, interleaved, machine, peer, save, table
from torch import Tensor

from paritygate.losses import spod
from paritygate.losses.engines import cpp

TOKENS = 8


class Problem:
    """Hidden states and heads; the actions taken are nearly certain, so that a successful episode is all protected."""

    def __init__(self, rows: int, vocabulary: int, width: int, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        self.head = torch.randn(vocabulary, width, device=device).mul_(width**-0.5).to(dtype)
        self.teacher_head = torch.randn(vocabulary, width, device=device).mul_(width**-0.5).to(dtype)
        self.actions = torch.randint(0, vocabulary, (rows,), device=device)
        hidden = torch.randn(rows, width, device=device)
        self.hidden = (hidden + 30.0 * self.head[self.actions].float()).to(dtype)
        self.teacher_hidden = torch.randn(rows, width, device=device).to(dtype)
        self.action_index = torch.arange(rows, device=device) // TOKENS
        self.episode_index = torch.arange(int(self.action_index[-1]) + 1, device=device)
        self.weights = self.hidden.requires_grad_(), self.head.requires_grad_()

    def ours(self, share: float, exact: bool = True) -> Tensor:
        """Our loss where a share of the actions is protected."""
        success = self.episode_index < round(share * len(self.episode_index))
        result = spod.fused_linear_success_preserving_loss(
            self.hidden, self.head, self.teacher_hidden, self.teacher_head, self.actions, self.action_index,
            self.episode_index, success, exact_teacher_logprob=exact,
        )  # fmt: skip
        assert torch.equal(result.gate, success)
        return result.loss

    def plain(self) -> Tensor:
        """The mean forward KL of the logits by autograd."""
        log_p = (self.hidden @ self.head.t()).float().log_softmax(-1)
        log_q = (self.teacher_hidden @ self.teacher_head.t()).float().log_softmax(-1)
        return (log_q.exp() * (log_q - log_p)).sum(-1).mean()

    def through(self, loss: Any) -> Run:
        """Forward and backward to fresh gradients of hidden states and head."""

        def run() -> list[Tensor]:
            for weight in self.weights:
                weight.grad = None
            loss().backward()
            return [weight.grad for weight in self.weights if weight.grad is not None]

        return run

    def floor(self) -> Run:
        """Four GEMMs into memory that is there already: logits twice, gradients of hidden states and head."""
        hidden, head, of_teacher, teacher = (
            x.detach() for x in (self.hidden, self.head, self.teacher_hidden, self.teacher_head)
        )
        p, of_hidden, of_head = torch.empty_like(hidden @ head.t()), torch.empty_like(hidden), torch.empty_like(head)

        def run() -> None:
            torch.mm(of_teacher, teacher.t(), out=p)
            torch.mm(hidden, head.t(), out=p)
            torch.mm(p, head, out=of_hidden)
            torch.mm(p.t(), hidden, out=of_head)

        return run


def contestants(problem: Problem) -> dict[str, Run]:
    """Forward and backward once each."""
    runs = {"plain autograd": problem.through(problem.plain)}
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        runs[f"ours, {share:.0%} protected"] = problem.through(lambda share=share: problem.ours(share))
    runs["ours, 100%, early exit"] = problem.through(lambda: problem.ours(1.0, exact=False))
    rows = problem.hidden.shape[0]
    if liger := peer("liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss"):
        made = liger(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False, chunk_size=rows // 4)
        runs["Liger chunked forward KL"] = problem.through(
            lambda: made(problem.hidden, problem.head, problem.teacher_hidden, problem.teacher_head, problem.actions)
        )
    if tiled := peer("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"):
        student, teacher = (problem.hidden, problem.head, None), (problem.teacher_hidden, problem.teacher_head, None)
        rest = (0.0, 1.0, 1.0, None, 1.0, None)  # forward KL; temperature, and no scale or cap of either's logits

        def by_tiles() -> Tensor:
            return tiled.apply(*student, *teacher, *rest)[0].mean()

        runs["TRL tiled forward KL"] = problem.through(by_tiles)
    return runs


def check(dtype: torch.dtype, device: str) -> None:
    """What nothing protects has the gradients of the mean forward KL, for everybody."""
    problem = Problem(64, 997, 64, dtype, device)
    exact = problem.through(problem.plain)()
    for name, run in contestants(problem).items():
        if "%" not in name or ", 0%" in name:
            for actual, wanted in zip(run(), exact, strict=True):
                agree(f"{name}, {dtype}", actual, wanted, 1e-4 if dtype == torch.float32 else 4e-2)


def main() -> None:
    """Parse the command line, check, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="N (256; 8192 on a GPU)")
    parser.add_argument("--vocabulary", type=int, help="V (32768; 151936 on a GPU)")
    parser.add_argument("--width", type=int, help="D (1024; 2560 on a GPU)")
    parser.add_argument("--dtypes", help="float32 (bfloat16 on a GPU)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    large = options.device != "cpu"
    rows, vocabulary = options.rows or (8192 if large else 256), options.vocabulary or (151936 if large else 32768)
    width, dtypes = options.width or (2560 if large else 1024), options.dtypes or ("bfloat16" if large else "float32")
    print(f"{machine(options.device)}; compiled kernels: {cpp.unavailable() or 'yes'}")
    record: dict[str, Any] = {"machine": machine(options.device), "torch": torch.__version__, "tables": []}
    for dtype in (getattr(torch, name) for name in dtypes.split(",")):
        check(dtype, options.device)
        problem = Problem(rows, vocabulary, width, dtype, options.device)
        runs = contestants(problem)
        extra = {name: extra_bytes(run, options.device) for name, run in runs.items()}
        times = interleaved({"floor": problem.floor(), **runs}, options.repeats, options.device)
        floor, size = times.pop("floor"), rows * vocabulary * dtype.itemsize
        lines = [
            {
                "": name,
                "ms": 1e3 * seconds,
                "/ 4 GEMMs": seconds / floor,
                "x Liger": times.get("Liger chunked forward KL", float("nan")) / seconds,
                "x TRL": times.get("TRL tiled forward KL", float("nan")) / seconds,
                "extra / logits": None if extra[name] is None else (extra[name] or 0) / size,
            }
            for name, seconds in times.items()
        ]
        print(f"\n{dtype}, N = {rows}, V = {vocabulary}, D = {width}: four GEMMs {1e3 * floor:.3g} ms\n{table(lines)}")
        record["tables"].append({"dtype": str(dtype), "rows": rows, "vocabulary": vocabulary, "width": width,
                                 "floor_ms": 1e3 * floor, "lines": lines})  # fmt: skip
    save(options.json, record)


if __name__ == "__main__":
    main()
