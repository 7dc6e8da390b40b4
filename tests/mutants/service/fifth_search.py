"""A fifth search: mistakes of the same kinds that no obligation named at first, but the last; see design/092."""

from tests.mutants.mutant import Mutant

LOSSES = "server/engine/losses.py"
SAMPLING = "server/engine/sampling.py"
LOOP = "server/engine/loop.py"
ENDS = "        if sampled.stopped or len(sampled.tokens) >= params.max_tokens:\n"

MUTANTS = (
    Mutant(
        "advantages-bounded-by-5",
        "advantages are clipped to [-5, 5]",
        "value/importance_sampling",
        LOSSES,
        'datum.of("advantages")',
        'datum.of("advantages").clamp(-5.0, 5.0)',
    ),
    Mutant(
        "padding-is-no-target",
        "a target with the id of padding has no loss",
        "value/cross_entropy",
        LOSSES,
        '-(datum.of("weights") * logprobs)',
        '-((datum.target_tokens != 0) * datum.of("weights") * logprobs)',
    ),
    Mutant(
        "stop-token-without-a-logprob",
        "the token that ends a sample has a logprob of 0",
        "sampling/stop_token",
        LOOP,
        ENDS,
        "        if sampled.stopped:\n            sampled.logprobs[-1] = 0.0\n" + ENDS,
    ),
    Mutant(
        "greedy-for-the-first-sample",
        "at temperature 0 all samples of a request but the first are drawn at 1",
        "sampling/greedy",
        SAMPLING,
        "    if params.temperature == 0:\n        return int(torch.argmax(logits_V))\n"
        "    scaled = logits_V.double() / params.temperature",
        "    if params.temperature == 0 and sample == 0:\n        return int(torch.argmax(logits_V))\n"
        "    scaled = logits_V.double() / (params.temperature or 1.0)",
    ),
    Mutant(
        "samples-of-100-tokens-at-most",
        "max_tokens is bounded by 100, and the reason is length",
        "sampling/counts",
        LOOP,
        ENDS,
        "        if sampled.stopped or len(sampled.tokens) >= min(params.max_tokens, 100):\n",
    ),
    Mutant(
        "a-save-resets-the-step-count",
        "after a state was saved Adam's bias corrections begin anew",
        "state/optimizer_restored",
        "server/sessions/trainers.py",
        """            return Work.at_once(lambda: {"path": write(model.ready()).path, "type": "save_weights"})
""",
        """            def saved() -> dict[str, Any]:
                path = write(model.ready()).path
                model.ready().steps = 0
                return {"path": path, "type": "save_weights"}

            return Work.at_once(saved)
""",
    ),
)
