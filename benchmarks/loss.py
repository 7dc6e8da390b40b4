"""SPOD and SDPO with logits given, forward and backward: ours, plain autograd, TRL, torchtune, the floor of moving it.

Peers are measured where installed (`pip install --no-deps trl==1.16.0 torchtune`); none of them has SPOD's gate, so
they compute the forward KL alone. SDPO is its reverse KL, over the full vocabulary and over the student's top 100 and
a tail. Results are compared before anything is timed.
"""

import argparse
import math
import statistics
from typing import Any

import torch
from measure import Run, agree, all_times, extra_bytes, interleaved, machine, peer, peer_file, save, table
from torch import Tensor

from paritygate.losses import sdpo, spod
from paritygate.losses.engines import cpp

TOKENS = 8  # in an action
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def problem(rows: int, vocabulary: int, dtype: torch.dtype, device: str, succeeded: float = 0.5) -> dict[str, Tensor]:
    """Random logits; actions of 8 tokens, four an episode, of which a share succeeded."""
    torch.manual_seed(0)
    student = torch.randn(rows, vocabulary, device=device).mul_(2)
    teacher = torch.randn(rows, vocabulary, device=device).add_(student)
    tokens = torch.arange(rows, device=device) // TOKENS
    episodes = torch.arange(int(tokens[-1]) + 1, device=device) // 4
    count = int(episodes[-1]) + 1
    return {
        "student_logits": student.to(dtype),
        "teacher_logits": teacher.to(dtype),
        "actions": torch.randint(0, vocabulary, (rows,), device=device),
        "action_index": tokens,
        "episode_index": episodes,
        "success": torch.arange(count, device=device) < succeeded * count,
    }


def plain(data: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The loss as one would write it down: autograd through log-softmaxes; all actions and episodes are as long."""
    log_p = data["student_logits"].to(dtype).log_softmax(-1)
    log_q = data["teacher_logits"].to(dtype).log_softmax(-1)
    kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    chosen = data["actions"][:, None]
    l_p, l_q = (x.gather(1, chosen)[:, 0].view(-1, TOKENS).sum(1) for x in (log_p, log_q))
    gate = data["success"][data["episode_index"]] & (l_q < l_p).detach()
    floor = (math.log(0.5) - l_p).clamp(min=0) / TOKENS
    return torch.where(gate, floor, kl.view(-1, TOKENS).mean(1)).mean()


def contestants(data: dict[str, Tensor], buffer: Tensor) -> dict[str, Run]:
    """Each runs forward and backward once, on logits that are a leaf."""
    leaf = data["student_logits"].requires_grad_()
    mine: dict[str, Any] = {**data, "student_logits": leaf}
    rows = leaf.shape[0]

    def through(loss: Any) -> Run:
        def run() -> Tensor:
            loss().backward()
            gradient, leaf.grad = leaf.grad, None  # whoever makes memory lets go of it in its own time
            assert gradient is not None
            return gradient

        return run

    def without_kernel() -> object:
        serves, cpp.serves = cpp.serves, lambda *_: False
        try:
            return spod.success_preserving_loss_and_grad(**data, out=buffer)[1]
        finally:
            cpp.serves = serves

    runs: dict[str, Run] = {
        "plain autograd": through(lambda: plain(mine)),
        "ours, autograd": through(lambda: spod.success_preserving_loss(**mine).loss),
        "ours, reused buffer": lambda: spod.success_preserving_loss_and_grad(**data, out=buffer)[1],
        "ours, in place": lambda: spod.success_preserving_loss_and_grad(
            **{**data, "student_logits": buffer}, out=buffer
        )[1],
    }
    if leaf.device.type == "cpu":
        runs["ours, torch alone"] = without_kernel
    if trainer := peer("trl.experimental.gkd.gkd_trainer", "GKDTrainer"):
        runs["TRL generalized_jsd, beta 0"] = through(
            lambda: trainer.generalized_jsd_loss(leaf[None], data["teacher_logits"][None], beta=0.0) / rows
        )
    if module := peer_file("torchtune", "modules/loss/kd_losses.py"):
        loss, labels = (
            module.ForwardKLWithChunkedOutputLoss(8),
            torch.zeros(1, rows, dtype=torch.int64, device=leaf.device),
        )
        teacher = list(data["teacher_logits"][None].chunk(8, dim=1))
        runs["torchtune chunked forward KL"] = through(lambda: loss(list(leaf[None].chunk(8, dim=1)), teacher, labels))
    return runs


def divergence(student: Tensor, teacher: Tensor, top_k: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mean reverse KL as one would write it down, over everything or the student's top k and a tail."""
    log_p, log_q = student.to(dtype).log_softmax(-1), teacher.to(dtype).log_softmax(-1)
    if top_k is not None:
        at = student.topk(top_k, dim=-1).indices
        kept = [x.gather(1, at) for x in (log_p, log_q)]
        log_p, log_q = (
            torch.cat([x, torch.log(-torch.expm1(x.logsumexp(-1, keepdim=True).clamp(max=-1e-7)))], dim=1) for x in kept
        )
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def sdpo_contestants(data: dict[str, Tensor], top_k: int | None) -> dict[str, Run]:
    """Each runs forward and backward once, on logits that are a leaf."""
    leaf, teacher = data["student_logits"].requires_grad_(), data["teacher_logits"]
    mask = torch.ones(1, len(leaf), dtype=torch.bool, device=leaf.device)

    def through(loss: Any) -> Run:
        def run() -> Tensor:
            loss().backward()
            gradient, leaf.grad = leaf.grad, None  # whoever makes memory lets go of it in its own time
            assert gradient is not None
            return gradient

        return run

    runs = {
        "plain autograd": through(lambda: divergence(leaf, teacher, top_k)),
        "ours": through(lambda: sdpo.logit_loss(leaf[None], teacher[None], mask, top_k=top_k)),
    }
    if module := peer_file("trl", "experimental/sdpo/loss_utils.py", {"trainer.utils": "selective_log_softmax"}):
        full, kept = module.compute_full_logit_self_distillation_loss, module.compute_topk_self_distillation_loss
        options: dict[str, Any] = {"distillation_alpha": 1.0}
        if top_k is not None:
            options |= {"distillation_topk": top_k, "distillation_add_tail": True}
        theirs = full if top_k is None else kept
        runs["TRL SDPO"] = through(lambda: theirs(leaf, teacher, **options).mean())
    return runs


def measure_sdpo(data: dict[str, Tensor], top_k: int | None, device: str, repeats: int) -> dict[str, Any]:
    """Median times and extra memory of the reverse KL, after a comparison of gradients at a smaller size."""
    dtype, size = data["student_logits"].dtype, data["student_logits"].nbytes
    # In float32: in half precision logits tie, and everybody breaks ties at the edge of the top k otherwise.
    small = problem(32, 4099, torch.float32, device)
    exact = small["student_logits"].double().requires_grad_()
    divergence(exact, small["teacher_logits"].double(), top_k, torch.float64).backward()
    for name, run in sdpo_contestants(small, top_k).items():
        agree(f"{name}, reverse KL, top {top_k}", run(), exact.grad, TOLERANCE[torch.float32])
    runs = sdpo_contestants(data, top_k)
    extra = extra_of(runs, data, device)
    times = interleaved(runs, repeats, device)
    lines = [
        {
            "": name,
            "ms": 1e3 * seconds,
            "x plain": times["plain autograd"] / seconds,
            "x TRL": times.get("TRL SDPO", math.nan) / seconds,
            "extra / logits": None if extra[name] is None else max(0, extra[name] or 0) / size,
        }
        for name, seconds in times.items()
    ]
    what = "the full vocabulary" if top_k is None else f"the top {top_k} and a tail"
    print(f"\nSDPO's reverse KL over {what}, {dtype}\n{table(lines)}")
    return {"dtype": str(dtype), "top_k": top_k, "lines": lines}


def check(rows: int, vocabulary: int, dtype: torch.dtype, device: str) -> None:
    """Every gradient against plain autograd in float64: with the gate, and for peers where no episode succeeded."""
    for succeeded in (0.5, 0.0):
        data = problem(rows, vocabulary, dtype, device, succeeded)
        exact = data["student_logits"].double().requires_grad_()
        plain({**data, "student_logits": exact}, torch.float64).backward()
        buffer = data["student_logits"].clone()
        for name, run in contestants(data, buffer).items():
            if succeeded == 0 or not name.startswith(("TRL", "torchtune")):
                buffer.copy_(data["student_logits"])
                agree(f"{name}, {dtype}", run(), exact.grad, TOLERANCE[dtype])


def extra_of(runs: dict[str, Run], data: dict[str, Tensor], device: str) -> dict[str, int | None]:
    """Extra bytes of each, with no gradient left over from the one before."""
    extra: dict[str, int | None] = {}
    for name, run in runs.items():
        data["student_logits"].grad = None
        extra[name] = extra_bytes(run, device)
    return extra


def measure(rows: int, vocabulary: int, dtype: torch.dtype, device: str, repeats: int) -> dict[str, Any]:
    """Median times, ratios and extra memory of every contestant, and the floor: copying moves 2 N V numbers, we 3."""
    data = problem(rows, vocabulary, dtype, device)
    buffer = data["student_logits"].clone()
    runs = contestants(data, buffer)
    size = buffer.numel() * buffer.element_size()
    extra = extra_of(runs, data, device)
    taken = all_times({"copy": lambda: buffer.copy_(data["teacher_logits"]), **runs}, repeats, device)
    times = {name: statistics.median(seconds) for name, seconds in taken.items()}
    floor = 1.5 * times.pop("copy")
    trl = times.get("TRL generalized_jsd, beta 0", math.nan)
    lines = [
        {
            "": name,
            "ms": 1e3 * seconds,
            "fastest to slowest ms": f"{1e3 * min(taken[name]):.3g} to {1e3 * max(taken[name]):.3g}",
            "x plain": times["plain autograd"] / seconds,
            "x TRL": trl / seconds,
            "/ floor": seconds / floor,
            "extra / logits": None if extra[name] is None else max(0, extra[name] or 0) / size,
        }
        for name, seconds in times.items()
    ]
    print(f"\n{dtype}, N = {rows}, V = {vocabulary}: floor {1e3 * floor:.3g} ms\n{table(lines)}")
    return {"dtype": str(dtype), "rows": rows, "vocabulary": vocabulary, "floor_ms": 1e3 * floor, "lines": lines}


def sweep(dtype: torch.dtype, device: str, repeats: int) -> list[dict[str, Any]]:
    """Time and extra memory of ours through autograd and in place, and plain, over N and over V."""
    points: list[dict[str, Any]] = []
    for axis, sizes in {
        "N": [(n, 65536) for n in (64, 128, 256, 512)],
        "V": [(128, v) for v in (16384, 32768, 65536, 131072, 262144)],
    }.items():
        for rows, vocabulary in sizes:
            data = problem(rows, vocabulary, dtype, device)
            buffer = data["student_logits"].clone()
            kept = {
                k: v for k, v in contestants(data, buffer).items() if k.startswith(("plain", "ours, a", "ours, in"))
            }
            extra = extra_of(kept, data, device)
            times = interleaved(kept, repeats, device)
            points.append({"axis": axis, "rows": rows, "vocabulary": vocabulary, "seconds": times, "extra": extra})
            print(f"N = {rows}, V = {vocabulary}: " + ", ".join(f"{k} {1e3 * t:.3g} ms" for k, t in times.items()))
    return points


def main() -> None:
    """Parse the command line, check, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="N (256; 8192 on a GPU), a multiple of 32")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sweep", action="store_true", help="over N and V instead, for benchmarks/plot.py")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = options.rows or (256 if options.device == "cpu" else 8192)
    dtypes = [getattr(torch, name) for name in options.dtypes.split(",")]
    print(f"{machine(options.device)}; compiled kernels: {cpp.unavailable() or 'yes'}")
    for dtype in dtypes:
        check(32, 4099, dtype, options.device)
    record: dict[str, Any] = {"machine": machine(options.device), "torch": torch.__version__}
    if options.sweep:
        record["sweep"] = {str(d): sweep(d, options.device, options.repeats) for d in dtypes}
    else:
        record["tables"] = [measure(rows, options.vocabulary, d, options.device, options.repeats) for d in dtypes]
        record["sdpo"] = [
            measure_sdpo(problem(rows, options.vocabulary, d, options.device), top_k, options.device, options.repeats)
            for d in dtypes
            for top_k in (None, 100)
        ]
    save(options.json, record)


if __name__ == "__main__":
    main()
