"""The embedded server against transformers.generate at batch 16 and against transformers + PEFT; and a soak.

Both run the same model in this process on one thread, greedily, from a cold cache; ours goes through HTTP and the real
SDK, but for training (`--training`, where peft is installed), which is one forward and backward pass of each. CPU
seconds of the whole process stand beside wall seconds, for a machine that others use too. First comes how far from
float64 the logprobs of both are; ours may be no further than those of plain transformers in the same dtype.
"""

import argparse
import asyncio
import copy
import os
import statistics
import time
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import torch
from measure import machine, peer, resident, save, table, timed
from tinker import ServiceClient, types
from torch import Tensor

from paritygate import native, server
from paritygate.server.engine.losses import LossInputs
from paritygate.server.engine.training import Datum, Pass
from paritygate.server.model.lora import Adapter, LoraSpec
from paritygate.server.model.network import Network
from paritygate.server.model.sources import resolve
from paritygate.server.model.tiny import corpus
from paritygate.server.running import DTYPES

BATCH = 16


def prompts(tokenizer: Any, prefix: int, tail: int) -> list[list[int]]:
    """BATCH prompts of `prefix` shared tokens and `tail` tokens of their own, of English text."""
    words = tokenizer.encode(" ".join(corpus()))
    suffixes = [words[4000 + 131 * i : 4000 + 131 * i + tail] for i in range(BATCH)]
    return [words[:prefix] + rest for rest in suffixes]


def ours(sampler: Any, batch: list[list[int]], new: int) -> list[Any]:
    params = types.SamplingParams(max_tokens=new, temperature=0.0, stop=[], seed=0)
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in batch]
    return [future.result().sequences[0] for future in futures]


def theirs(model: Any, batch: list[list[int]], new: int) -> list[list[int]]:
    tokens = torch.tensor(batch)
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False
    )
    return out[:, tokens.shape[1] :].tolist()


def logprobs_of(model: Any, tokens: list[int], count: int) -> Tensor:
    """Logprobs (count,) of the last tokens, of logits in the model's dtype, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]]), logits_to_keep=count).logits[0].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[-count:])[:, None])[:, 0]


def check(model: Any, exact: Any, batch: list[list[int]], drawn: list[Any]) -> None:
    """Prints how far logprobs are from float64, ours and plain transformers' in its dtype; stops where ours are worse.

    Every token of ours must be as likely as the most likely one, up to the same distance.
    """
    worst = [0.0, 0.0]
    for prompt, sequence in zip(batch, drawn, strict=True):
        tokens, count = prompt + sequence.tokens, len(sequence.tokens)
        want = logprobs_of(exact, tokens, count)
        for i, got in enumerate((torch.tensor(sequence.logprobs).double(), logprobs_of(model, tokens, count))):
            worst[i] = max(worst[i], float((got - want).abs().max()))
    print(f"logprobs against float64, largest difference: ours {worst[0]:.2g}, transformers {worst[1]:.2g} nats")
    if not worst[0] <= max(worst[1], 1e-4):
        raise SystemExit("ours are further from float64 than plain transformers: nothing is timed")


def roofline(model: Any, dtype: torch.dtype, rows: int, steps: int) -> float:
    """Seconds that `rows` of prefill at torch's speed for large products and `steps` readings of the weights take."""
    weights = [p for p in model.parameters() if p.ndim == 2]
    square, size = torch.randn(1024, 1024).to(dtype), sum(p.numel() for p in weights)
    product = min(timed(lambda: square @ square, "cpu") for _ in range(9))
    buffers = [torch.empty_like(p) for p in weights]
    copied = min(timed(lambda: [a.copy_(b) for a, b in zip(buffers, weights, strict=True)], "cpu") for _ in range(5))
    return rows * size / 1024**3 * product + steps * copied / 2


def in_turn(runs: dict[str, Any], repeats: int, before: Any = None) -> dict[str, float]:
    """Median wall and CPU seconds of each, one after the other `repeats` times, and both ratios."""
    wall: dict[str, list[float]] = {who: [] for who in runs}
    cpu: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(repeats):
        if before is not None:
            before()
        for who, run in runs.items():
            start = time.process_time()
            wall[who].append(timed(run, "cpu"))
            cpu[who].append(time.process_time() - start)
    row: dict[str, float] = {}
    for clock, taken in (("wall", wall), ("cpu", cpu)):
        medians = {who: statistics.median(seconds) for who, seconds in taken.items()}
        row |= {f"{who} {clock} s": seconds for who, seconds in medians.items()}
        first, second = medians.values()
        row[f"{clock} ratio"] = first / second
    return row


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    running = server.start(args.model, dtype=args.dtype, threads=1)
    model = AutoModelForCausalLM.from_pretrained(str(running.tokenizer), dtype=getattr(torch, args.dtype)).eval()
    exact = copy.deepcopy(model).double()
    model.generation_config.eos_token_id = None  # or a row that ends early would be padded and cost less
    tokenizer = AutoTokenizer.from_pretrained(str(running.tokenizer))
    client = ServiceClient(base_url=running.base_url, api_key=running.api_key)
    sampler = client.create_sampling_client(base_model=running.model_name).result()
    rows: list[dict[str, Any]] = []
    for name, prefix, tail in (("no shared prefix", 0, args.tail), ("shared prefix", args.prefix, 8)):
        batch = prompts(tokenizer, prefix, tail)
        if name not in args.cases:
            continue
        check(model, exact, batch[:2], ours(sampler, batch[:2], args.new))
        runs = {
            "generate": lambda batch=batch: theirs(model, batch, args.new),
            "ours": lambda batch=batch: ours(sampler, batch, args.new),
        }
        with torch.no_grad():
            row = in_turn(runs, args.repeats, running.service.engine.prefix.clear)
        floor = roofline(model, model.dtype, prefix + BATCH * tail, args.new)
        sizes: dict[str, Any] = {"case": name, "prompt": len(batch[0]), "new": args.new, "roofline s": floor}
        rows.append({**sizes, **row, "goal": 1.5 if prefix else 0.95})
    client.close("success").result()
    running.stop()
    return rows


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A forward and backward pass of eight datums, ours and transformers' with PEFT's LoRA of the same numbers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config, wrap = peer("peft", "LoraConfig"), peer("peft", "get_peft_model")
    if config is None:
        return []
    folder, dtype = resolve(args.model).folder, getattr(torch, args.dtype)
    network = Network(folder, dtype)
    adapter = Adapter(LoraSpec(rank=32, seed=0, unembed=False), network.targets)
    with torch.no_grad():
        for b in adapter.b.values():
            b.add_(torch.randn(b.shape) * 0.02)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    exact = copy.deepcopy(model).double()
    settings = {"r": 32, "lora_alpha": 32, "target_modules": "all-linear"}
    model, exact = (wrap(x, config(**settings), autocast_adapter_dtype=x is model) for x in (model, exact))
    exact.double()
    for other in (model, exact):
        for name, parameter in other.named_parameters():
            if "lora_" in name:
                target = name.partition(".lora_")[0].partition("base_model.model.model.")[2]
                parameter.data.copy_((adapter.a if "lora_A" in name else adapter.b)[target])
    words = AutoTokenizer.from_pretrained(str(folder)).encode(" ".join(corpus()))
    texts = [words[4000 + 523 * i :][: args.tokens + 1] for i in range(8)]
    one = torch.ones(args.tokens)
    data = [Datum(text[:-1], LossInputs(torch.tensor(text[1:]), {"weights": one})) for text in texts]

    def mine() -> tuple[Tensor, Tensor]:
        for _, parameter in adapter.parameters():
            parameter.grad = None
        work = Pass(network, adapter, data, "cross_entropy", {}, forward_only=False)
        for _ in work.steps(2048):
            pass
        gradients = [adapter.a[name].grad for name in sorted(adapter.a)]
        return torch.stack(work.outcome.logprobs), torch.cat([g.flatten() for g in gradients if g is not None])

    def peft(model: Any, count: int = len(texts)) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        tokens = torch.tensor(texts[:count])
        logits = model(tokens[:, :-1]).logits
        chosen = logits.float() if logits.dtype != torch.float64 else logits
        logprobs = -torch.nn.functional.cross_entropy(chosen.transpose(1, 2), tokens[:, 1:], reduction="none")
        (-logprobs.sum()).backward()
        named = {n: p for n, p in model.named_parameters() if "lora_A" in n}
        order = sorted(named, key=lambda n: n.partition(".lora_")[0].partition("base_model.model.model.")[2])
        return logprobs.detach(), torch.cat([named[n].grad.flatten() for n in order])

    want, (got, gradient), (other, their_gradient) = peft(exact, 1)[0], mine(), peft(model)
    errors = [float((x[:1] - want).abs().max()) for x in (got, other)]
    cosine = float(torch.nn.functional.cosine_similarity(gradient.double(), their_gradient.double(), dim=0))
    print(f"logprobs against float64: ours {errors[0]:.2g}, PEFT {errors[1]:.2g} nats; gradients' cosine {cosine:.5f}")
    if not errors[0] <= max(errors[1], 1e-4) or not cosine > 0.99:
        raise SystemExit("results differ: nothing is timed")
    print("PEFT does the same work: these datums, rank 32, all layers but the head, float32 A and B, no checkpoints;")
    print(f"weights and what lies between layers are {args.dtype} there, and {args.dtype} and float32 here")
    row = in_turn({"PEFT": lambda: peft(model), "ours": mine}, args.repeats)
    floor = 2 * roofline(exact.base_model.model.to(dtype), dtype, 8 * args.tokens, 0)
    return [{"case": "training", "tokens": 8 * args.tokens, "roofline s": floor, **row, "goal": 1.0}]


def soak(clients: int, requests: int) -> dict[str, Any]:
    """Many concurrent sample requests of the tiny model: right answers, seconds, memory."""
    running = server.start("tiny")

    def ask(sampler: Any, number: int) -> Any:
        prompt = [(7 * number + j) % 480 for j in range(20 + number % 50)]
        params = types.SamplingParams(max_tokens=16, seed=number % 40)
        return sampler.sample(types.ModelInput.from_ints(prompt), 1, params)

    async def script() -> dict[str, Any]:
        connected = [
            await asyncio.to_thread(lambda: ServiceClient(base_url=running.base_url, api_key=running.api_key))
            for _ in range(clients)
        ]
        samplers = [await c.create_sampling_client(base_model=running.model_name) for c in connected]
        alone = {n: (await ask(samplers[0], n)).sequences[0].tokens for n in range(40)}
        held, start = resident("VmRSS"), time.perf_counter()
        results = await asyncio.gather(*(ask(samplers[n % clients], n % 40) for n in range(requests)))
        right = sum(r.sequences[0].tokens == alone[n % 40] for n, r in enumerate(results))
        record = {"clients": clients, "requests": requests, "right": right, "seconds": time.perf_counter() - start}
        record["memory grown MiB"] = (resident("VmRSS") - held) / 2**20
        for client in connected:
            await client.close("success")
        return record

    record = asyncio.run(script())
    running.stop()
    if record["right"] != requests:
        raise SystemExit(f"only {record['right']} of {requests} answers were right: nothing is reported")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--tail", type=int, default=128, help="tokens of a prompt without a shared prefix")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=["no shared prefix", "shared prefix"])
    parser.add_argument("--training", action="store_true", help="forward and backward against PEFT, too")
    parser.add_argument("--tokens", type=int, default=512, help="of each of eight training datums")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("cpu"), args.model, args.dtype, native.build_record().get("bfloat16", ""))
    record: dict[str, Any] = {"machine": machine("cpu"), "model": args.model, "dtype": args.dtype}
    if args.cases:
        record["rows"] = compare(args)
        print(table(record["rows"]))
    if args.training:
        record["training"] = train(args)
        print(table(record["training"]))
    if args.requests:
        record["soak"] = soak(args.clients, args.requests)
        print(table([record["soak"]]))
    save(args.json, record)


if __name__ == "__main__":
    main()
