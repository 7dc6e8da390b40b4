"""Mistakes that were looked for after the others, most of which no obligation named at first; see design/092."""

from tests.mutants.mutant import Mutant

TRAINING = "server/engine/training.py"
LOSSES = "server/engine/losses.py"
WIRE = "server/wire/training.py"
ROWS = 'return logprobs, datum.of("logprobs"), datum.of("advantages")'
MOVE = "parameter.addcdiv_(m / first, (v / second).sqrt_().add_(params.eps), value=-params.learning_rate)"
DECAY = "parameter.mul_(1 - params.learning_rate * params.weight_decay)"
FREEZE = 'return model.ready().freeze(f"{model.id}#{uuid.uuid4().hex}")'

MUTANTS = (
    Mutant(
        "logprobs-in-bfloat16",
        "logprobs are returned in bfloat16",
        "value/cross_entropy",
        WIRE,
        'arrays = [t.numpy().astype("<f4").tobytes()',
        'arrays = [t.bfloat16().float().numpy().astype("<f4").tobytes()',
    ),
    Mutant(
        "one-threshold-is-dropped",
        "a threshold that comes without the other is ignored",
        "value/ppo_defaults",
        LOSSES,
        "default_low, default_high = _BOUNDS.get(name, (None, None))",
        "default_low, default_high = _BOUNDS.get(name, (None, None))\n    config = config if len(config) > 1 else {}",
    ),
    Mutant(
        "ratio-bounded-by-10",
        "importance sampling clamps the log ratio to 2.3",
        "gradient/importance_sampling",
        LOSSES,
        ROWS,
        'return logprobs, logprobs.detach() - (logprobs.detach() - datum.of("logprobs")).clamp(-2.3, 2.3), '
        'datum.of("advantages")',
    ),
    Mutant(
        "prompts-merged-by-their-tokens",
        "what datums have in common is computed once, for the targets of the first",
        "gradient/several_targets",
        TRAINING,
        "different = (first[:length] != new[:length]).any(1).nonzero()",
        "different = (first[:length, :1] != new[:length, :1]).any(1).nonzero()",
    ),
    Mutant(
        "attention-leaks-between-datums",
        "packed datums attend to those before them",
        "sums/ragged_logprobs",
        TRAINING,
        "PlainAttention(layout.shared, [*layout.rests, padding])",
        "PlainAttention(layout.shared, [sum(layout.rests), padding])",
    ),
    Mutant(
        "gradient-of-the-first-64-tokens",
        "targets from the 65th on have logprobs and no gradient",
        "sums/long",
        TRAINING,
        "            grad_logprobs.append(torch.nn.functional.pad(",
        "            grad = torch.where(torch.arange(len(grad)).reshape(-1, *[1] * (grad.ndim - 1)) < 64, grad, 0.0)\n"
        "            grad_logprobs.append(torch.nn.functional.pad(",
    ),
    Mutant(
        "steps-counted-over-all-adapters",
        "the bias corrections count the steps of every adapter",
        "optimiser/betas",
        TRAINING,
        "    adapter.steps += 1\n",
        "    Adapter.every = getattr(Adapter, 'every', 0) + 1\n    adapter.steps = Adapter.every\n",
    ),
    Mutant(
        "decay-after-the-step",
        "the decay takes a part of the step, too",
        "optimiser/decay",
        TRAINING,
        f"{DECAY}\n            {MOVE}",
        f"{MOVE}\n            {DECAY}",
    ),
    Mutant(
        "moments-change-places",
        "a restore takes one moment for the other",
        "state/optimizer_restored",
        "server/sessions/checkpoints.py",
        '(moments[f"{n}.m"], moments[f"{n}.v"])',
        '(moments[f"{n}.v"], moments[f"{n}.m"])',
    ),
    Mutant(
        "snapshot-drops-the-gradient",
        "a snapshot for sampling drops the gradient that waits for its step",
        "state/pending_gradient",
        "server/sessions/trainers.py",
        FREEZE,
        "for _, p in model.ready().parameters():\n                    p.grad = None\n                " + FREEZE,
    ),
    Mutant(
        "first-stop-string-only",
        "of several stop strings the first counts",
        "sampling/stop_string",
        "server/engine/sampling.py",
        "return any(s in text for s in self.params.stop_strings)",
        "return self.params.stop_strings[0] in text",
    ),
)
