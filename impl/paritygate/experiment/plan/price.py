"""What a run costs at most, in tokens and money, before it has asked a service anything."""

from collections import Counter
from pathlib import Path

from paritygate.experiment.plan import forecast
from paritygate.experiment.plan.service_obligations import stands_on
from paritygate.experiment.run.account.cost import Cost, cost_of, millions, prices_of
from paritygate.experiment.run.account.meter import SAVED, Usage, key
from paritygate.spec import Experiment

USER_SYSTEM = 700  # tokens of the user simulator's own prompt with the longest instructions, rounded up

PROOF_STATES = 8  # what a proof of all that an experiment stands on saves, and deletes, at most


def tokens_at_most(exp: Experiment, prompt: int, longest: int) -> Usage:
    """Tokens by role and kind of a run that no gate stops, if every episode takes all its turns and tokens.

    prompt: tokens before an episode; it grows evenly from there to max_seq_len, or, in the evaluation, to `longest`.
    Every request counts whole, as if a service cached nothing. The judge is asked once an episode. The tokens of the
    service's proof, of all kinds, count as trained ones. The restoration preflight's few hundred are left out.
    """
    rollout, protocol = exp.protocol.rollout, exp.protocol
    by_phase = forecast.episodes(exp)
    total, evaluated = sum(by_phase.values()), by_phase["evaluate"]
    turns, most = rollout.max_turns, exp.max_seq_len
    used: Usage = Counter()

    def sampled(length: int) -> int:
        return min(turns * rollout.max_tokens_per_turn, max(length - prompt, 0))

    used[key("policy", "prefill")] += (total - evaluated) * turns * (prompt + most) // 2
    used[key("policy", "prefill")] += evaluated * turns * (prompt + longest) // 2
    used[key("policy", "sampled")] += (total - evaluated) * sampled(most) + evaluated * sampled(longest)
    steps = exp.steps + protocol.pilot.steps
    scored = sum(forecast.scorings(exp).values())
    taught = 2 * most - prompt  # a context with a sibling as long as the episode that it stands before
    used[key("policy", "prefill")] += scored * (taught + most * (protocol.advantage.student == "recomputed"))
    for arm in exp.arms:
        if arm.kind == "sdpo_logit":  # its top k under the student, and the same ids under the teacher
            used[key("policy", "prefill")] += (steps * exp.batch_size + 1) * (most + taught)
    fallbacks = protocol.pilot.max_fallback_steps if protocol.pilot.fallbacks else 0
    used[key("policy", "trained")] += (len(exp.arms) * steps + fallbacks + 1) * exp.batch_size * most
    used[key("policy", "trained")] += len(exp.arms) * most  # of the probe
    if protocol.warm_start is not None:
        used[key("policy", "trained")] += protocol.warm_start.tasks.count * protocol.warm_start.epochs * most
    used[key("proof", "trained")] += stands_on(exp).price[1]
    used[SAVED] = 2 * (len(exp.arms) * steps + fallbacks + 1) + len(exp.arms) + 3 + PROOF_STATES
    if protocol.user.kind == "model":
        message = rollout.max_tokens_per_turn + protocol.user.max_tokens
        used[key("user", "prefill")] += total * (turns + 1) * (USER_SYSTEM + turns * message // 2)
        used[key("user", "sampled")] += total * (turns + 1) * protocol.user.max_tokens
    if protocol.judge.kind == "model":
        used[key("judge", "prefill")] += (total - evaluated) * most + evaluated * longest
        used[key("judge", "sampled")] += total * protocol.judge.max_tokens
    return used


def cost_at_most(
    exp: Experiment, budget: forecast.EpisodeBudget, fits: tuple[forecast.GoldFit, ...], prices: Path | None
) -> Cost | None:
    """What those tokens come to; None where the policy's tokenizer is known to the service only.

    prices: a table other than the spec's. Raises SpecError (exit 2) where the table is not there or wrong.
    """
    table = prices_of(exp, prices)
    if budget.prompt is None:
        return None
    longest = max([exp.max_seq_len, *(fit.longest for fit in fits if fit.purpose == "evaluation")])
    used = tokens_at_most(exp, budget.prompt, longest)
    return cost_of(exp, used, (0.0, 0.0), None if table is None else table[1])


def price_lines(exp: Experiment, cost: Cost | None) -> tuple[str, ...]:
    """The price in sentences."""
    hours = (
        f"Hours are measured by the timing pilot; the budget allows {exp.budget.max_wall_minutes / 60:g} hours and "
        f"{exp.budget.gpu_hours:g} GPU hours."
    )
    if cost is None:
        return (f"Tokens are counted by the service preflight, with the tokenizer of {exp.base_model}.", hours)
    lines = [
        f"At most, if every episode takes its {exp.protocol.rollout.max_turns} turns, a service caches nothing and the "
        f"judge is asked once: {cost.saved_states} saved states, and tokens:"
    ]
    for row in cost.rows:
        what = f"  {row['role']}, {row['kind']}: {millions(row['tokens'])} of {row['model']}"
        price = "no price"
        if row["price"] is not None:
            price = f"{row['price']:g} a million ({row['day']}): {row['money']:.2f} {cost.currency}"
        lines.append(f"{what}, {price}")
    if cost.money is not None:
        least = "at least the known part, " if cost.unknown else ""
        lines.append(
            f"Together {least}{cost.money:.2f} {cost.currency}, by {cost.days()}; look up what is asked today."
        )
    return (*lines, *cost.unknown, hours)
