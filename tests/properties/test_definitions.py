"""What each loss is, as literal numbers: in the reference and in the implementation, which could be wrong together.

Every expected value is worked out by hand from the formula beside it; none was computed by either.
"""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from paritygate import losses as implementation
from paritygate.losses import averaging, grpo, kl_estimators, policy_gradient, sdpo, spod
from paritygate_reference import _distributions
from paritygate_reference import averaging as averaging_reference
from paritygate_reference import grpo as grpo_reference
from paritygate_reference import kl_estimators as kl_estimators_reference
from paritygate_reference import policy_gradient as policy_gradient_reference
from paritygate_reference import sdpo as sdpo_reference
from paritygate_reference import spod as spod_reference

LN2, LN3 = 0.6931471805599453, 1.0986122886681098
GRPO = pytest.mark.parametrize("module", [grpo_reference, grpo], ids=["reference", "implementation"])
KL = pytest.mark.parametrize("module", [kl_estimators_reference, kl_estimators], ids=["reference", "implementation"])
POLICY = pytest.mark.parametrize(
    "module", [policy_gradient_reference, policy_gradient], ids=["reference", "implementation"]
)
SDPO = pytest.mark.parametrize("module", [sdpo_reference, sdpo], ids=["reference", "implementation"])


def given(module: ModuleType, *values: Any) -> list[Any]:
    """Arrays for the reference, tensors for the implementation, float64."""
    ours = module.__name__.startswith(implementation.__name__)
    return [torch.tensor(x, dtype=torch.float64) if ours else np.array(x, dtype=np.float64) for x in values]


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual, dtype=np.float64), expected, rtol=1e-14, atol=1e-15)


@GRPO
@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 2.0, 6.0], [-2.0, -1.0, 3.0]),  # not divided by the deviation, 2.16
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ([1e308, -1e308, 1e308], [1e308 / 1.5, -1e308 / 0.75, 1e308 / 1.5]),  # whose sum of differences is infinite
        ([1.7e308, -1.7e308], [1.7e308, -1.7e308]),
        ([5e-324, 0.0], [0.0, 0.0]),  # half of the smallest number is 0, to even
    ],
)
def test_group_mean_advantage(module: ModuleType, rewards: list[float], advantages: list[float]) -> None:
    close(module.group_mean_advantage(*given(module, rewards)), advantages)


@POLICY
@pytest.mark.parametrize(
    ("log_ratio", "loss"),
    [(0.0, -3.0), (LN2, -6.0), (25.0, -216014698012.15766), (-25.0, -4.166383159489206e-11), (300.0, -5.8272792e130)],
)
def test_importance_sampling_is_a_sum_of_unclamped_ratios(module: ModuleType, log_ratio: float, loss: float) -> None:
    """-sum ratio A over A = 1, 1, 1: a sum, no mean; verl clamps the log-ratio to 20 in either direction."""
    new, old, advantages = given(module, [log_ratio - 301.0] * 3, [-301.0] * 3, [1.0] * 3)
    rtol = 1e-6 if log_ratio == 300.0 else 1e-12
    assert float(module.importance_sampling_loss(new, old, advantages)) == pytest.approx(loss, rel=rtol, abs=0.0)
    gradient = np.asarray(module.importance_sampling_grad(new, old, advantages), dtype=np.float64)
    np.testing.assert_allclose(gradient, [loss / 3] * 3, rtol=rtol)


@SDPO
def test_token_advantage(module: ModuleType) -> None:
    """Teacher minus student, clipped at 5 where nothing else is said, and 0 where the mask is."""
    teacher, student, mask = given(module, [-1.0, -9.0, -0.5, -3.0], [-2.0, -1.0, -8.0, -1.0], [1, 1, 1, 0])
    close(module.token_advantage(teacher, student, mask), [1.0, -5.0, 5.0, 0.0])
    close(module.token_advantage(teacher, student, mask, clip=7.0), [1.0, -7.0, 7.0, 0.0])


@SDPO
def test_sequence_advantage_is_a_mean(module: ModuleType) -> None:
    """(1 - 8 + 7.5) / 3, unclipped, on the mask alone."""
    teacher, student, mask = given(module, [-1.0, -9.0, -0.5, -3.0], [-2.0, -1.0, -8.0, -1.0], [1, 1, 1, 0])
    close(module.sequence_advantage(teacher, student, mask), [0.5 / 3, 0.5 / 3, 0.5 / 3, 0.0])


HALVES, QUARTERS = [0.0, 0.0], [0.0, LN3]  # student (1/2, 1/2), teacher (1/4, 3/4)
FORWARD = 0.75 * LN3 - LN2  # 1/4 log 1/2 + 3/4 log 3/2
REVERSE = LN2 - 0.5 * LN3  # 1/2 log 2 + 1/2 log 2/3
# m = (3/8, 5/8): 1/4 (log 4/3 + log 4/5) + 1/4 log 2/3 / 2 ... written out: 1/2 KL(p || m) + 1/2 KL(q || m)
JSD = 0.25 * (math.log(4 / 3) + math.log(4 / 5)) + 0.5 * (0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5))


@SDPO
@pytest.mark.parametrize(
    ("divergence", "value"),
    [("forward_kl", FORWARD), ("reverse_kl", REVERSE), ("jsd", JSD)],
)
def test_logit_loss(module: ModuleType, divergence: str, value: float) -> None:
    student, teacher, mask = given(module, [[HALVES]], [[QUARTERS]], [[1]])
    close(module.logit_loss(student, teacher, mask, divergence=divergence), value)


@SDPO
@pytest.mark.parametrize(
    ("aggregation", "value"),
    [
        ("token_mean", 3 / 4),  # of the four tokens three have a divergence
        ("sequence_mean", (2 / 3 + 1) / 2),
        ("sequence_sum", (2 + 1) / 2),
        ("token_sum", 3.0),
    ],
)
def test_aggregations(module: ModuleType, aggregation: str, value: float) -> None:
    """Sequences of three tokens and of one, and one that is masked whole; in units of one token's divergence."""
    rows = [[QUARTERS, QUARTERS, HALVES], [QUARTERS, HALVES, HALVES], [QUARTERS, QUARTERS, QUARTERS]]
    student, teacher, mask = given(module, [[HALVES] * 3] * 3, rows, [[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    close(module.logit_loss(student, teacher, mask, aggregation=aggregation), value * REVERSE)


@SDPO
def test_the_top_k_is_the_student_s(module: ModuleType) -> None:
    """Student (1/2, 1/4, 1/4), teacher (1/4, 1/4, 1/2); k = 1: buckets (1/2, 1/2) and (1/4, 3/4), or one of 1."""
    student, teacher, mask = given(module, [[[LN2, 0.0, 0.0]]], [[[0.0, 0.0, LN2]]], [[1]])
    close(module.logit_loss(student, teacher, mask, top_k=1), REVERSE)
    close(module.logit_loss(student, teacher, mask, top_k=1, tail=False), 0.0)
    # k = 2 without a tail: (2/3, 1/3) against (1/2, 1/2)
    value = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    close(module.logit_loss(student, teacher, mask, top_k=2, tail=False), value)


@SDPO
def test_teachers(module: ModuleType) -> None:
    start, end = given(module, [1.0, 0.0], [3.0, 8.0])
    close(module.ema(start, end, 0.25), [1.5, 2.0])
    close(module.trust_region(start, end, 0.25), [1.5, 2.0])


@SDPO
@pytest.mark.parametrize(
    ("composites", "chosen"),
    [
        ([0.0, 0.8, 0.9], 2),
        ([0.0, 0.9, 0.9], 1),
        ([1.0, 0.8, None], 1),  # at the threshold, and never itself
        ([1.0, 0.79999999, None], None),  # which is 0.8 in float32
        ([1.0, 0.7999999999, None], None),
        ([1.0, (0.6 + 0.8 + 1.0) / 3, None], 1),  # 0.7999999999999999
        ([1.0, (0.7 + 0.8 + 0.9) / 3, 0.8], 1),  # a tie, to the lowest index
        ([1.0, 0.8, math.fsum((0.8, 0.8, 0.8)) / 3], 1),  # 0.8000000000000002
    ],
)
def test_a_sibling_by_means_of_decimal_scores(
    module: ModuleType, composites: list[float | None], chosen: int | None
) -> None:
    assert module.select_sibling(composites, 0, 0.8) == chosen


def spod_answers(actions: list[dict[str, Any]], success: bool, **options: float) -> tuple[Any, Any]:
    """One episode by the reference and by the implementation; an action is student and teacher logits and tokens."""
    episode = {"success": success, "actions": actions}
    rows = {name: np.concatenate([np.asarray(a[name], np.float64) for a in actions]) for name in actions[0]}
    index = torch.tensor([i for i, a in enumerate(actions) for _ in a["tokens"]])
    answer = spod.success_preserving_loss(
        torch.tensor(rows["student_logits"]),
        torch.tensor(rows["teacher_logits"]),
        torch.tensor(rows["tokens"]).long(),
        index,
        torch.zeros(len(actions), dtype=torch.int64),
        torch.tensor([success]),
        **options,
    )
    return spod_reference.success_preserving_loss([episode], **options), answer


def test_spod_of_one_protected_and_one_plain_action() -> None:
    """p = 1/2 a token, q = 1/4: protected, l_p = -2 log 2, floor (log 3/4 + 2 log 2) / 2; the other is more likely."""
    protected = {"student_logits": [HALVES] * 2, "teacher_logits": [QUARTERS] * 2, "tokens": [0, 0]}
    plain = {"student_logits": [HALVES], "teacher_logits": [QUARTERS], "tokens": [1]}
    for answer in spod_answers([protected, plain], True, tau0=0.75, floor_weight=3.0):
        floor = (math.log(0.75) + 2 * LN2) / 2
        close(float(answer.loss), (3.0 * floor + FORWARD) / 2)
        close(np.ravel(answer.floor if isinstance(answer, spod.SpodLoss) else answer.floor[0]), [floor, 0.0])
        close(np.ravel(answer.kl if isinstance(answer, spod.SpodLoss) else answer.kl[0]), [0.0, FORWARD])
    for answer in spod_answers([protected, plain], False, tau0=0.75, floor_weight=3.0):
        close(float(answer.loss), FORWARD)


@pytest.mark.parametrize("nats", [1e-4, 1e-6, 1e-9, 1e-12])
def test_the_gate_has_no_margin(nats: float) -> None:
    """However little the teacher is below the student; one nat-trillionth above it is not protected."""
    for sign, expected in ((-1.0, True), (1.0, False)):
        row = {"student_logits": [[0.0, 0.0]], "teacher_logits": [[sign * nats, 0.0]], "tokens": [0]}
        for answer in spod_answers([row], True):
            assert bool(np.ravel(np.asarray(answer.gate))[0]) is expected


def test_rows_that_change_places_tie() -> None:
    """The differences of 0, a - b and b - a are 0; the two totals, added in another order, are 4e-16 apart."""
    a, b, c = 0.1, 0.2, 0.3
    log = {x: [math.log(x), math.log1p(-x)] for x in (a, b, c)}
    teacher, student = [log[a], log[b], log[c]], [log[a], log[c], log[b]]
    for first, second in ((teacher, student), (student, teacher)):
        action = {"student_logits": first, "teacher_logits": second, "tokens": [0, 0, 0]}
        for answer in spod_answers([action], True):
            assert not np.ravel(np.asarray(answer.gate))[0]


def test_a_log_softmax_of_the_reference_keeps_the_digits_of_a_sure_row() -> None:
    """-log(1 + e^-40 + e^-50), to sixty digits: with the largest entry's 1 in the sum nothing of it would be left."""
    row = _distributions.log_softmax([0.0, -40.0, -50.0])
    assert row.tolist() == pytest.approx([-4.248547130276385e-18, -40.0, -50.0], rel=1e-15, abs=0.0)


def test_three_level_mean() -> None:
    """((1 + 2) / 2 + 3) / 2 of one episode, 10 of the other, and their mean."""
    nested = [[[1.0, 2.0], [3.0]], [[10.0]]]
    close(averaging_reference.three_level_mean(nested), 6.125)
    flat = averaging.three_level_mean(
        torch.tensor([1.0, 2.0, 3.0, 10.0]).double(), torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0, 1])
    )
    close(float(flat), 6.125)


H = 1e308


@POLICY
@pytest.mark.parametrize(
    ("loss", "logprobs", "sampler", "advantages", "options", "expected"),
    [
        ("importance_sampling_loss", [-1.0] * 3, [-1.0] * 3, [H, H, -H], (), -H),
        ("ppo_loss", [-1.0] * 3, [-1.0] * 3, [H, H, -H], (), -H),
        ("cispo_loss", [-1.0] * 3, [-1.0] * 3, [H, H, -H], (), H),
        ("cispo_loss", [0.0] * 3, [-2.0] * 3, [H] * 3, (), 0.0),  # 4 A is infinite, 4 A log 1 is not
        ("dro_loss", [-1.0] * 3, [-1.0] * 3, [H, H, -H], (0.5,), H),
        ("gspo_loss", [-1.0] * 3, [-1.0] * 3, [H, H, -H], ([1, 1, 1], 0.8, 1.2), -H),
        ("gspo_loss", [-H, -H, 0.0], [0.0, 0.0, -H], [1.0] * 3, ([1, 1, 1], 0.8, 1.2), 0.0),  # the ratio is exp(-H/3)
        ("gspo_loss", [H, H, -H, -H], [0.0] * 4, [1.0] * 4, ([1] * 4, 0.8, 1.2), -4.0),  # and here 1
        ("importance_sampling_loss", [-1.0] * 3, [-1.0] * 3, [H, H, H], (), -math.inf),
        ("importance_sampling_loss", [0.0] * 4, [-800.0, 0.0, 0.0, 0.0], [1.0, -H, -H, -H], (), -math.inf),
    ],
)
def test_a_policy_gradient_loss_is_finite_where_its_sum_is(
    module: ModuleType,
    loss: str,
    logprobs: list[float],
    sampler: list[float],
    advantages: list[float],
    options: tuple[Any, ...],
    expected: float,
) -> None:
    rest = given(module, *options[:1]) if loss == "gspo_loss" else list(options)
    rows = given(module, logprobs, sampler, advantages)
    with np.errstate(over="ignore"):
        close(getattr(module, loss)(*rows, *rest, *options[1:]), expected)


@KL
@pytest.mark.parametrize(
    ("log_r", "estimator", "expected"),
    [
        ([H, H, -H], "k1", -H / 3.0),
        ([-H, -H, -H], "k1", H),
        ([-H, -H, -H], "k3", H),
        ([1e154, 1e154, 1e154], "k2", 5e307),
    ],
)
def test_a_mean_kl_is_finite_where_its_mean_is(
    module: ModuleType, log_r: list[float], estimator: str, expected: float
) -> None:
    p, q, mask = given(module, [0.0] * 3, log_r, [1] * 3)
    close(module.mean_kl(p, q, mask, estimator), expected)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        (kl_estimators.k2, math.inf, H),
        (kl_estimators.k3, H, 1.0),  # 1 - q/p, where q/p is exp(-H)
        (kl_estimators.surrogate, H, H),
    ],
)
def test_a_gradient_of_a_kl_estimator_is_finite_where_its_value_is(
    estimator: Any, value: float, gradient: float
) -> None:
    p = torch.tensor([H], dtype=torch.float64, requires_grad=True)
    actual = estimator(p, torch.zeros_like(p))
    close(actual.detach(), [value])
    close(torch.autograd.grad(actual.sum(), p)[0], [gradient])


@SDPO
def test_a_sequence_advantage_is_finite_where_its_mean_is(module: ModuleType) -> None:
    teacher, zero, mask = given(module, [-H, -H, H], [0.0] * 3, [1, 1, 1])
    close(module.sequence_advantage(teacher, zero, mask), [-H / 3.0] * 3)


def test_a_three_level_mean_is_finite_where_its_value_is() -> None:
    close(averaging_reference.three_level_mean([[[H, H, -H]], [[H]]]), H / 1.5)
    values = torch.tensor([H, H, -H, H], dtype=torch.float64)
    close(averaging.three_level_mean(values, torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1])), H / 1.5)
