"""The embedded server against transformers.generate at batch 16, with and without a shared prefix; and a soak.

Both run the same model in this process on one thread, greedily, from a cold cache; ours goes through HTTP and the real
SDK. CPU seconds of the whole process stand beside wall seconds, for a machine that others use too. Before anything is
printed, our tokens are scored by plain transformers: each must be its most likely token.
"""

import argparse
import asyncio
import os
import statistics
import time
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import torch
from measure import agree, machine, resident, save, table, timed
from tinker import ServiceClient, types

from paritygate import server
from paritygate.server.model.tiny import corpus
from paritygate.server.running import DTYPES

BATCH = 16


def prompts(tokenizer: Any, prefix: int, tail: int) -> list[list[int]]:
    """BATCH prompts of `prefix` shared tokens and `tail` tokens of their own, of English text."""
    words = tokenizer.encode(" ".join(corpus()))
    suffixes = [words[4000 + 131 * i : 4000 + 131 * i + tail] for i in range(BATCH)]
    return [words[:prefix] + rest for rest in suffixes]


def ours(sampler: Any, batch: list[list[int]], new: int) -> list[list[int]]:
    params = types.SamplingParams(max_tokens=new, temperature=0.0, stop=[], seed=0)
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in batch]
    return [future.result().sequences[0].tokens for future in futures]


def theirs(model: Any, batch: list[list[int]], new: int) -> list[list[int]]:
    tokens = torch.tensor(batch)
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False
    )
    return out[:, tokens.shape[1] :].tolist()


def check(model: Any, batch: list[list[int]], tokens: list[list[int]], tolerance: float) -> None:
    """Every token must be the most likely one of plain transformers, up to the arithmetic of the dtype."""
    for prompt, drawn in zip(batch, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + drawn[:-1]]), logits_to_keep=len(drawn)).logits[0].float()
        chosen = logits.gather(1, torch.tensor(drawn)[:, None])[:, 0]
        agree("greedy tokens", chosen, logits.max(1).values, tolerance)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    running = server.start(args.model, dtype=args.dtype, threads=1)
    model = AutoModelForCausalLM.from_pretrained(str(running.tokenizer), dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None  # or a row that ends early would be padded and cost less
    tokenizer = AutoTokenizer.from_pretrained(str(running.tokenizer))
    client = ServiceClient(base_url=running.base_url, api_key=running.api_key)
    sampler = client.create_sampling_client(base_model=running.model_name).result()
    rows: list[dict[str, Any]] = []
    for name, prefix, tail in (("no shared prefix", 0, args.tail), ("shared prefix", args.prefix, 8)):
        batch = prompts(tokenizer, prefix, tail)
        if name not in args.cases:
            continue
        check(model, batch[:4], ours(sampler, batch[:4], args.new), 2e-2 if args.dtype == "bfloat16" else 1e-5)
        runs = {
            "generate": lambda batch=batch: theirs(model, batch, args.new),
            "ours": lambda batch=batch: ours(sampler, batch, args.new),
        }
        wall: dict[str, list[float]] = {who: [] for who in runs}
        cpu: dict[str, list[float]] = {who: [] for who in runs}
        for _ in range(args.repeats):
            running.service.engine.prefix.clear()
            for who, run in runs.items():
                before = time.process_time()
                with torch.no_grad():
                    wall[who].append(timed(run, "cpu"))
                cpu[who].append(time.process_time() - before)
        row: dict[str, Any] = {"case": name, "prompt": len(batch[0]), "new": args.new}
        for clock, taken in (("wall", wall), ("cpu", cpu)):
            theirs_s, ours_s = (statistics.median(taken[who]) for who in runs)
            row |= {f"generate {clock} s": theirs_s, f"ours {clock} s": ours_s, f"{clock} ratio": theirs_s / ours_s}
        rows.append({**row, "goal": 1.5 if prefix else 0.95})
    client.close("success").result()
    running.stop()
    return rows


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
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("cpu"), args.model, args.dtype)
    record: dict[str, Any] = {"machine": machine("cpu"), "model": args.model, "dtype": args.dtype}
    if args.cases:
        record["rows"] = compare(args)
        print(table(record["rows"]))
    if args.requests:
        record["soak"] = soak(args.clients, args.requests)
        print(table([record["soak"]]))
    save(args.json, record)


if __name__ == "__main__":
    main()
