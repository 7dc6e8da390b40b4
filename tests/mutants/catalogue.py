"""Known mistakes as small, named edits, each with the obligation that has to go red; and edits that change nothing."""

from catalogue_sdpo import ADVANTAGES, LOGITS
from mutant import DIVERGENCE, LEVELS, ROWS, Edit, Mutant, one

AVERAGES = (
    one(
        "flat-mean",
        "a flat mean over tokens instead of three levels",
        "averaging/value",
        "averaging.py",
        "return 1.0 / (tokens[action_index] * actions[episode_index[action_index]] * episodes).double()",
        "return torch.full((action_index.shape[0],), 1.0 / action_index.shape[0], dtype=torch.float64)",
    ),
    one(
        "flat-mean-in-spod",
        "a flat mean over tokens instead of three levels",
        "spod/loss",
        "averaging.py",
        "return 1.0 / (tokens[action_index] * actions[episode_index[action_index]] * episodes).double()",
        "return torch.full((action_index.shape[0],), 1.0 / action_index.shape[0], dtype=torch.float64)",
    ),
    one(
        "episodes-by-their-actions",
        "episodes with more actions weigh more",
        "averaging/gradient",
        "averaging.py",
        "* actions[episode_index[action_index]] * episodes)",
        "* actions.sum())",
    ),
    one(
        "result-in-half",
        "a loss returned in the half precision of its input",
        "averaging/value",
        "averaging.py",
        ".to(result_dtype(values))",
        ".to(values.dtype)",
    ),
)

GRPO = (
    one(
        "std-left-in",
        "division by the standard deviation left in",
        "grpo/value",
        "grpo.py",
        "return centred - centred.mean(dim=-1, keepdim=True)",
        "advantage = centred - centred.mean(dim=-1, keepdim=True)\n"
        "    return advantage / (centred.std(dim=-1, keepdim=True, correction=0) + 1e-4)",
    ),
    one(
        "mean-over-the-batch",
        "the mean of the batch instead of the group",
        "grpo/value",
        "grpo.py",
        "centred = group - group[..., :1]\n    return centred - centred.mean(dim=-1, keepdim=True)",
        "return group - group.mean()",
    ),
    one(
        "rewards-in-float32",
        "rewards centred in float32: 1e8 and 1e8 + 1 are one number (tinker-cookbook)",
        "grpo/value",
        "grpo.py",
        "dtype=torch.float64).detach()",
        "dtype=torch.float32).double().detach()",
    ),
    one(
        "equal-rewards-not-zero",
        "plain r - mean leaves 1e-17 for three times 0.1",
        "grpo/equal_rewards",
        "grpo.py",
        "centred = group - group[..., :1]",
        "centred = group",
    ),
)

POLICY_GRADIENT = (
    one(
        "divided-by-positions",
        "each sequence divided by its number of positions (SkyRL's jax backend)",
        "policy_gradient/value",
        "policy_gradient.py",
        "return -(_ratio(new, old, weight) * weight).sum()",
        "return -(_ratio(new, old, weight) * weight).mean(-1).sum()",
    ),
    one(
        "logprobs-shifted",
        "rollout log-probabilities shifted by one (TRL #6191: by the prompt length)",
        "policy_gradient/value",
        "policy_gradient.py",
        '    same_shape("importance_sampling_loss"',
        '    old = old.roll(1, -1)\n    same_shape("importance_sampling_loss"',
    ),
    one(
        "ratio-inverted",
        "sampler over learner",
        "policy_gradient/value",
        "policy_gradient.py",
        "0.0, new.double() - old).exp()",
        "0.0, old - new.double()).exp()",
    ),
    one(
        "naive-k1",
        "the log-ratio itself backpropagated: no signal of the advantage",
        "policy_gradient/gradient",
        "policy_gradient.py",
        "return -(_ratio(new, old, weight) * weight).sum()",
        "kl = torch.where(weight == 0, 0.0, new.double() - old)\n"
        "    return (-(_ratio(new, old, weight) * weight).detach() + kl - kl.detach()).sum()",
    ),
    one(
        "unread-positions-read",
        "0 times NaN at a position that is no action",
        "policy_gradient/value",
        "policy_gradient.py",
        "return torch.where(weight == 0, 0.0, new.double() - old).exp()",
        "return (new.double() - old).exp()",
    ),
    one(
        "closed-form-sign",
        "the closed-form gradient with the sign of ascent",
        "policy_gradient/closed_form",
        "policy_gradient.py",
        "0.0, -_ratio(new.detach(), old, weight) * weight)",
        "0.0, _ratio(new.detach(), old, weight) * weight)",
    ),
)


KL_KEPT: tuple[Edit, ...] = (
    (
        LEVELS,
        "kl = torch.where(gate, 0.0, rows.sum_by(row_kl, tokens) / tokens)",
        "kl = rows.sum_by(row_kl, tokens) / tokens",
    ),
    (
        LEVELS,
        "torch.where(parts.gate, batch.floor_weight * parts.floor, parts.kl)",
        "parts.kl + batch.floor_weight * parts.floor",
    ),
)

SPOD = (
    one(
        "gate-per-token",
        "the gate decided per token instead of per action",
        "spod/gate",
        LEVELS,
        "gate = success & (rows.sum_by(row_teacher - row_student, tokens) < 0)",
        "gate = success & (rows.sum_by(((row_teacher - row_student) < 0).double(), tokens) > 0)",
    ),
    one(
        "gate-at-a-tie",
        "`<=` instead of `<`: a tie is protected",
        "spod/gate",
        LEVELS,
        "rows.sum_by(row_teacher - row_student, tokens) < 0)",
        "rows.sum_by(row_teacher - row_student, tokens) <= 0)",
    ),
    one(
        "gate-without-success",
        "the gate without the episode's success",
        "spod/gate",
        LEVELS,
        "gate = success & (",
        "gate = (success | ~success) & (",
    ),
    one(
        "gate-inverted",
        "the teacher's higher probability protects",
        "spod/gate",
        LEVELS,
        "rows.sum_by(row_teacher - row_student, tokens) < 0)",
        "rows.sum_by(row_student - row_teacher, tokens) < 0)",
    ),
    one(
        "gate-at-a-temperature",
        "temperature-scaled probabilities in the gate",
        "spod/gate",
        ROWS,
        "log_q.gather(1, picked)[:, 0]))",
        "(teacher[start:stop].double() / 1.5).log_softmax(-1).gather(1, picked)[:, 0]))",
    ),
    Mutant("kl-kept-when-protected", "the KL kept at protected actions and the floor added", "spod/loss", KL_KEPT),
    Mutant("negative-control-passes", "the source's negative control taken for SPOD", "spod/negative_control", KL_KEPT),
    one(
        "kl-gradient-kept-when-protected",
        "the KL's gradient kept at protected actions",
        "spod/gradient",
        LEVELS,
        "of_kl = torch.where(gate, 0.0, weights)",
        "of_kl = weights",
    ),
    one(
        "floor-without-n",
        "the floor without 1/n",
        "spod/parts",
        LEVELS,
        "(math.log(tau0) - l_p).clamp(min=0.0) / tokens, 0.0)",
        "(math.log(tau0) - l_p).clamp(min=0.0), 0.0)",
    ),
    one(
        "floor-of-the-mean",
        "the floor on the mean log-probability instead of the sum",
        "spod/parts",
        LEVELS,
        "(math.log(tau0) - l_p).clamp(min=0.0) / tokens, 0.0)",
        "(math.log(tau0) - l_p / tokens).clamp(min=0.0) / tokens, 0.0)",
    ),
    one(
        "floor-is-no-floor",
        "no relu: probability above tau0 is pushed down",
        "spod/parts",
        LEVELS,
        ".clamp(min=0.0) / tokens, 0.0)",
        ".clamp(min=-1e9) / tokens, 0.0)",
    ),
    one(
        "floor-gradient-above",
        "the floor's gradient above the floor",
        "spod/gradient",
        LEVELS,
        "torch.where(gate & (l_p < math.log(tau0)), floor_weight * weights, 0.0)",
        "torch.where(gate, floor_weight * weights, 0.0)",
    ),
    one(
        "end-token-left-out",
        "the last token of each action left out of its log-probability",
        "spod/parts",
        LEVELS,
        "l_p, l_q = rows.sum_by(row_student, tokens), rows.sum_by(row_teacher, tokens)",
        "last = tokens.cumsum(0) - 1\n"
        "    row_student, row_teacher = row_student.index_fill(0, last, 0.0), row_teacher.index_fill(0, last, 0.0)\n"
        "    l_p, l_q = rows.sum_by(row_student, tokens), rows.sum_by(row_teacher, tokens)",
    ),
    one(
        "branch-not-accumulated",
        "one branch of the loss not divided for accumulation (TRL #4935)",
        "spod/gradient",
        LEVELS,
        "floor_weight * weights, 0.0)",
        "floor_weight, 0.0)",
    ),
    one(
        "floor-weight-twice",
        "lambda counted in the reported floor",
        "spod/parts",
        LEVELS,
        "floor = torch.where(gate, (math.log(tau0)",
        "floor = torch.where(gate, floor_weight * (math.log(tau0)",
    ),
    one(
        "spod-kl-swapped",
        "reverse KL at unprotected actions",
        "spod/parts",
        ROWS,
        "kl_divergence(log_q, log_p)",
        "kl_divergence(log_p, log_q)",
    ),
    one(
        "spod-tau0-ignored",
        "the floor at probability one whatever tau0",
        "spod/parts",
        LEVELS,
        "floor = torch.where(gate, (math.log(tau0) - l_p)",
        "floor = torch.where(gate, (0.0 - l_p)",
    ),
    one(
        "service-floor-on-all",
        "on a service, the floor's weight on protected actions above it too",
        "spod/service_weights",
        "_spod_service.py",
        "torch.where(floored[action_index]",
        "torch.where(gate[action_index]",
    ),
    one(
        "padding-leaks",
        "padding leaks into averages: every padded action counts",
        "spod/padded",
        "spod.py",
        "real = read.any(-1)",
        "read = read | read.roll(1, -1)\n    real = read.any(-1)",
    ),
    one(
        "in-place-reads-back",
        "in place, the gradient made before the statistics",
        "spod/in_place",
        "spod.py",
        "        levels = levels_of(batch)\n        known = ops.statistics_and_gradient_(",
        "        levels = levels_of(batch)\n"
        "        out.detach().zero_()\n"
        "        known = ops.statistics_and_gradient_(",
    ),
    one(
        "fused-mixes-heads",
        "the student's head for the teacher's hidden states",
        "spod/fused",
        "spod.py",
        "(teacher_hidden.detach(), teacher_head.detach())",
        "(teacher_hidden.detach(), student_head.detach())",
    ),
)

MUTANTS = (*AVERAGES, *GRPO, *POLICY_GRADIENT, *ADVANTAGES, *LOGITS, *SPOD)

HARMLESS = (
    one(
        "sums-in-another-order",
        "the same sum written the other way round",
        "averaging",
        "averaging.py",
        "(values.double() * weights).sum()",
        "(weights * values.double()).sum()",
    ),
    one(
        "centred-on-the-last",
        "centred on the last reward instead of the first",
        "grpo",
        "grpo.py",
        "centred = group - group[..., :1]",
        "centred = group - group[..., -1:]",
    ),
    one(
        "minus-outside",
        "the minus inside the sum",
        "policy_gradient",
        "policy_gradient.py",
        "return -(_ratio(new, old, weight) * weight).sum()",
        "return (-_ratio(new, old, weight) * weight).sum()",
    ),
    one(
        "kl-swap-claimed",
        "claimed of TRL #4935 as a swapped KL, where it was right: the same divergence under another name",
        "sdpo",
        DIVERGENCE,
        'if options.divergence == "reverse_kl":\n        return kl_divergence(p.log, q.log)',
        'student, teacher = p.log, q.log\n    if options.divergence == "reverse_kl":\n'
        "        return kl_divergence(student, teacher)",
    ),
    one(
        "chunks-of-one-row",
        "float64 blocks of a single row",
        "sdpo",
        "_distributions.py",
        "CHUNK = 1 << 21",
        "CHUNK = 1",
    ),
    one(
        "gate-differentiated",
        "the gate left attached to the graph: piecewise constant, so its gradient is 0 almost everywhere",
        "spod",
        LEVELS,
        "gate = success & (rows.sum_by(row_teacher - row_student, tokens) < 0)",
        "soft = rows.sum_by(row_teacher - row_student, tokens)\n    gate = success & ((soft.sign() * 1.0) < 0)",
    ),
    one(
        "spod-chunks-of-one-row",
        "float64 blocks of a single row",
        "spod",
        "_distributions.py",
        "CHUNK = 1 << 21",
        "CHUNK = 1",
    ),
)

QUICK = (
    "flat-mean",
    "std-left-in",
    "divided-by-positions",
    "clip-after-mask",
    "masked-nan-leaks",
    "gate-at-a-tie",
)  # killed in `make test`; `make mutants` kills all
