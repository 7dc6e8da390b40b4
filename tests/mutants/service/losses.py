"""Mistakes in values and gradients of the losses, and in the sums over a batch, that services have made or could make.

The rows in brackets are those of design/092, where the public reports are.
"""

from tests.mutants.mutant import Mutant

LOSSES = "server/engine/losses.py"
TRAINING = "server/engine/training.py"
WIRE = "server/wire/training.py"
CROSS_ENTROPY = 'return -(datum.of("weights") * logprobs).sum()'
IMPORTANCE = "return policy_gradient.importance_sampling_loss(*_rows(logprobs, datum), validate=False)"
ROWS = 'return logprobs, datum.of("logprobs"), datum.of("advantages")'
REPORTED = "self.outcome.loss += float(loss.detach())"
RETURNED = "self.outcome.logprobs.append(leaf.detach())"
PER_DATUM = "grad_logprobs.append(torch.nn.functional.pad(grad.reshape(len(values), -1), (0, width - columns)))"
TOTAL = "total = gradients[name]\n"
ADDED = "parameter.grad = total if parameter.grad is None else parameter.grad + total"
PPO = 'return policy_gradient.ppo_loss(*_rows(logprobs, datum), *_thresholds("ppo", config), validate=False)'
CISPO = 'return policy_gradient.cispo_loss(*_rows(logprobs, datum), *_thresholds("cispo", config), validate=False)'
DRO = "return policy_gradient.dro_loss(*_rows(logprobs, datum), _beta(config), validate=False)"
GSPO_MASK = 'mask = datum.of("sequence_ratio_mask") != 0'
LOW = 'low = _number(config, "clip_low_threshold", default_low)'
HIGH = 'high = _number(config, "clip_high_threshold", default_high)'

VALUE = (
    Mutant(
        "loss-times-workers",
        "the reported loss is multiplied by the number of workers (row 44)",
        "value/cross_entropy",
        TRAINING,
        REPORTED,
        "self.outcome.loss += 2 * float(loss.detach())",
    ),
    Mutant(
        "forward-loss-is-zero",
        "forward reports a loss of 0 (rows 68, 89)",
        "value/forward_is_forward_backward",
        TRAINING,
        REPORTED,
        "self.outcome.loss += 0.0 if self.forward_only else float(loss.detach())",
    ),
    Mutant(
        "forward-ignores-the-loss",
        "forward computes cross_entropy with the advantages whatever the loss is (row 91)",
        "value/ppo",
        TRAINING,
        "loss = self.loss(leaf, datum.inputs, self.config)",
        'loss = -(datum.inputs.of("advantages") * leaf).sum() if self.forward_only and "advantages" in '
        "datum.inputs.tensors else self.loss(leaf, datum.inputs, self.config)",
    ),
    Mutant(
        "forward-scores-other-weights",
        "forward scores with rounded states, forward_backward with exact ones (row 23)",
        "value/forward_is_forward_backward",
        TRAINING,
        "rows = hidden[:count].detach()",
        "rows = hidden[:count].detach()\n"
        "            rows = rows.bfloat16().to(rows.dtype) if self.forward_only else rows",
    ),
    Mutant(
        "dropout-in-training",
        "LoRA dropout of 0.05 in forward_backward (row 79)",
        "value/forward_is_forward_backward",
        "server/model/layers.py",
        "        return call.forward([*pairs], differentiable=any(ctx.needs_input_grad))",
        "        learns = any(ctx.needs_input_grad)\n"
        "        some = [p if p is None else torch.nn.functional.dropout(p, 0.05, learns) for p in pairs]\n"
        "        return call.forward(some, differentiable=learns)",
    ),
    Mutant(
        "weights-in-eight-bits",
        "loss weights and advantages go through eight bits and lose digits",
        "value/cross_entropy",
        WIRE,
        "    return torch.from_numpy(value)\n",
        "    return torch.from_numpy(value).to(torch.float8_e5m2).float()\n",
    ),
    Mutant(
        "policy-logprobs-are-zero",
        "policy losses return placeholders for logprobs (row 58)",
        "value/policy_logprobs",
        TRAINING,
        RETURNED,
        'self.outcome.logprobs.append(leaf.detach() * float("weights" in datum.inputs.tensors))',
    ),
    Mutant(
        "first-target-only",
        "of (N, K) targets the first column alone counts",
        "value/several_targets",
        LOSSES,
        CROSS_ENTROPY,
        'return -(datum.of("weights") * logprobs).reshape(len(logprobs), -1)[:, 0].sum()',
    ),
    Mutant(
        "dro-without-the-half",
        "dro's penalty is beta instead of beta / 2",
        "value/dro",
        LOSSES,
        DRO,
        "return policy_gradient.dro_loss(*_rows(logprobs, datum), 2 * _beta(config), validate=False)",
    ),
    Mutant(
        "gspo-ratio-of-tokens",
        "gspo takes each token's own ratio (row 92)",
        "value/gspo",
        LOSSES,
        "return policy_gradient.gspo_loss(*_rows(logprobs, datum), mask, *_thresholds(",
        "return policy_gradient.ppo_loss(*_rows(logprobs, datum), *_thresholds(",
    ),
    Mutant(
        "gspo-ignores-the-mask",
        "gspo's ratio is of all tokens, those outside of the mask too",
        "value/gspo",
        LOSSES,
        GSPO_MASK,
        'mask = datum.of("sequence_ratio_mask") >= 0',
    ),
    Mutant(
        "ppo-defaults-of-cispo",
        "without options ppo clips at 0 and 4",
        "value/ppo_defaults",
        LOSSES,
        '_BOUNDS = {"ppo": policy_gradient.PPO_BOUNDS',
        '_BOUNDS = {"ppo": policy_gradient.CISPO_BOUNDS',
    ),
)

GRADIENT = (
    Mutant(
        "alpha-is-zero",
        "the LoRA scale is 0, so no step does anything (row 53)",
        "gradient/learns",
        "server/model/lora.py",
        "ALPHA = 32.0",
        "ALPHA = 0.0",
    ),
    Mutant(
        "gradient-ascent",
        "the sign of every gradient is turned, and nothing is compared with the loss itself",
        "gradient/learns",
        TRAINING,
        TOTAL,
        "total = -gradients[name]\n",
    ),
    Mutant(
        "cross-entropy-whatever-the-loss",
        "importance_sampling is computed as cross_entropy (row 12)",
        "gradient/importance_sampling",
        LOSSES,
        IMPORTANCE,
        'return -(datum.of("advantages") * logprobs).sum()',
    ),
    Mutant(
        "thresholds-dropped",
        "clip_low_threshold and clip_high_threshold are read under other names, or dropped (rows 13, 47, 79)",
        "gradient/ppo",
        LOSSES,
        LOW,
        'low = _number(config, "clip_range_low", default_low)',
        ((LOSSES, HIGH, 'high = _number(config, "clip_range_high", default_high)'),),
    ),
    Mutant(
        "sampler-logprobs-recomputed",
        "the client's logprobs are replaced by recomputed ones, so every ratio is 1 (rows 24, 43)",
        "gradient/importance_sampling",
        LOSSES,
        ROWS,
        'return logprobs, logprobs.detach(), datum.of("advantages")',
    ),
    Mutant(
        "importance-sampling-clipped",
        "importance_sampling is clipped at 0.8 and 1.2 (row 42)",
        "gradient/importance_sampling",
        LOSSES,
        IMPORTANCE,
        "return policy_gradient.ppo_loss(*_rows(logprobs, datum), 0.8, 1.2, validate=False)",
    ),
    Mutant(
        "hidden-kl",
        "a small KL against the sampler is added to importance_sampling (row 42)",
        "gradient/zero",
        LOSSES,
        IMPORTANCE,
        IMPORTANCE + ' + 0.001 * (logprobs - datum.of("logprobs")).square().sum()',
    ),
    Mutant(
        "divided-by-the-weights-of-a-datum",
        "the loss of each datum is divided by its sum of weights, 1e-9 at least (rows 38, 51, 89, 93)",
        "gradient/cross_entropy",
        LOSSES,
        CROSS_ENTROPY,
        CROSS_ENTROPY + ' / datum.of("weights").sum().clamp(min=1e-9)',
    ),
    Mutant(
        "divided-by-a-negative-sum",
        "the same, by the absolute sum of weights where that is not negative (rows 38, 51)",
        "gradient/cross_entropy_negative",
        LOSSES,
        CROSS_ENTROPY,
        CROSS_ENTROPY + ' / (datum.of("weights").sum().abs() if datum.of("weights").sum() < 0 else 1.0)',
    ),
    Mutant(
        "divided-by-the-weights-of-a-call",
        "a weighted mean over the call, its denominator 1 at least (rows 86, 93)",
        "gradient/cross_entropy_above_one",
        TRAINING,
        TOTAL,
        "weights = sum(float(d.inputs.tensors.get('weights', torch.zeros(1)).sum()) for d in self.data)\n"
        "                total = gradients[name] / max(weights, 1.0)\n",
    ),
    Mutant(
        "gradient-over-workers",
        "the gradient is divided by a constant, the number of workers (row 72)",
        "gradient/absolute",
        TRAINING,
        TOTAL,
        "total = gradients[name] / 2\n",
    ),
    Mutant(
        "policy-gradient-over-tokens",
        "policy losses are means over tokens, cross_entropy is a sum (row 92)",
        "gradient/cispo",
        LOSSES,
        CISPO,
        CISPO + " / len(logprobs)",
    ),
    Mutant(
        "clip-of-the-log-ratio",
        "thresholds hold for the log of the ratio",
        "gradient/ppo",
        LOSSES,
        PPO,
        'low, high = (math.exp(x - 1) for x in _thresholds("ppo", config))\n'
        "    return policy_gradient.ppo_loss(*_rows(logprobs, datum), low, high, validate=False)",
    ),
    Mutant(
        "cispo-is-ppo",
        "cispo drops the gradient of clipped tokens",
        "gradient/cispo",
        LOSSES,
        CISPO,
        'return policy_gradient.ppo_loss(*_rows(logprobs, datum), *_thresholds("cispo", config), validate=False)',
    ),
    Mutant(
        "dro-without-a-penalty",
        "beta is accepted and not used",
        "gradient/dro",
        LOSSES,
        DRO,
        "return policy_gradient.dro_loss(*_rows(logprobs, datum), 0.0 * _beta(config), validate=False)",
    ),
    Mutant(
        "advantages-positive-only",
        "negative advantages are taken for 0",
        "gradient/importance_sampling",
        LOSSES,
        ROWS,
        'return logprobs, datum.of("logprobs"), datum.of("advantages").clamp(min=0)',
    ),
    Mutant(
        "advantages-normalised",
        "the service subtracts the mean of a datum's advantages",
        "gradient/importance_sampling",
        LOSSES,
        ROWS,
        'return logprobs, datum.of("logprobs"), datum.of("advantages") - datum.of("advantages").mean()',
    ),
    Mutant(
        "label-smoothing",
        "the gradient has label smoothing, the reported loss has not",
        "gradient/absolute",
        TRAINING,
        "grad_logits.scatter_add_(1, targets[index], grad_logprobs[index])",
        "grad_logits.scatter_add_(1, targets[index], 0.9 * grad_logprobs[index])\n"
        "            grad_logits.add_(0.1 * grad_logprobs[index].sum(1, keepdim=True) / grad_logits.shape[1])",
    ),
    Mutant(
        "hidden-l2",
        "every gradient has a small multiple of the weights in it",
        "gradient/cancels",
        TRAINING,
        ADDED,
        ADDED.replace("= total if", "= total + 1e-4 * parameter.detach() if"),
    ),
    Mutant(
        "gspo-clips-the-upper-side-only",
        "a sequence whose advantage is negative is not clipped",
        "gradient/gspo",
        LOSSES,
        'mask, *_thresholds("gspo", config), validate=False)',
        'mask, 0.0, _thresholds("gspo", config)[1], validate=False)',
    ),
    Mutant(
        "several-targets-are-averaged",
        "(N, K) weights are divided by K in the gradient, not in the value",
        "gradient/several_targets",
        TRAINING,
        "(grad,) = torch.autograd.grad(loss, leaf)",
        "(grad,) = torch.autograd.grad(loss, leaf)\n            grad = grad / columns",
    ),
    Mutant(
        "weights-lose-their-sign",
        "the absolute weights are the gradient's",
        "gradient/cancels",
        TRAINING,
        "(grad,) = torch.autograd.grad(loss, leaf)",
        "(grad,) = torch.autograd.grad(loss, leaf)\n            grad = -grad.abs()",
    ),
    Mutant(
        "forward-leaves-a-gradient",
        "forward adds to the gradient as forward_backward does",
        "gradient/forward_leaves_nothing",
        TRAINING,
        "            if not self.forward_only:\n                grad_logprobs",
        "            if True:\n                grad_logprobs",
        ((TRAINING, "with torch.set_grad_enabled(not self.forward_only):", "with torch.enable_grad():"),),
    ),
)

SUMS = (
    Mutant(
        "mean-over-datums",
        "the gradient of a call is divided by its number of datums (rows 38, 70, 89)",
        "sums/duplicate",
        TRAINING,
        TOTAL,
        "total = gradients[name] / len(self.data)\n",
    ),
    Mutant(
        "duplicates-are-merged",
        "a datum that is in a call twice counts once",
        "sums/duplicate",
        TRAINING,
        PER_DATUM,
        "seen = [d for d in self.data[: len(self.outcome.logprobs) - 1] if d.tokens == datum.tokens]\n"
        "            " + PER_DATUM.replace("grad.reshape", "(grad * (0 if seen else 1)).reshape"),
    ),
    Mutant(
        "last-call-counts",
        "gradients are zeroed at every forward_backward (rows 18, 65, 95, 98)",
        "sums/split",
        TRAINING,
        ADDED,
        "parameter.grad = total",
    ),
    Mutant(
        "mean-over-calls",
        "gradients of several calls are averaged (rows 15, 95)",
        "sums/split",
        TRAINING,
        ADDED,
        "parameter.grad = total if parameter.grad is None else (parameter.grad + total) / 2",
    ),
    Mutant(
        "mean-over-microbatches",
        "sums in a microbatch, a mean over microbatches (rows 15, 94)",
        "sums/many",
        TRAINING,
        TOTAL,
        "total = gradients[name] / max(1, -(-sum(len(d.tokens) for d in self.data) // budget))\n",
    ),
    Mutant(
        "mean-over-tokens",
        "the gradient of a microbatch is divided by its tokens (rows 16, 89)",
        "sums/alone",
        TRAINING,
        TOTAL,
        "total = gradients[name] / sum(len(d.tokens) for d in self.data)\n",
    ),
    Mutant(
        "batch-of-one-is-padded",
        "a call with one datum is filled up with a copy of it (row 56)",
        "sums/alone",
        TRAINING,
        TOTAL,
        "total = gradients[name] * (2 if len(self.data) == 1 else 1)\n",
    ),
    Mutant(
        "last-datum-dropped",
        "the last datum of a call leaves no gradient (row 65)",
        "sums/permuted",
        TRAINING,
        PER_DATUM,
        "last = len(self.outcome.logprobs) == len(self.data) > 1\n"
        "            " + PER_DATUM.replace("grad.reshape", "(grad * (0 if last else 1)).reshape"),
    ),
    Mutant(
        "lengths-of-the-first",
        "tokens beyond the first datum's length leave no gradient (row 65)",
        "sums/permuted",
        TRAINING,
        PER_DATUM,
        "grad[len(data[0].tokens) :] = 0\n            " + PER_DATUM,
    ),
    Mutant(
        "cut-from-the-wrong-side",
        "logprobs of a padded batch are cut from its left instead of its right (row 17)",
        "sums/ragged_logprobs",
        TRAINING,
        RETURNED,
        "self.outcome.logprobs.append(torch.roll(leaf.detach(), max(len(d.tokens) for d in data) - len(leaf), 0))",
    ),
    Mutant(
        "labels-rolled-across-samples",
        "targets are shifted once more, over the border of two samples (row 80)",
        "sums/ragged_logprobs",
        TRAINING,
        "return Layout(joined[:, 0], positions, joined[:, 1:], shared, rests, indices)",
        "return Layout(joined[:, 0], positions, joined[:, 1:].roll(-1, 0), shared, rests, indices)",
    ),
    Mutant(
        "long-sequences-lose-their-place",
        "positions in training end at 127",
        "sums/long",
        TRAINING,
        "positions = torch.cat([layout.positions, torch.arange(padding)])",
        "positions = torch.cat([layout.positions, torch.arange(padding)]).clamp(max=127)",
    ),
    Mutant(
        "copies-differ",
        "equal datums of a batch have different logprobs (row 6)",
        "sums/copies",
        TRAINING,
        RETURNED,
        "self.outcome.logprobs.append(leaf.detach() - 0.2 * (len(self.outcome.logprobs) % 3))",
    ),
    Mutant(
        "width-of-the-first-datum",
        "the shape of the first datum's targets is taken for that of all (row 83)",
        "sums/mixed_targets",
        TRAINING,
        "loss = self.loss(leaf, datum.inputs, self.config)",
        "kept = 1 if self.data[0].inputs.target_tokens.ndim == 1 else self.data[0].inputs.target_tokens.shape[1]\n"
        "            inputs = datum.inputs if leaf.ndim == 1 else LossInputs(datum.inputs.target_tokens, "
        "{k: torch.where(torch.arange(columns) < kept, v, 0.0) for k, v in datum.inputs.tensors.items()})\n"
        "            loss = self.loss(leaf, inputs, self.config)",
    ),
)

MUTANTS = (*VALUE, *GRADIENT, *SUMS)
