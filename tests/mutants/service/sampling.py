"""Mistakes of a service's sampler; the rows in brackets are those of design/092."""

from tests.mutants.mutant import Mutant

DRAW = "server/engine/sampling.py"
LOOP = "server/engine/loop.py"
SCORING = "server/engine/scoring.py"
WIRE = "server/wire/sampling.py"
SAMPLERS = "server/sessions/samplers.py"
SEED = "seed=seed if chosen is None else chosen,"
LOGPROB = "sampled.logprobs.append(float(logits_V[token].float() - normalizer))"
UNIFORM = "point = uniform(params.seed, sample, position) * float(total[-1])"
JOB = "job = SampleJob(prompt, params, number, self._snapshot(sampler), scoring, top_k, Future())"
SCORE = "scores.prompt_logprobs[row + 1] = float(logits_V[token].float() - normalizer)"
SCALED = "scaled = logits_V.double() / params.temperature"
TEMPERATURE = 'temperature=params.number("temperature", 1.0, low=0, high=1e6),'
STOPS = "if token in self.params.stop_tokens:\n            return True"
TOP_P = "order = order[before < params.top_p * float(ranked.sum())]"
TOP_K = "order = order[: params.top_k]"
SAMPLES = "samples = [job.finished[index] for index in range(job.num_samples)]"
TOPK_ANSWER = "message.topk_prompt_logprobs.CopyFrom(_topk(scores.top))"
PROMPT_ANSWER = 'message.prompt_logprobs = np.asarray(prompt_logprobs, dtype="<f4").tobytes()'

MUTANTS = (
    Mutant(
        "sampling-seed-ignored",
        "the seed of a sample has no effect (rows 2, 29, 48, 61, 79)",
        "sampling/seed_repeats",
        WIRE,
        SEED,
        "seed=seed,",
    ),
    Mutant(
        "sampling-seed-fixed",
        "every request has the same seed (row 66, in the sampler)",
        "sampling/seed_repeats",
        WIRE,
        SEED,
        "seed=1234,",
    ),
    Mutant(
        "sampling-seed-modulo",
        "the seed counts modulo 1000",
        "sampling/seed_repeats",
        WIRE,
        SEED,
        "seed=seed if chosen is None else chosen % 1000,",
    ),
    Mutant(
        "unseeded-requests-repeat",
        "a request without a seed has seed 0: every batch of draws is the one before",
        "sampling/unseeded",
        WIRE,
        SEED,
        "seed=0 if chosen is None else chosen,",
    ),
    Mutant(
        "one-sample-is-greedy",
        "a request of one sample at temperature 1 takes the likeliest tokens, as hatchery-core 0.3.0 does",
        "sampling/unseeded",
        WIRE,
        TEMPERATURE,
        'temperature=params.number("temperature", 1.0, low=0, high=1e6) '
        'if fields.integer("num_samples", 1, low=1, high=10**6) > 1 else 0.0,',
    ),
    Mutant(
        "samples-of-a-request-repeat",
        "the samples of one seeded request are identical (row 28)",
        "sampling/seed_distinct",
        LOOP,
        "token = draw(logits_V, params, row.index, position)",
        "token = draw(logits_V, params, 0, position)",
    ),
    Mutant(
        "greedy-is-sampled",
        "temperature 0 acts like 1 (row 4)",
        "sampling/greedy",
        DRAW,
        "if params.temperature == 0:\n        return int(torch.argmax(logits_V))\n    " + SCALED,
        "scaled = logits_V.double() / (params.temperature or 1.0)",
    ),
    Mutant(
        "temperature-ignored",
        "the temperature is not forwarded to the engine (row 48)",
        "sampling/temperature",
        DRAW,
        SCALED,
        "scaled = logits_V.double()",
    ),
    Mutant(
        "temperature-fails",
        "another temperature than 1 is a shape error (row 74)",
        "sampling/temperature",
        DRAW,
        SCALED,
        "scaled = logits_V.double() / torch.full((1 if params.temperature == 1 else 7,), params.temperature)",
    ),
    Mutant(
        "hidden-top-k",
        "every sample is cut to the 50 likeliest tokens (hatchery 0.3.0)",
        "sampling/distribution",
        DRAW,
        "mass = torch.exp(scaled - scaled.max())\n",
        "mass = torch.exp(scaled - scaled.max())\n"
        "    mass = torch.where(mass < torch.topk(mass, 50).values[-1], 0.0, mass)\n",
    ),
    Mutant(
        "default-temperature",
        "the engine's own temperature, where a request looks as if it had none",
        "sampling/omitted",
        WIRE,
        TEMPERATURE,
        TEMPERATURE.replace("=params", '=0.7 if params.data.get("seed") is None else params'),
    ),
    Mutant(
        "top-k-ignored",
        "top_k is not forwarded to the engine (rows 48, 79)",
        "sampling/top_k",
        DRAW,
        TOP_K,
        "order = order[:]",
    ),
    Mutant(
        "top-k-one-too-many",
        "top_k keeps k + 1 tokens",
        "sampling/top_k",
        DRAW,
        TOP_K,
        "order = order[: params.top_k + 1]",
    ),
    Mutant(
        "top-p-ignored",
        "top_p is not forwarded to the engine (row 79)",
        "sampling/top_p",
        DRAW,
        TOP_P,
        "order = order[:]",
    ),
    Mutant(
        "top-p-one-too-few",
        "the token that reaches top_p is left out",
        "sampling/top_p",
        DRAW,
        TOP_P,
        "order = order[(before + ranked < params.top_p * float(ranked.sum())) | (before == 0)]",
    ),
    Mutant(
        "sampled-logprobs-of-another-path",
        "the engine's logprobs are not the trainer's (rows 5, 61)",
        "sampling/three_ways",
        LOOP,
        LOGPROB,
        "sampled.logprobs.append(float(logits_V[token].float() - normalizer) * 0.8)",
    ),
    Mutant(
        "samples-of-the-base-model",
        "the sampler falls back to the base model (row 48)",
        "sampling/three_ways",
        SAMPLERS,
        JOB,
        JOB.replace("self._snapshot(sampler)", "BASE"),
    ),
    Mutant(
        "tempered-logprobs-unnormalised",
        "logprobs at a temperature are logits / T less the normaliser of T = 1 (row 61)",
        "sampling/temperature_logprobs",
        LOOP,
        LOGPROB,
        "sampled.logprobs.append(float(logits_V[token].float() / (params.temperature or 1.0) - normalizer))",
    ),
    Mutant(
        "logprobs-of-the-truncated-distribution",
        "half of the samples have tempered logprobs, half the model's (row 61)",
        "sampling/temperature_logprobs",
        LOOP,
        LOGPROB,
        "scale = params.temperature if row.index % 2 and params.temperature else 1.0\n"
        "        sampled.logprobs.append(float(torch.log_softmax(logits_V.float() / scale, 0)[token]))",
    ),
    Mutant(
        "one-sample-whatever-was-asked",
        "num_samples is not forwarded to the engine (row 29)",
        "sampling/counts",
        LOOP,
        SAMPLES,
        "samples = [job.finished[0]]",
    ),
    Mutant(
        "samples-without-logprobs",
        "samples come without logprobs (row 9)",
        "sampling/counts",
        WIRE,
        'logprobs=np.asarray(sample.logprobs, dtype="<f4").tobytes(),',
        'logprobs=b"",',
    ),
    Mutant(
        "one-token-more",
        "max_tokens + 1 tokens are drawn",
        "sampling/counts",
        LOOP,
        "if sampled.stopped or len(sampled.tokens) >= params.max_tokens:",
        "if sampled.stopped or len(sampled.tokens) >= params.max_tokens + (params.max_tokens > 1):",
    ),
    Mutant(
        "stop-ignored",
        "stop is not forwarded to the engine (rows 8, 48, 79)",
        "sampling/stop_token",
        DRAW,
        STOPS,
        "if token in self.params.stop_tokens and len(self.params.stop_tokens) == 0:\n            return True",
    ),
    Mutant(
        "first-stop-only",
        "of several stop ids the first alone ends a sample",
        "sampling/stop_token",
        WIRE,
        "return frozenset(cast(list[int], values)), ()",
        "return frozenset(cast(list[int], values)[:1]), ()",
    ),
    Mutant(
        "stop-token-removed",
        "the stop id is taken off the sample",
        "sampling/stop_token",
        LOOP,
        SAMPLES,
        SAMPLES + "\n            for s in samples:\n"
        "                if s.stopped and s.tokens[-1] in job.params.stop_tokens:\n"
        "                    s.tokens.pop(), s.logprobs.pop()",
    ),
    Mutant(
        "stop-reason-is-length",
        "the reason is always `length` (row 97)",
        "sampling/stop_token",
        WIRE,
        "stop_reason=pb.STOP_REASON_STOP if sample.stopped else pb.STOP_REASON_LENGTH",
        "stop_reason=pb.STOP_REASON_LENGTH",
    ),
    Mutant(
        "end-token-always-stops",
        "stop=[] does not switch the end token off",
        "sampling/stop_none",
        WIRE,
        "return frozenset(cast(list[int], values)), ()",
        "return frozenset(cast(list[int], values)) | shape.end_tokens, ()",
    ),
    Mutant(
        "stop-string-ignored",
        "stop strings are taken for ids, and end nothing (rows 67, 77)",
        "sampling/stop_string",
        DRAW,
        "if not self.params.stop_strings or self.decoder is None:",
        "if True:",
    ),
    Mutant(
        "stop-string-cut",
        "the token that completes a stop string is taken off (row 37)",
        "sampling/stop_string",
        LOOP,
        SAMPLES,
        SAMPLES + "\n            for s in samples:\n"
        "                if s.stopped and job.params.stop_strings and len(s.tokens) > 1:\n"
        "                    s.tokens.pop(), s.logprobs.pop()",
    ),
    Mutant(
        "prompt-scored-by-the-base-model",
        "prompt logprobs are computed without the adapter (row 26)",
        "sampling/prompt_logprobs",
        SAMPLERS,
        JOB,
        JOB.replace("self._snapshot(sampler)", "self._snapshot(sampler) if scoring is None else BASE"),
    ),
    Mutant(
        "prompt-logprobs-shifted",
        "prompt logprobs are one position off (row 67)",
        "sampling/prompt_logprobs",
        SCORING,
        SCORE,
        "scores.prompt_logprobs[max(row, 1)] = float(logits_V[token].float() - normalizer)\n"
        "        scores.prompt_logprobs[row + 1] = float(logits_V[token].float() - normalizer)",
    ),
    Mutant(
        "prompt-logprobs-begin-at-0",
        "position 0 has a logprob (rows 31, 67)",
        "sampling/prompt_logprobs",
        WIRE,
        "prompt_logprobs = [np.nan if value is None else value for value in scores.prompt_logprobs]",
        "prompt_logprobs = [0.0 if value is None else value for value in scores.prompt_logprobs]",
    ),
    Mutant(
        "one-prompt-logprob-too-few",
        "a prompt of L tokens has L - 1 logprobs (skyrl 0.4.0)",
        "sampling/prompt_logprobs",
        WIRE,
        PROMPT_ANSWER,
        'message.prompt_logprobs = np.asarray(prompt_logprobs[1:], dtype="<f4").tobytes()',
    ),
    Mutant(
        "prompt-logprobs-dropped",
        "prompt logprobs do not come (row 31)",
        "sampling/prompt_logprobs",
        WIRE,
        PROMPT_ANSWER,
        "pass",
    ),
    Mutant(
        "prompt-logprobs-fail",
        "an absent prompt logprob is an internal error (row 32)",
        "sampling/prompt_logprobs",
        WIRE,
        "prompt_logprobs = [np.nan if value is None else value for value in scores.prompt_logprobs]",
        "prompt_logprobs = [float(value) for value in scores.prompt_logprobs]",
    ),
    Mutant(
        "topk-dropped",
        "topk_prompt_logprobs do not come (row 31)",
        "sampling/topk_logprobs",
        WIRE,
        TOPK_ANSWER,
        "pass",
    ),
    Mutant(
        "topk-shifted",
        "topk_prompt_logprobs are those of the next position",
        "sampling/topk_logprobs",
        WIRE,
        TOPK_ANSWER,
        "message.topk_prompt_logprobs.CopyFrom(_topk([None, *scores.top[2:], scores.top[-1]]))",
    ),
)
