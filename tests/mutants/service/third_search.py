"""A third search: mistakes in places that no list had, and what the second left without a name; see design/092."""

from tests.mutants.mutant import Mutant

TRAINING = "server/engine/training.py"
LOSSES = "server/engine/losses.py"
WIRE = "server/wire/training.py"
SAMPLING = "server/wire/sampling.py"
DRAW = "server/engine/sampling.py"
SAMPLERS = "server/sessions/samplers.py"
EPS = 'eps=adam.number("eps", 1e-12, low=0, high=huge),'
GRADS = "    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}\n"
SAMPLER_SEED = "seed=seed if chosen is None else chosen,"
ADAPTER_SEED = "seed=secrets.randbits(53) if seed is None else seed"
TOP_K = 'top_k=params.integer("top_k", -1, low=-1),'
TEMPERATURE = 'temperature=params.number("temperature", 1.0, low=0, high=1e6),'
POINT = "point = uniform(params.seed, sample, position) * float(total[-1])"
WINDOW = "text = self.decoder.decode(self.tokens[-window:])"
BASE_SAMPLER = "snapshot = BASE if path is None else self._from_path(path)"

MUTANTS = (
    Mutant(
        "eps-is-a-floor",
        "the root of the second moment is at least eps, which is not added",
        "optimiser/eps_added",
        TRAINING,
        ".add_(params.eps), value",
        ".clamp_(min=params.eps), value",
    ),
    Mutant(
        "eps-at-least-1e-6",
        "an eps below 1e-6 is taken for 1e-6",
        "optimiser/eps",
        WIRE,
        EPS,
        'eps=max(adam.number("eps", 1e-12, low=0, high=huge), 1e-6),',
    ),
    Mutant(
        "eps-at-least-1e-8",
        "an eps below 1e-8, the default of torch, is taken for it",
        "optimiser/eps",
        WIRE,
        EPS,
        'eps=max(adam.number("eps", 1e-12, low=0, high=huge), 1e-8),',
    ),
    Mutant(
        "a-never-learns",
        "lora_A has no gradient",
        "optimiser/both_matrices",
        TRAINING,
        GRADS,
        GRADS + "    grads |= {n: 0.0 * g for n, g in grads.items() if n.endswith('lora_A')}\n",
    ),
    Mutant(
        "half-of-the-rank",
        "an adapter has half of the rank that was asked for and is reported",
        "state/rank",
        TRAINING,
        GRADS,
        GRADS + "    for n, g in grads.items():\n"
        "        (g.T if n.endswith('lora_B') else g)[adapter.spec.rank // 2 :] = 0.0\n",
    ),
    Mutant(
        "weights-above-one-are-one",
        "a loss weight above 1 counts as 1",
        "value/cross_entropy",
        LOSSES,
        'return -(datum.of("weights") * logprobs).sum()',
        'return -(datum.of("weights").clamp(max=1.0) * logprobs).sum()',
    ),
    Mutant(
        "first-position-has-no-gradient",
        "the first position of a datum has a logprob and no gradient",
        "gradient/positions",
        TRAINING,
        "            grad_logprobs.append(torch.nn.functional.pad(",
        "            grad = torch.cat([torch.zeros_like(grad[:1]), grad[1:]])\n"
        "            grad_logprobs.append(torch.nn.functional.pad(",
    ),
    Mutant(
        "another-loss-drops-the-gradient",
        "a call with another loss than the one before begins a new sum",
        "sums/losses",
        TRAINING,
        "parameter.grad = total if parameter.grad is None else parameter.grad + total",
        "fresh = parameter.grad is None or getattr(self.adapter, 'last', self.loss) != self.loss\n"
        "                parameter.grad = total if fresh else parameter.grad + total",
        (
            (
                TRAINING,
                "        yield\n\n    def _piece(",
                "        self.adapter.last = self.loss\n        yield\n\n    def _piece(",
            ),
        ),
    ),
    Mutant(
        "seed-0-is-none",
        "a sampling seed of 0 is taken for none",
        "sampling/seed_repeats",
        SAMPLING,
        SAMPLER_SEED,
        "seed=chosen or seed,",
    ),
    Mutant(
        "adapter-seed-0-is-none",
        "an adapter's seed of 0 is taken for none",
        "state/seed",
        WIRE,
        ADAPTER_SEED,
        "seed=seed or secrets.randbits(53)",
    ),
    Mutant(
        "top-k-one-is-off",
        "top_k = 1 is no limit",
        "sampling/top_k",
        SAMPLING,
        TOP_K,
        'top_k=params.integer("top_k", -1, low=-1) if params.integer("top_k", -1, low=-1) > 1 else -1,',
    ),
    Mutant(
        "top-k-bounded-by-50",
        "a top_k above 50 is 50",
        "sampling/top_k",
        SAMPLING,
        TOP_K,
        'top_k=min(params.integer("top_k", -1, low=-1), 50),',
    ),
    Mutant(
        "temperature-above-one-is-one",
        "a temperature above 1 is 1",
        "sampling/temperature",
        SAMPLING,
        TEMPERATURE,
        'temperature=min(params.number("temperature", 1.0, low=0, high=1e6), 1.0),',
    ),
    Mutant(
        "one-number-a-sample",
        "all tokens of a sample are drawn with one random number",
        "sampling/sequences",
        DRAW,
        POINT,
        "point = uniform(params.seed, sample, 0) * float(total[-1])",
    ),
    Mutant(
        "stop-string-in-one-token",
        "a stop string that begins in one token and ends in the next is not seen",
        "sampling/stop_string",
        DRAW,
        WINDOW,
        "text = self.decoder.decode(self.tokens[-1:])",
    ),
    Mutant(
        "base-sampler-is-the-last-adapter",
        "a sampler of the base model has the weights of the last one that was loaded",
        "sampling/base_model",
        SAMPLERS,
        BASE_SAMPLER,
        "others = [s.snapshot for s in self._samplers.values() if s.snapshot is not None and s.snapshot.pairs]\n"
        "        snapshot = ((others or [BASE])[-1]) if path is None else self._from_path(path)",
    ),
)
