"""Simulated experiments: how often the rule is wrong, how often an interval covers, how often an effect is found.

Everything is seeded and vectorised: 2,000 experiments take a second.
"""

import math

import numpy as np
import pytest

from paritygate.spec import Criterion, DecisionRule
from paritygate.statistics import betting_bounds, decide, design_check, half_width
from tests.counts import soak

EXPERIMENTS = soak(quick=2_000, full=20_000)
ALPHA = 0.05
N = 60

ARMS = {"treatment": "sdpo_token", "baseline": "grpo"}
WEIGHTS = {"treatment": 1.0, "baseline": -1.0}
RULE = DecisionRule(
    alpha=ALPHA,
    criteria=(
        Criterion("primary", "composite_rubric_score", 0.03, (0.0, 1.0), WEIGHTS),
        Criterion("reward_guard", "tau_bench_task_reward", -0.1, (0.0, 1.0), WEIGHTS),
    ),
    estimand="",
    method="paired_hoeffding",
    unit="fixed_checkpoint_items",
    seeds=(0,),
    version=1,
)


def items(arm: str, composite: np.ndarray, reward: np.ndarray) -> list[dict[str, object]]:
    return [
        {"arm": arm, "task_index": task, "composite": float(c), "reward": float(r), "dimensions": None}
        for task, (c, r) in enumerate(zip(composite, reward, strict=True))
    ]


def validated(primary: np.ndarray, guard: np.ndarray) -> np.ndarray:
    """The declared rule on many experiments at once: differences (experiments, n)."""
    width = half_width(primary.shape[1], alpha=ALPHA, criteria=2)
    return (primary.mean(1) - width > 0.03) & (guard.mean(1) - width > -0.1)


def three_point(rng: np.random.Generator, mean: float, sd: float, shape: tuple[int, int]) -> np.ndarray:
    """Differences in {-1, 0, 1} of the given mean and standard deviation."""
    moved = sd**2 + mean**2
    draw = rng.random(shape)
    return np.where(draw < (moved + mean) / 2, 1.0, np.where(draw < moved, -1.0, 0.0))


def test_the_vectorised_rule_is_decide():
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(soak(quick=30, full=300)):
        lift = rng.uniform(0, 1)
        treated = [np.clip(rng.random(N) * 0.5 + lift * 0.7, 0, 1), rng.random(N) < 0.3 + 0.7 * lift]
        base = [rng.random(N) * 0.5, rng.random(N) < 0.3]
        verdict = decide(RULE, items("sdpo_token", *treated) + items("grpo", *base), tasks=range(N), **ARMS)
        primary, guard = treated[0] - base[0], treated[1] * 1.0 - base[1] * 1.0
        assert (verdict.outcome == "validated") == bool(validated(primary[None], guard[None])[0])
        seen.add(verdict.outcome)
    assert {"validated", "inconclusive"} <= seen


@pytest.mark.parametrize("law", ["uniform", "binary", "rare"])
def test_two_equal_arms_are_validated_in_at_most_alpha_of_the_experiments(law: str):
    rng = np.random.default_rng(0)
    draw = {
        "uniform": lambda: rng.random((EXPERIMENTS, N)),
        "binary": lambda: (rng.random((EXPERIMENTS, N)) < 0.5) * 1.0,
        "rare": lambda: (rng.random((EXPERIMENTS, N)) < 0.02) * 1.0,
    }[law]
    assert validated(draw() - draw(), draw() - draw()).mean() <= ALPHA


def test_an_effect_of_exactly_the_margin_is_validated_in_at_most_alpha_of_the_experiments():
    """The hardest null: the true difference sits on the margin and differences are as wide as they can be."""
    rng = np.random.default_rng(1)
    for n in (N, 834):
        primary = three_point(rng, 0.03, 0.99, (EXPERIMENTS, n))
        assert (primary.mean(1) - half_width(n, alpha=ALPHA, criteria=2) > 0.03).mean() <= ALPHA / 2


@pytest.mark.parametrize("effect", [0.15, 0.10])
def test_a_planted_effect_is_found_at_the_power_that_the_design_check_promised(effect: float):
    n = design_check(N, margin=0.03).n_required[effect]
    assert n is not None
    rng = np.random.default_rng(2)
    detected = 0
    for _ in range(20):
        differences = three_point(rng, effect, 0.6, (EXPERIMENTS // 20, n))
        detected += int((differences.mean(1) - half_width(n, alpha=ALPHA, criteria=2) > 0.03).sum())
    error = 3 * math.sqrt(0.8 * 0.2 / EXPERIMENTS)
    assert abs(detected / EXPERIMENTS - 0.8) <= error


def laws(rng: np.random.Generator) -> dict[str, tuple[np.ndarray, float]]:
    """Differences in [-1, 1], (experiments, n), and their true mean."""
    shape = (EXPERIMENTS, N)
    skewed = rng.beta(0.1, 0.9, shape)
    task_means = rng.uniform(-0.6, 0.6, shape)  # every experiment draws its tasks, easy and hard ones
    return {
        "uniform": (rng.uniform(-1, 1, shape), 0.0),
        "as wide as can be": (three_point(rng, 0.0, 1.0, shape), 0.0),
        "skewed": (skewed, 0.1),
        "rare gains": ((rng.random(shape) < 0.02) * 1.0, 0.02),
        "rare losses": ((rng.random(shape) < 0.02) * -1.0, -0.02),
        "heterogeneous": (np.clip(task_means + rng.uniform(-0.4, 0.4, shape), -1, 1), 0.0),
        "constant": (np.full(shape, 0.3), 0.3),
    }


def test_both_intervals_cover_at_or_above_the_nominal_level():
    for name, (differences, truth) in laws(np.random.default_rng(3)).items():
        mean, width = differences.mean(1), half_width(N, alpha=ALPHA)
        assert (np.abs(mean - truth) <= width).mean() >= 1 - ALPHA, name
        low, high = betting_bounds((differences + 1) / 2, alpha=ALPHA)
        assert ((low <= (truth + 1) / 2) & ((truth + 1) / 2 <= high)).mean() >= 1 - ALPHA, name


def test_the_hoeffding_interval_covers_fixed_items_that_differ():
    """The decision's own setting: the tasks are fixed, each with its own mean, and the estimand is their average."""
    rng = np.random.default_rng(4)
    probabilities = np.linspace(0.0, 1.0, N)
    differences = (rng.random((EXPERIMENTS, N)) < probabilities) * 1.0 - (rng.random((EXPERIMENTS, N)) < 0.5)
    truth = probabilities.mean() - 0.5
    assert (np.abs(differences.mean(1) - truth) <= half_width(N, alpha=ALPHA)).mean() >= 1 - ALPHA


def test_why_a_t_interval_never_decides():
    """For rare gains a t interval covers about .70 instead of .95: where no gain occurs it is one point."""
    rng = np.random.default_rng(6)
    gains = (rng.random((EXPERIMENTS, N)) < 0.02) * 1.0
    t_975_59 = 2.000995  # the 97.5% quantile of Student's t with 59 degrees of freedom
    half = t_975_59 * gains.std(1, ddof=1) / math.sqrt(N)
    covered = (np.abs(gains.mean(1) - 0.02) <= half).mean()
    assert covered == pytest.approx(0.70, abs=0.03)
