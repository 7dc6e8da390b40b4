"""Sampling against plain transformers: logprobs, seeds, threads, snapshots, the distribution, memory, cancellation."""

import math
import random
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from paritygate.server.engine.jobs import SampleJob, SampleResult
from paritygate.server.engine.loop import Engine
from paritygate.server.engine.sampling import SamplingParams
from paritygate.server.engine.scoring import Scoring
from paritygate.server.engine.training import AdamParams, Pass, adam_step
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model import products, sources
from paritygate.server.model.attention import PlainAttention
from paritygate.server.model.lora import BASE, Snapshot
from paritygate.server.model.network import Network
from paritygate.server.model.products import available, dots
from tests.counts import soak
from tests.server.engine.plain import leaves_of, merged_logprobs, moved_adapter, plain_model, random_datum


def sample(engine: Engine, jobs: list[SampleJob]) -> list[SampleResult]:
    for job in jobs:
        engine.submit(job)
    return [job.future.result(120) for job in jobs]


def job(
    prompt: list[int], snapshot: Snapshot, seed: int, *, tokens: int = 12, samples: int = 1, **options: Any
) -> SampleJob:
    params = SamplingParams(tokens, seed, **options)
    scoring = Scoring(prompt_logprobs=True, first=1) if len(prompt) > 1 else None
    return SampleJob(prompt, params, samples, snapshot, scoring, 0, Future())


@pytest.fixture
def engine(network: Any) -> Any:
    engine = Engine(network, Limits(prefill_tokens=48, rows=9), None, 1)
    engine.start()
    yield engine
    engine.stop()


def test_sampled_logprobs_are_those_of_plain_transformers_and_of_scoring(network: Any, engine: Engine) -> None:
    adapter = moved_adapter(network)
    snapshot = adapter.freeze("v")
    model, leaves = plain_model(network), leaves_of(adapter)
    for length in (1, 5, 64, 100):
        prompt = [random.Random(length).randrange(480) for _ in range(length)]
        (result,) = sample(engine, [job(prompt, snapshot, seed=length, tokens=70)])
        drawn = result.samples[0]
        full = prompt + drawn.tokens
        with torch.no_grad():
            plain = merged_logprobs(model, adapter, leaves, full[:-1])
        want = [float(plain[i, t]) for i, t in enumerate(full[1:])]
        assert drawn.logprobs == pytest.approx(want[length - 1 :], abs=1e-5)
        engine.prefix.clear()
        (scored,) = sample(engine, [job(full, snapshot, seed=0, tokens=1)])
        assert scored.scores is not None
        assert scored.scores.prompt_logprobs[0] is None
        assert scored.scores.prompt_logprobs[1:] == pytest.approx(want, abs=1e-5)
        assert scored.scores.prompt_logprobs[length:] == drawn.logprobs  # the same bits, decoded or prefilled


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 2.5}, {"top_k": 3}])
def test_sampled_logprobs_are_of_temperature_1_at_any_temperature(engine: Engine, options: dict[str, float]) -> None:
    """A sample's logprobs are those that scoring gives, whatever it was drawn with: the same bits."""
    prompt = [7, 80, 9, 300]
    (result,) = sample(engine, [job(prompt, BASE, seed=3, tokens=20, **options)])
    drawn = result.samples[0]
    engine.prefix.clear()
    (scored,) = sample(engine, [job(prompt + drawn.tokens, BASE, seed=0, tokens=1)])
    assert scored.scores is not None
    assert scored.scores.prompt_logprobs[len(prompt) :] == drawn.logprobs


def test_the_same_seed_gives_the_same_bits_in_any_company(network: Any, engine: Engine) -> None:
    """Alone, together, with other adapters, cached or not, from other prompts: tokens and logprobs do not move."""
    generator = random.Random(7)
    snapshots = [BASE, *(moved_adapter(network, unembed=u).freeze(f"s{u}") for u in (True, False))]
    shared = [generator.randrange(480) for _ in range(70)]
    cases: list[tuple[list[int], Snapshot, int, int, dict[str, Any]]] = []
    for index in range(soak(quick=14, full=120)):
        tail = [generator.randrange(480) for _ in range(generator.choice([0, 1, 2, 15, 16, 17, 40]))]
        prompt = shared[: generator.choice([1, 16, 60, 64, 70])] + tail
        options = generator.choice([{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8}, {"temperature": 0.0}])
        cases.append((prompt, snapshots[index % 3], index, generator.choice([1, 1, 3]), options))

    def run(order: list[int], *, together: bool) -> dict[int, list[tuple[list[int], list[float]]]]:
        jobs = {i: job(c[0], c[1], c[2], tokens=9, samples=c[3], **c[4]) for i, c in ((i, cases[i]) for i in order)}
        results: dict[int, SampleResult] = {}
        if together:
            results = dict(zip(order, sample(engine, [jobs[i] for i in order]), strict=True))
        else:
            for i in order:
                engine.prefix.clear()
                (results[i],) = sample(engine, [jobs[i]])
        return {i: [(s.tokens, s.logprobs) for s in results[i].samples] for i in order}

    order = list(range(len(cases)))
    alone = run(order, together=False)
    assert run(order, together=True) == alone
    generator.shuffle(order)
    assert run(order, together=True) == alone


def use_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for dot products of bfloat16; skip where there are none."""
    monkeypatch.setenv("PARITYGATE_BFLOAT16", "dots")
    if not dots(torch.bfloat16):
        pytest.skip("no dot products of bfloat16 here: the CPU or the compiler has none")


def test_dot_products_keep_a_rows_bits_and_are_no_worse_than_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, decoded or scored; as far from float64 as plain transformers in bfloat16 at the most."""
    use_dots(monkeypatch)
    network = Network(sources.resolve("tiny").folder, torch.bfloat16)
    engine = Engine(network, Limits(prefill_tokens=48, rows=9), None, 1)
    engine.start()
    prompts = [[(7 * i + 3 * j) % 480 for j in range(3 + 29 * i)] for i in range(5)]
    together = sample(engine, [job(p, BASE, i, tokens=9) for i, p in enumerate(prompts)])
    exact, rounded = plain_model(network), plain_model(network, torch.bfloat16)
    errors: list[torch.Tensor] = []
    for i, prompt in enumerate(prompts):
        drawn = together[i].samples[0]
        engine.prefix.clear()
        assert sample(engine, [job(prompt, BASE, i, tokens=9)])[0].samples[0] == drawn
        engine.prefix.clear()
        (scored,) = sample(engine, [job(prompt + drawn.tokens, BASE, 0, tokens=1)])
        assert scored.scores is not None
        assert scored.scores.prompt_logprobs[len(prompt) :] == drawn.logprobs
        tokens = torch.tensor([prompt + drawn.tokens])
        with torch.no_grad():
            want, theirs = (
                torch.log_softmax(model(tokens).logits[0, :-1].double(), -1).gather(1, tokens[0, 1:, None])[:, 0]
                for model in (exact, rounded)
            )
        ours = torch.tensor(scored.scores.prompt_logprobs[1:], dtype=torch.float64)
        errors.append(torch.stack([ours - want, theirs - want]))
    engine.stop()
    ours_worst, theirs_worst = torch.cat(errors, 1).abs().amax(1).tolist()
    assert 1e-6 < ours_worst <= theirs_worst  # over 0, or nothing was rounded


@pytest.mark.skipif(not available(), reason="no compiler here: the bits are promised at one thread")
@pytest.mark.parametrize("way", ["float32", "bfloat16", "dots", "tiles"])
def test_threads_move_no_bit(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, their logprobs, scores, and what training makes of an adapter are those of one thread.

    So they are where other servers come and go, and a step has more threads than the one before or fewer.
    """
    if way == "dots":
        use_dots(monkeypatch)
    monkeypatch.setattr(products, "EMULATED", way == "tiles")
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    network = Network(sources.resolve("tiny").folder, dtype)

    def everything(threads: int, cores: Any = None) -> list[Any]:
        engine = Engine(network, Limits(prefill_tokens=48, rows=9), None, threads, cores)
        engine.start()
        adapter = moved_adapter(network)
        for step in range(2):
            data = [random_datum(random.Random(10 * step + n), n, 480) for n in (70, 20, 130)]
            work = Pass(network, adapter, data, "cross_entropy", {}, forward_only=False)
            engine.run(work.steps(150), lambda: None).result(60)
            engine.run(iter(()), lambda: adam_step(adapter, AdamParams(0.01))).result(60)
        snapshot = adapter.freeze("v")
        jobs = [
            job([(7 * i + j) % 480 for j in range(5 + 31 * (i % 4))], (BASE, snapshot)[i % 2], i, samples=1 + i % 2)
            for i in range(8)
        ]
        results = sample(engine, jobs)
        engine.stop()
        weights = [p.detach().tolist() for _, p in adapter.parameters()]
        return [[(r.samples, r.scores) for r in results], weights]

    one = everything(1)
    assert everything(2) == one
    assert everything(3) == one
    turns = ComingAndGoing()
    assert everything(1, turns) == one
    assert turns.asked > 10


class ComingAndGoing:
    """SharedCores of a machine whose other servers change at every step."""

    asked = 0

    def share(self) -> int:
        self.asked += 1
        return (2, 1, 3)[self.asked % 3]

    def rest(self) -> None:
        pass


def test_snapshots_do_not_move_when_training_goes_on(network: Any, engine: Engine) -> None:
    adapter = moved_adapter(network)
    snapshot = adapter.freeze("frozen")
    prompt = [5, 6, 7, 8]
    (before,) = sample(engine, [job(prompt, snapshot, seed=1)])
    for _ in range(3):
        data = [random_datum(random.Random(1), 20, 480)]
        work = Pass(network, adapter, data, "cross_entropy", {}, forward_only=False)
        for _ in work.steps(100):
            pass
        adam_step(adapter, AdamParams(0.1))
    engine.prefix.clear()
    (after,) = sample(engine, [job(prompt, snapshot, seed=1)])
    assert after.samples == before.samples
    assert after.scores == before.scores
    (moved,) = sample(engine, [job(prompt, adapter.freeze("later"), seed=1)])
    assert moved.scores != before.scores


def test_samples_follow_the_distribution(network: Any, engine: Engine) -> None:
    """Draws of one token against its probabilities: chi-square over the likely ones, and what top_k, top_p keep."""
    n = soak(quick=2000, full=20_000)
    prompt = [3, 9, 27]
    with torch.no_grad(), network.routed([], PlainAttention(0, [16])):
        hidden = network.forward(torch.tensor(prompt + [0] * 13), torch.arange(16))
        probabilities = torch.softmax(network.head(hidden, BASE)[0][2].double(), -1)
    jobs = [job(prompt, BASE, seed=s, tokens=1, samples=100) for s in range(n // 100)]
    counts = torch.zeros(480)
    for result in sample(engine, jobs):
        for drawn in result.samples:
            counts[drawn.tokens[0]] += 1
    expected = probabilities * n
    likely = expected > 5
    rest_expected, rest = float(expected[~likely].sum()), float(counts[~likely].sum())
    chi = float(((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum())
    chi += (rest - rest_expected) ** 2 / rest_expected
    freedom = int(likely.sum())
    assert chi < freedom + 5 * math.sqrt(2 * freedom)
    top = set(torch.topk(probabilities, 4).indices.tolist())
    (narrow,) = sample(engine, [job(prompt, BASE, seed=0, tokens=1, samples=200, top_k=4)])
    assert {s.tokens[0] for s in narrow.samples} == top
    order = torch.sort(probabilities, descending=True)
    kept = int((torch.cumsum(order.values, 0) < 0.3).sum()) + 1
    (nucleus,) = sample(engine, [job(prompt, BASE, seed=0, tokens=1, samples=200, top_p=0.3)])
    assert {s.tokens[0] for s in nucleus.samples} <= set(order.indices[:kept].tolist())


def test_a_prompt_that_is_cached_whole_is_served(network: Any, engine: Engine) -> None:
    prompt = list(range(32))
    first, second = (sample(engine, [job(prompt, BASE, seed=4)])[0] for _ in range(2))
    assert first.samples == second.samples
    assert first.scores == second.scores
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)


def test_memory_limits_hold_back_rows_but_lose_none(network: Any) -> None:
    one = 128 * (network.shape.layers * 2 * network.shape.kv_heads * network.shape.head_dim + network.shape.hidden) * 4
    limits = Limits(active_cache_bytes=2 * one, prefix_cache_bytes=one // 4, rows=3)
    engine = Engine(network, limits, None, 1)
    engine.start()
    jobs = [job([i, i + 1, i + 2], BASE, seed=i, tokens=100, samples=2) for i in range(5)]
    results = sample(engine, jobs)
    assert all(len(s.tokens) == 100 for r in results for s in r.samples)
    assert engine.prefix.bytes <= limits.prefix_cache_bytes
    engine.stop()


def test_a_shared_prefix_is_computed_once(network: Any) -> None:
    """Sixteen prompts at once, 320 tokens shared: the pass count is that of one prefill and the tails."""
    engine = Engine(network, Limits(prefill_tokens=64, rows=16), None, 1)
    shared = [i % 480 for i in range(320)]
    jobs = [job([*shared, i, i + 1], BASE, seed=i, tokens=2) for i in range(16)]
    for one in jobs:
        engine.submit(one)
    engine.start()
    results = [one.future.result(60) for one in jobs]
    assert sorted(r.cached_tokens for r in results) == [0] + [320] * 15
    assert engine.steps <= 12
    engine.stop()


def test_a_model_that_diverged_is_an_error(network: Any, engine: Engine) -> None:
    adapter = moved_adapter(network)
    with torch.no_grad():
        adapter.b["unembed"].fill_(float("nan"))
    broken = adapter.freeze("nan")
    good, bad, single = job([1, 2, 3], BASE, seed=1), job([1, 2, 3], broken, seed=1), job([1], broken, seed=1)
    for one in (bad, good, single):
        engine.submit(one)
    assert len(good.future.result(60).samples[0].tokens) == 12
    for one in (bad, single):
        with pytest.raises(RequestError, match="diverged"):
            one.future.result(60)


def test_cancelled_work_is_dropped_between_pieces(engine: Engine) -> None:
    done: list[int] = []

    def steps() -> Any:
        for i in range(10_000):
            done.append(i)
            yield

    future = engine.run(steps(), lambda: None)
    while not done:
        pass
    assert future.cancel()
    assert engine.run(iter(()), lambda: 7).result(60) == 7
    assert len(done) < 10_000
    assert engine.run(iter(()), lambda: 1 / 1).result(60) == 1
    with pytest.raises(ZeroDivisionError):
        engine.run(iter(()), lambda: 1 / 0).result(60)


def test_memory_that_cannot_be_had_fails_that_request_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from paritygate.server.engine import loop as module

    whole = module.Sequence

    def small(shape: Any, tokens: list[int], capacity: int) -> Any:
        if capacity > 5000:
            raise MemoryError("no room")
        return whole(shape, tokens, capacity)

    monkeypatch.setattr(module, "Sequence", small)
    huge, fine = job([1], BASE, seed=0, tokens=6000), job([1], BASE, seed=0)
    engine.submit(huge)
    engine.submit(fine)
    with pytest.raises(MemoryError):
        huge.future.result(60)
    assert len(fine.future.result(60).samples[0].tokens) == 12
