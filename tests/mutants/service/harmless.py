"""What a service may do otherwise without being wrong: nothing of it may depart, whatever stays undecided."""

from tests.mutants.mutant import Edit, Mutant

TRAINING = "server/engine/training.py"
LOOP = "server/engine/loop.py"
SCORING = "server/engine/scoring.py"
TRAINERS = "server/sessions/trainers.py"
WIRE = "server/wire/training.py"
LORA = "server/model/lora.py"
LOGPROB = "sampled.logprobs.append(float(logits_V[token].float() - normalizer))"
SCORE = "scores.prompt_logprobs[row + 1] = float(logits_V[token].float() - normalizer)"
TOP = "scores.top[row + 1] = top_logprobs(logits_V, normalizer, scoring.top_k)"
SEEDS: Edit = ("server/wire/sampling.py", "seed=seed if chosen is None else chosen,", "seed=seed,")
ADAPTER_SEEDS: Edit = (
    WIRE,
    "seed=secrets.randbits(53) if seed is None else seed",
    "seed=secrets.randbits(53)",
)


def noise(sigma: float, seed: int) -> Mutant:
    """Normal noise of standard deviation `sigma` in whatever returns or moves.

    In nats, on each logprob that training, sampling and scoring return; relative, on each entry of a gradient and on
    each weight at each step.
    """
    normal = f"{sigma!r} * torch.randn({{}}, generator=NOISE)"
    make = f"NOISE = torch.Generator().manual_seed({seed})\n"
    returned = "self.outcome.logprobs.append(leaf.detach())"
    moved = "parameter.addcdiv_(m / first, (v / second).sqrt_().add_(params.eps), value=-params.learning_rate)"
    further: tuple[Edit, ...] = (
        (TRAINING, "CHUNK = 192  #", make + "CHUNK = 192  #"),
        (
            TRAINING,
            "grad = grads[name] * factor",
            f"grad = grads[name] * factor * (1 + {normal.format('parameter.shape')})",
        ),
        (TRAINING, moved, moved + f"\n            parameter.mul_(1 + {normal.format('parameter.shape')})"),
        (LOOP, "class Engine:\n", make + "\n\nclass Engine:\n"),
        (LOOP, LOGPROB, LOGPROB.replace("normalizer)", f"normalizer + {normal.format('()')})")),
        (SCORING, "CHUNK = 128  #", make + "CHUNK = 128  #"),
        (SCORING, SCORE, SCORE.replace("normalizer)", f"normalizer + {normal.format('()')})")),
        (SCORING, TOP, TOP.replace("normalizer,", f"normalizer + {normal.format('()')},")),
    )
    return Mutant(
        f"noise-{sigma:g}-{seed}",
        "kernels whose sums come out otherwise each time",
        "service",
        TRAINING,
        returned,
        returned.replace("leaf.detach()", f"leaf.detach() + {normal.format('leaf.shape')}"),
        further,
    )


WITHOUT_SEEDS = Mutant(
    "without-seeds", "no seed is honoured", "service", *SEEDS, also=(ADAPTER_SEEDS,)
)  # but for sampling/seed_repeats and state/seed, which say so

HARMLESS = (
    Mutant(
        "another-order-of-sums",
        "logits are computed seven rows at a time",
        "service",
        TRAINING,
        "CHUNK = 192  #",
        "CHUNK = 7  #",
    ),
    Mutant(
        "small-microbatches",
        "a call is computed in pieces of 64 tokens",
        "service",
        "server/limits.py",
        "train_tokens: int = 1536",
        "train_tokens: int = 64",
    ),
    Mutant(
        "bfloat16",
        "the model is held and computed in bfloat16",
        "service",
        "server/running.py",
        'dtype: str = "float32",',
        'dtype: str = "bfloat16",',
    ),
    Mutant(
        "another-metric-beside",
        "a mean is reported beside loss:sum",
        "service",
        WIRE,
        'message.metrics["loss:sum"] = outcome.loss',
        'message.metrics["loss:sum"] = outcome.loss\n    message.metrics["loss:mean"] = outcome.loss / 7',
    ),
    Mutant(
        "another-scale-of-lora",
        "alpha / sqrt(rank), and another alpha",
        "service",
        LORA,
        "return ALPHA / self.rank",
        "return 16.0 / self.rank**0.5",
    ),
    Mutant(
        "tempered-logprobs",
        "samples come with the logprobs of the tempered distribution",
        "service",
        LOOP,
        LOGPROB,
        "sampled.logprobs.append(float(torch.log_softmax(logits_V.float() / (params.temperature or 1), 0)[token]))",
    ),
    Mutant(
        "cispo-defaults-of-an-older-page",
        "without options cispo clips at 0.8 and 1.2",
        "service",
        "server/engine/losses.py",
        '"cispo": policy_gradient.CISPO_BOUNDS}',
        '"cispo": policy_gradient.PPO_BOUNDS}',
    ),
    Mutant(
        "bounds-are-enforced",
        "eps ends at 1, the learning rate at 10, and dro is not served (row 88 of design/092)",
        "service",
        WIRE,
        'learning_rate=adam.number("learning_rate", 1e-4, low=0, high=huge),',
        'learning_rate=adam.number("learning_rate", 1e-4, low=1e-30, high=10.0),',
        (
            (
                WIRE,
                'eps=adam.number("eps", 1e-12, low=0, high=huge),',
                'eps=adam.number("eps", 1e-12, low=0, high=1.0),',
            ),
            ("server/engine/losses.py", 'if name == "stable_reinforce":', 'if name in ("stable_reinforce", "dro"):'),
        ),
    ),
    Mutant(
        "load-in-a-run",
        "load_state in the middle of a run is the restore that it stands for",
        "service",
        TRAINERS,
        "if (seq or model.next_seq) != 1:  # as the hosted service answers, design/032",
        "if False:",
    ),
    Mutant(
        "neighbouring-seeds-share-samples",
        "sample i of seed s is drawn with seed s + i, as vLLM does it (design/092)",
        "service",
        LOOP,
        "token = draw(logits_V, params, row.index, position)",
        "token = draw(logits_V, __import__('dataclasses').replace(params, seed=params.seed + row.index), 0, position)",
    ),
    Mutant(
        "padded",
        "each pass is filled up to a multiple of 64 rows",
        "service",
        TRAINING,
        "padding = max(0, self.network.min_rows - count)",
        "padding = 64 - count % 64",
    ),
    Mutant(
        "slow",
        "every request waits for 20 ms, and every piece of work for 50",
        "service",
        "server/http/requests.py",
        "            return await handler(request)",
        "            await asyncio.sleep(0.02)\n            return await handler(request)",
        (
            (
                LOOP,
                "                next(task.steps)",
                "                threading.Event().wait(0.05)\n                next(task.steps)",
            ),
        ),
    ),
    noise(1e-3, 0),
)
