"""The definitions once more, in mpmath at 60 digits, from the formulas alone: what the reference is held to."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpmath import inf, mp, mpf

mp.dps = 60
TAIL_CAP = mpf(10) ** -7


def numbers(values: Any) -> list[Any]:
    """A row of floats as exact 60-digit numbers."""
    return [mpf(float(value)) for value in values]


def softmax(logits: Sequence[Any]) -> list[Any]:
    """Probabilities of one row; exp(-inf) is 0."""
    top = max(logits)
    masses = [mpf(0) if z == -inf else mp.exp(z - top) for z in logits]
    return [m / mp.fsum(masses) for m in masses]


def in_float64(p: Any) -> Any:
    """A mass that float64 cannot hold is none: the numerics table is read in float64 terms."""
    return mpf(0) if p < mpf(2) ** -1075 else p


def kl(a: Sequence[Any], b: Sequence[Any]) -> Any:
    """sum a log(a/b), 0 log 0 = 0, +inf where a > 0 = b."""
    total = mpf(0)
    for x, y in zip(a, b, strict=True):
        if in_float64(x) == 0:
            continue
        if y == 0:
            return inf
        total += x * mp.log(x / y)
    return total


def divergence(
    student: Sequence[Any],
    teacher: Sequence[Any],
    kind: str,
    mixture: float = 0.5,
    kept: Sequence[int] | None = None,
    tail: bool = True,
) -> Any:
    """The divergence of two rows of logits, over the whole vocabulary or the `kept` entries."""
    p, q = softmax(student), softmax(teacher)
    if kept is not None and tail:
        smallest = -mp.expm1(-TAIL_CAP)
        p, q = ([row[i] for i in kept] + [max(1 - mp.fsum(row[i] for i in kept), smallest)] for row in (p, q))
    elif kept is not None:
        p, q = ([row[i] / mp.fsum(row[j] for j in kept) for i in kept] for row in (p, q))
    if kind == "forward_kl":
        return kl(q, p)
    if kind == "reverse_kl":
        return kl(p, q)
    a = mpf(mixture)
    m = [(1 - a) * x + a * y for x, y in zip(p, q, strict=True)]
    return (1 - a) * kl(p, m) + a * kl(q, m)


def top_k(student: Sequence[float], k: int) -> list[int]:
    """Indices of the k largest, ties to the lowest index."""
    return sorted(range(len(student)), key=lambda i: (-student[i], i))[:k]


def derivative(function: Callable[[list[Any]], Any], at: list[Any]) -> list[Any]:
    """Central differences of `function` in each finite entry of `at`, step 1e-20; an entry of -inf has none: 0."""
    step, slopes = mpf(10) ** -20, []
    for i, z in enumerate(at):
        if z == -inf:
            slopes.append(mpf(0))
            continue
        up, down = [*at], [*at]
        up[i], down[i] = z + step, z - step
        slopes.append((function(up) - function(down)) / (2 * step))
    return slopes


def logit_rows(
    student: np.ndarray, teacher: np.ndarray, mask: np.ndarray, options: dict[str, Any]
) -> dict[tuple[int, int], tuple[Any, list[Any]]]:
    """Value and gradient of the divergence at each position (b, t) to read, before any aggregation."""
    rows = {}
    for b, t in np.argwhere(mask).tolist():
        s, q = numbers(student[b, t]), numbers(teacher[b, t])
        k = options.get("top_k")
        ranked = teacher if options.get("top_k_of") == "teacher" else student
        kept = None if k is None else top_k(ranked[b, t].tolist(), k)

        def value(z: list[Any], q: list[Any] = q, kept: list[int] | None = kept) -> Any:
            return divergence(z, q, options["divergence"], options.get("mixture", 0.5), kept, options.get("tail", True))

        rows[b, t] = (value(s), derivative(value, s) if value(s) != inf else [])
    return rows


def aggregate(rows: dict[tuple[int, int], Any], weight: np.ndarray, aggregation: str) -> Any:
    """The named aggregation of `rows[b, t]`, each times `weight[b, t]`."""
    total, sequences = mpf(0), {b for b, _ in rows}
    for (b, t), value in rows.items():
        sequence_tokens = sum(1 for other, _ in rows if other == b)
        share = {
            "token_mean": mpf(1) / len(rows),
            "sequence_mean": mpf(1) / sequence_tokens / len(sequences),
            "sequence_sum": mpf(1) / len(sequences),
            "token_sum": mpf(1),
        }[aggregation]
        total += share * mpf(float(weight[b, t])) * value
    return total


def spod(episodes: Sequence[dict[str, Any]], tau0: float, floor_weight: float) -> dict[str, Any]:
    """SPOD's loss, gates, and the gradient with respect to every student row, from the formulas."""
    loss, gates, gradients = mpf(0), [], []
    for episode in episodes:
        for action in episode["actions"]:
            n = len(action["tokens"])
            weight = mpf(1) / (n * len(episode["actions"]) * len(episodes))
            students = [numbers(row) for row in action["student_logits"]]
            teachers = [numbers(row) for row in action["teacher_logits"]]
            tokens = [int(token) for token in action["tokens"]]
            l_p, l_q = logprob(students, tokens), logprob(teachers, tokens)
            gate = bool(episode["success"]) and l_q < l_p
            gates.append(gate)
            if gate:
                under = max(mp.log(mpf(tau0)) - l_p, mpf(0))
                loss += weight * mpf(floor_weight) * under
            else:
                loss += weight * mp.fsum(kl(softmax(t), softmax(s)) for s, t in zip(students, teachers, strict=True))
            for s, t, token in zip(students, teachers, tokens, strict=True):
                gradients.append([weight * g for g in spod_row(s, t, token, gate, under if gate else 0, floor_weight)])
    return {"loss": loss, "gate": gates, "gradient": gradients}


def spod_row(s: list[Any], t: list[Any], token: int, gate: bool, under: Any, floor_weight: float) -> list[Any]:
    """d (n times the action's loss) / d one row of the student's logits."""
    if not gate:
        return derivative(lambda z: kl(softmax(t), softmax(z)), s)
    if under > 0:
        return derivative(lambda z: -mpf(floor_weight) * logprob([z], [token]), s)
    return [mpf(0)] * len(s)


def logprob(rows: Sequence[Sequence[Any]], tokens: Sequence[int]) -> Any:
    """Sum of the log-probabilities of `tokens`."""
    picked = [softmax(row)[token] for row, token in zip(rows, tokens, strict=True)]
    return -inf if any(p == 0 for p in picked) else mp.fsum(mp.log(p) for p in picked)


def policy_loss(
    name: str, at: list[Any], frozen: list[Any], rows: dict[str, list[Any]], options: dict[str, Any]
) -> Any:
    """ppo, cispo, dro or gspo of one sequence at log-probabilities `at`; what is not differentiated stays at `frozen`.

    `rows` has the sampler's log-probabilities, the advantages and gspo's mask.
    """
    old, advantages, terms = rows["sampler"], rows["advantages"], []
    if name == "gspo":
        log_ratios = [x - y for x, y, m in zip(frozen, old, rows["mask"], strict=True) if m]
        if not log_ratios:
            return mpf(0)
        s = mp.exp(mp.fsum(log_ratios) / len(log_ratios))
    for x, z, y, a in zip(at, frozen, old, advantages, strict=True):
        if name == "dro":
            terms.append(x * a - mpf(options["beta"]) / 2 * (x - y) ** 2)
            continue
        low, high = mpf(options["clip_low_threshold"]), mpf(options["clip_high_threshold"])
        if name == "cispo":
            terms.append(min(max(mp.exp(z - y), low), high) * x * a)
        else:
            r = s * mp.exp(x - z) if name == "gspo" else mp.exp(x - y)
            terms.append(min(r * a, min(max(r, low), high) * a))
    return -mp.fsum(terms)


def as_floats(value: Any) -> Any:
    """Nested mpmath numbers as nested floats."""
    if isinstance(value, list):
        return [as_floats(item) for item in value]
    return math.inf if value == inf else float(value)
