"""Known mistakes as small, named edits, each with the obligation that has to go red; and edits that change nothing."""

from typing import NamedTuple

Edit = tuple[
    str, str, str
]  # file under impl/paritygate/losses, the text that stands there once, the text of the mistake


class Mutant(NamedTuple):
    """A mistake (and where it was made), its edits, and the obligation that catches it."""

    name: str
    mistake: str
    obligation: str
    edits: tuple[Edit, ...]


def one(name: str, mistake: str, obligation: str, file: str, old: str, new: str) -> Mutant:
    """A mutant of a single edit."""
    return Mutant(name, mistake, obligation, ((file, old, new),))


LEVELS, ROWS, LOGIT, DIVERGENCE = "_spod_levels.py", "_spod_rows.py", "_logit_level.py", "_divergence.py"

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

ADVANTAGES = (
    one(
        "advantage-sign",
        "student over teacher: the student is pushed away",
        "sdpo/token_advantage",
        "sdpo.py",
        "advantage = (teacher.double() - student.double())",
        "advantage = (student.double() - teacher.double())",
    ),
    one(
        "clip-after-mask",
        "clip after mask by multiplication: shows where a masked value is not finite",
        "sdpo/token_advantage",
        "sdpo.py",
        "advantage = (teacher.double() - student.double()).clamp(-clip, clip)\n"
        "    return torch.where(read, advantage, 0.0)",
        "advantage = ((teacher.double() - student.double()) * read).clamp(-clip, clip)\n    return advantage",
    ),
    one(
        "not-clipped",
        "the clip forgotten",
        "sdpo/token_advantage",
        "sdpo.py",
        ".clamp(-clip, clip)",
        ".clamp(-1e30, 1e30)",
    ),
    one(
        "mask-off-by-one",
        "loss mask off by one (verl #3287)",
        "sdpo/token_advantage",
        "sdpo.py",
        "return torch.where(read, advantage, 0.0).to(result_dtype(teacher, student))",
        "return torch.where(read.roll(1, -1), advantage.nan_to_num(0.0), 0.0).to(result_dtype(teacher, student))",
    ),
    one(
        "teacher-off-by-one",
        "teacher log-probabilities off by one (AReaL #1729)",
        "sdpo/token_advantage",
        "sdpo.py",
        "advantage = (teacher.double() - student.double())",
        "advantage = (teacher.roll(1, -1).nan_to_num(0.0).double() - student.double())",
    ),
    one(
        "none-is-zero",
        "the leading None of a service's log-probabilities read as 0.0",
        "sdpo/refusal",
        "_checks.py",
        'return float("nan") if values is None else values',
        "return 0.0 if values is None else values",
    ),
    one(
        "sampled-at-minus-infinity",
        "a student of -inf accepted for a token that was sampled",
        "sdpo/refusal",
        "sdpo.py",
        "bad |= values == -math.inf",
        "bad |= values == math.inf",
    ),
    one(
        "masked-advantages-leak",
        "discounted sums leak onto masked positions (miles #1383, tinker-cookbook)",
        "sdpo/token_advantage",
        "sdpo.py",
        "return torch.where(read, advantage, 0.0).to(result_dtype(teacher, student))",
        "own = torch.where(read, advantage, 0.0)\n"
        "    return (own + 0.9 * torch.cat([own[..., 1:], own[..., :1] * 0], -1)).to(result_dtype(teacher, student))",
    ),
    one(
        "sequence-mean-over-padding",
        "the sequence mean divided by the padded length",
        "sdpo/sequence_advantage",
        "sdpo.py",
        "/ read.sum(-1, keepdim=True).clamp(min=1)",
        "/ read.shape[-1]",
    ),
    one(
        "sequence-not-masked",
        "the sequence advantage on prompt positions too",
        "sdpo/sequence_advantage",
        "sdpo.py",
        "return torch.where(read, mean, 0.0)",
        "return mean.expand_as(read)",
    ),
    one(
        "hybrid-swapped",
        "the weight on the wrong side",
        "sdpo/hybrid_advantage",
        "sdpo.py",
        "(weight * a.double() + (1.0 - weight) * b.double())",
        "(weight * b.double() + (1.0 - weight) * a.double())",
    ),
    one(
        "ema-rate-inverted",
        "EMA rate inverted (TRL #4935)",
        "sdpo/teacher",
        "sdpo.py",
        'return _between("ema", teacher, student, rate)',
        'return _between("ema", student, teacher, rate)',
    ),
    one(
        "frozen-teacher-moves",
        "the frozen teacher is the current policy",
        "sdpo/unmixed_teacher",
        "sdpo.py",
        '_between("frozen_initial", initial_logits, student_logits, 0.0)',
        '_between("frozen_initial", initial_logits, student_logits, 1.0)',
    ),
    one(
        "sibling-is-itself",
        "the sibling is the trajectory itself",
        "sdpo/sibling",
        "sdpo.py",
        "if i != index and c is not None",
        "if c is not None",
    ),
    one(
        "sibling-above-only",
        "a composite at the threshold does not count",
        "sdpo/sibling",
        "sdpo.py",
        "and c >= threshold",
        "and c > threshold",
    ),
    one(
        "best-is-first",
        "the first above the threshold where the best is asked for",
        "sdpo/sibling",
        "sdpo.py",
        'if rule == "first" else max(',
        'if rule in ("first", "best") else max(',
    ),
    one(
        "ties-to-the-last",
        "ties to the highest index",
        "sdpo/sibling",
        "sdpo.py",
        "(pair[0], -pair[1])",
        "(pair[0], pair[1])",
    ),
)

LOGITS = (
    one(
        "kl-swapped",
        "KL direction swapped",
        "sdpo/logit_loss",
        DIVERGENCE,
        "return kl_divergence(q.log, p.log) + (q.excess - p.excess)",
        "return kl_divergence(p.log, q.log) + (p.excess - q.excess)",
    ),
    one(
        "k3-gradient",
        "k3 as a reverse KL: its gradient is the forward one",
        "sdpo/logit_gradient",
        DIVERGENCE,
        'if options.divergence == "forward_kl":\n        return -log_q.exp()',
        'if options.divergence in ("forward_kl", "reverse_kl"):\n        return -log_q.exp()',
    ),
    one(
        "mixture-swapped",
        "JSD with the mixture weight on the wrong side",
        "sdpo/logit_loss",
        "_distributions.py",
        "log_p + torch.log1p(mixture * rest), log_q + torch.log1p((1.0 - mixture) * rest)",
        "log_p + torch.log1p((1.0 - mixture) * rest), log_q + torch.log1p(mixture * rest)",
    ),
    one(
        "jsd-gradient-unweighted",
        "the JSD's gradient without 1 - alpha",
        "sdpo/logit_gradient",
        DIVERGENCE,
        "return (1.0 - options.mixture) * p *",
        "return p *",
    ),
    one(
        "mean-over-vocabulary",
        "mean over sequence times vocabulary (TRL #4105)",
        "sdpo/logit_loss",
        LOGIT,
        '"token_mean": 1.0 / tokens.sum(),',
        '"token_mean": 1.0 / tokens.sum() / 33,',
    ),
    one(
        "per-micro-batch",
        "normalised per micro-batch (here of one row) instead of per batch (TRL #6006, SkyRL #1296)",
        "sdpo/logit_loss",
        LOGIT,
        '"token_mean": 1.0 / tokens.sum(),',
        '"token_mean": 1.0 / (tokens * read.shape[0]),',
    ),
    one(
        "truncated-tokens-count",
        "truncated tokens stay in the denominator (TRL #6439)",
        "sdpo/logit_loss",
        LOGIT,
        '"token_mean": 1.0 / tokens.sum(),',
        '"token_mean": torch.full_like(tokens, 1.0 / read.numel()),',
    ),
    one(
        "masked-rows-count",
        "rows without a token stay in the mean (TRL's SDPO)",
        "sdpo/logit_loss",
        LOGIT,
        "sequences = (tokens > 0).sum()",
        "sequences = torch.tensor(read.shape[0])",
    ),
    Mutant(
        "masked-nan-leaks",
        "-inf at a masked position gives a NaN gradient (TRL #5594): the mask multiplies",
        "sdpo/logit_gradient",
        (
            (LOGIT, "if validate:  # having waited for the device, drop the rows that are not read", "if False:"),
            (
                DIVERGENCE,
                "torch.where(keep, student[start:stop], 0.0).double()",
                "(student[start:stop] * keep).double()",
            ),
            (
                DIVERGENCE,
                "torch.where(keep, teacher[start:stop], 0.0).double()",
                "(teacher[start:stop] * keep).double()",
            ),
            (DIVERGENCE, "torch.where(read[i:j, None] & (scale != 0), scale * rows, 0.0)", "(scale * rows)"),
            (LOGIT, "if validate and top_k is not None and not tail:", "if False:"),
        ),
    ),
    one(
        "logit-mask-off-by-one",
        "loss mask off by one (verl #3287)",
        "sdpo/logit_loss",
        "_checks.py",
        "    return mask == 1",
        "    return (mask == 1).roll(1, -1)",
    ),
    one(
        "teacher-logits-off-by-one",
        "teacher scored one position early",
        "sdpo/logit_loss",
        LOGIT,
        "teacher_logits.detach().reshape(-1, vocabulary)",
        "teacher_logits.detach().nan_to_num(0.0).roll(1, -2).reshape(-1, vocabulary)",
    ),
    one(
        "teacher-temperature",
        "teacher scored at another temperature (slime #2085)",
        "sdpo/logit_loss",
        LOGIT,
        "teacher_logits.detach().reshape(-1, vocabulary)",
        "(teacher_logits.detach() / 1.1).reshape(-1, vocabulary)",
    ),
    one(
        "empty-is-detached",
        "an empty batch returns a zero detached from the graph (TRL #5569)",
        "sdpo/empty",
        LOGIT,
        "    vocabulary = student_logits.shape[-1]\n",
        "    vocabulary = student_logits.shape[-1]\n    if not read.any():\n        return torch.zeros(())\n",
    ),
    one(
        "kl-clipped-per-entry",
        "per-vocabulary KL clipped, which can invert the loss (TRL #5990)",
        "sdpo/logit_loss",
        "_distributions.py",
        "return torch.where(a == 0, b, terms).sum(-1)",
        "return torch.where(a == 0, b, terms).clamp(max=0.3).sum(-1)",
    ),
    one(
        "top-k-is-a-kl",
        "a truncated top k treated as a KL (verl #7856): neither tail nor renormalised",
        "sdpo/logit_loss",
        DIVERGENCE,
        "return _Buckets(logits.gather(1, kept).log_softmax(-1), 0.0, None)",
        "return _Buckets(log_p.gather(1, kept), 0.0, None)",
    ),
    one(
        "clamp-kills-gradient",
        "a clamp of the log-ratio kills the gradient (verl #7856)",
        "sdpo/logit_gradient",
        DIVERGENCE,
        "p * (torch.where(p > 0, log_p - log_q, 0.0) + 1.0)",
        "p * (torch.where(p > 0, (log_p - log_q).clamp(-2.0, 2.0), 0.0) + 1.0)",
    ),
    one(
        "tail-without-gradient",
        "the tail bucket left out of the gradient",
        "sdpo/logit_gradient",
        DIVERGENCE,
        "torch.where(outside, of_tail, 0.0) - total",
        "torch.where(outside, of_tail * 0.0, 0.0) - total",
    ),
    one(
        "cap-with-gradient",
        "a capped tail differentiated as if it were not",
        "sdpo/logit_gradient",
        DIVERGENCE,
        "torch.where(p.capped[:, None], 0.0, weighted[:, -1:])",
        "weighted[:, -1:]",
    ),
    one(
        "teachers-top-k",
        "the top k of the teacher (verl) instead of the student",
        "sdpo/logit_loss",
        DIVERGENCE,
        "def _values(student: Tensor, teacher: Tensor, options: Options) -> Tensor:\n"
        "    kept = None if options.top_k is None else lowest_top_k(student, options.top_k)",
        "def _values(student: Tensor, teacher: Tensor, options: Options) -> Tensor:\n"
        "    kept = None if options.top_k is None else lowest_top_k(teacher, options.top_k)",
    ),
    one(
        "ties-of-top-k",
        "ties in the top k to the highest index",
        "sdpo/logit_loss",
        DIVERGENCE,
        "keep = above | (level & (level.cumsum(-1) <= room))",
        "keep = above | (level & (level.flip(-1).cumsum(-1).flip(-1) <= room))",
    ),
    one(
        "ratio-ignored",
        "the importance ratio forgotten",
        "sdpo/logit_loss",
        LOGIT,
        "weights = weights * _checked_ratio(importance_ratio, read, validate)",
        "weights = weights * (_checked_ratio(importance_ratio, read, validate) >= 0)",
    ),
    one(
        "half-arithmetic",
        "differences of logarithms in float32: digits lost where teacher and student nearly agree",
        "sdpo/logit_loss",
        DIVERGENCE,
        "torch.where(keep, student[start:stop], 0.0).double(),",
        "torch.where(keep, student[start:stop], 0.0).float().log_softmax(-1).double(),",
    ),
    one(
        "python-scalars-are-float32",
        "torch.where of two Python numbers is float32 (found here while this was written)",
        "sdpo/logit_gradient",
        "_distributions.py",
        "log_p + torch.log1p(mixture * rest), log_q + torch.log1p((1.0 - mixture) * rest))",
        "log_p, log_q) + torch.log1p(torch.where(larger, mixture, 1.0 - mixture) * rest)",
    ),
    one(
        "weights-are-the-teacher",
        "w = q alone: truncated cross-entropy, not a KL (tinker-cookbook's top k)",
        "sdpo/service_weights",
        "_service_weights.py",
        "return log_q.exp() - p\n",
        "return log_q.exp()\n",
    ),
    one(
        "weights-without-tail",
        "the tail's share left out of the weights",
        "sdpo/service_weights",
        "_service_weights.py",
        "return log_q.exp() - (q_tail - p_tail).exp() * p",
        "return log_q.exp()",
    ),
    one(
        "small-tails-kept",
        "a tail near the cap kept, where one over it is not a number to trust",
        "sdpo/service_weights",
        "_service_weights.py",
        "dropped = -torch.expm1(mass) < SMALLEST_TAIL",
        "dropped = -torch.expm1(mass) < -1.0",
    ),
    one(
        "advantage-not-the-gradient",
        "reverse-KL advantage less one: same mean gradient, another advantage",
        "sdpo/token_advantage",
        "sdpo.py",
        "advantage = (teacher.double() - student.double())",
        "advantage = (teacher.double() - student.double() - 1.0)",
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
