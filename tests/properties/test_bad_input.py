"""Bad input, each said in one sentence that names the place, by reference and implementation alike."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paritygate.losses import averaging, grpo, policy_gradient, sdpo, spod
from paritygate_reference import averaging as averaging_reference
from paritygate_reference import grpo as grpo_reference
from paritygate_reference import policy_gradient as policy_gradient_reference
from paritygate_reference import sdpo as sdpo_reference
from paritygate_reference import spod as spod_reference

NAN, INF = float("nan"), float("inf")
BOTH = pytest.mark.parametrize("module", [sdpo_reference, sdpo], ids=["reference", "impl"])


def as_given(module: Any, *rows: Any) -> list[Any]:
    """Lists for the reference, float64 tensors for the implementation."""
    if module.__name__.startswith("paritygate_reference"):
        return list(rows)
    return [torch.tensor([NAN if v is None else v for v in row], dtype=torch.float64) for row in rows]


@BOTH
@pytest.mark.parametrize(
    ("teacher", "student", "mask", "place"),
    [
        ([-1.0, NAN], [-1.0, -1.0], [1, 1], "teacher logprob at position 1"),
        ([-1.0, INF], [-1.0, -1.0], [1, 1], "teacher logprob at position 1"),
        ([-1.0, -1.0], [NAN, -1.0], [1, 1], "student logprob at position 0"),
        ([-1.0, -1.0], [-1.0, -INF], [0, 1], "student logprob at position 1"),
        ([-1.0, -1.0], [-1.0, INF], [0, 1], "student logprob at position 1"),
        ([-1.0, None], [-1.0, -1.0], [0, 1], "teacher logprob at position 1"),
        ([-1.0, -1.0], [-1.0, -1.0], [1, 2], "mask at position 1"),
        ([-1.0, -1.0], [-1.0, -1.0], [0.5, 1], "mask at position 0"),
        ([-1.0], [-1.0, -1.0], [1, 1], "shapes differ"),
        ([-1.0, -1.0], [-1.0, -1.0], [1], "shapes differ"),
    ],
)
def test_token_and_sequence_advantage(module: Any, teacher: Any, student: Any, mask: Any, place: str) -> None:
    for advantage in (module.token_advantage, module.sequence_advantage):
        with pytest.raises(ValueError, match=place):
            advantage(*as_given(module, teacher, student, mask))


@BOTH
def test_advantage_options(module: Any) -> None:
    rows = as_given(module, [-1.0], [-1.0], [1])
    for clip in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="clip"):
            module.token_advantage(*rows, clip=clip)
    with pytest.raises(ValueError, match="position 0"):
        module.sequence_advantage(*as_given(module, [-INF], [-1.0], [1]))
    for weight in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match="weight"):
            module.hybrid_advantage(*as_given(module, [1.0], [1.0]), weight)
    with pytest.raises(ValueError, match="shapes"):
        module.hybrid_advantage(*as_given(module, [1.0], [1.0, 2.0]), 0.5)
    for rate in (-0.1, 1.1, NAN):
        for between in (module.ema, module.trust_region):
            with pytest.raises(ValueError, match="rate"):
                between(*as_given(module, [1.0], [1.0]), rate)
    with pytest.raises(ValueError, match="shapes"):
        module.ema(*as_given(module, [1.0], [1.0, 2.0]), 0.5)


@BOTH
def test_masked_values_are_never_read(module: Any) -> None:
    rows = as_given(module, [None, NAN, -INF, -1.0], [INF, None, -INF, -2.0], [0, 0, 0, 1])
    assert [float(a) for a in module.token_advantage(*rows)] == [0.0, 0.0, 0.0, 1.0]
    assert [float(a) for a in module.sequence_advantage(*rows)] == [0.0, 0.0, 0.0, 1.0]
    assert float(module.token_advantage(*as_given(module, [-INF], [-1.0], [1]))[0]) == -5.0
    assert [float(a) for a in module.sequence_advantage(*as_given(module, [None], [None], [0]))] == [0.0]


def test_positions_of_a_batch_are_named() -> None:
    teacher = torch.zeros(2, 3)
    teacher[1, 2] = NAN
    with pytest.raises(ValueError, match=r"position \(1, 2\)"):
        sdpo.token_advantage(teacher, torch.zeros(2, 3), torch.ones(2, 3))


@BOTH
def test_select_sibling(module: Any) -> None:
    for index in (-1, 2, 7):
        with pytest.raises(ValueError, match="index"):
            module.select_sibling([0.9, 0.9], index)
    with pytest.raises(ValueError, match="rule"):
        module.select_sibling([0.9], 0, rule="last")
    with pytest.raises(ValueError, match="rollout 1"):
        module.select_sibling([0.9, NAN], 0)
    with pytest.raises(ValueError, match="threshold"):
        module.select_sibling([0.9], 0, threshold=NAN)
    with pytest.raises(ValueError, match="index"):
        module.select_sibling([], 0)
    assert module.select_sibling([0.9, 0.7], 0) is None
    assert module.select_sibling([0.9, 0.9, 0.9], 0) == 1
    assert module.select_sibling([None, 0.8, None], 0) == 1


LOGITS = np.zeros((2, 3, 4))


def logit_loss(module: Any, student: np.ndarray, teacher: np.ndarray, mask: np.ndarray, **options: Any) -> Any:
    if module is sdpo_reference:
        return module.logit_loss(student, teacher, mask, **options)
    if isinstance(options.get("importance_ratio"), np.ndarray):
        options["importance_ratio"] = torch.tensor(options["importance_ratio"])
    return module.logit_loss(torch.tensor(student), torch.tensor(teacher), torch.tensor(mask), **options)


@BOTH
@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"divergence": "kl"}, "divergence"),
        ({"divergence": "jsd", "mixture": 0.0}, "mixture"),
        ({"divergence": "jsd", "mixture": 1.0}, "mixture"),
        ({"divergence": "jsd", "mixture": -0.5}, "mixture"),
        ({"divergence": "jsd", "mixture": 1.5}, "mixture"),
        ({"divergence": "jsd", "mixture": NAN}, "mixture"),
        ({"top_k": 5}, "top_k"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"importance_ratio": np.full((2, 3), NAN)}, r"importance_ratio at .*\(0, 0\)"),
        ({"importance_ratio": np.full((2, 3), INF)}, r"importance_ratio at .*\(0, 0\)"),
        ({"importance_ratio": np.full((2, 3), -1.0)}, r"importance_ratio at .*\(0, 0\)"),
        ({"importance_ratio": np.ones((3, 2))}, "importance_ratio"),
    ],
)
def test_logit_loss_options(module: Any, options: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=place):
        logit_loss(module, LOGITS, LOGITS, np.ones((2, 3)), **options)


@BOTH
@pytest.mark.parametrize(("value", "words"), [(NAN, "NaN"), (INF, r"\+inf"), (-INF, "-inf")])
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_logit_loss_rows(module: Any, value: float, words: str, who: str) -> None:
    bad, mask = LOGITS.copy(), np.ones((2, 3))
    mask[0, 0] = 0
    bad[1, 1:] = value
    bad[0, 0] = NAN  # masked: never read
    pair = (bad, LOGITS) if who == "student" else (LOGITS, bad)
    with pytest.raises(ValueError, match=rf"{who} row \(1, 1\).*{words}"):
        logit_loss(module, *pair, mask)


@BOTH
def test_logit_loss_shapes_and_masks(module: Any) -> None:
    ones = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"shapes|no distribution"):
        logit_loss(module, LOGITS[..., :0], LOGITS[..., :0], ones)
    with pytest.raises(ValueError, match="shape"):
        logit_loss(module, LOGITS, LOGITS[..., :3], ones)
    with pytest.raises(ValueError, match="shape"):
        logit_loss(module, LOGITS, LOGITS, ones.T)
    with pytest.raises(ValueError, match=r"mask at position \(0, 1\)"):
        logit_loss(module, LOGITS, LOGITS, np.where(np.arange(3) == 1, 0.5, ones))
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum"):
        with pytest.raises(ValueError, match="masked"):
            logit_loss(module, LOGITS, LOGITS, 0 * ones, aggregation=aggregation)
    teacher = LOGITS.copy()
    teacher[0, 1, :2] = -INF
    with pytest.raises(ValueError, match=r"row \(0, 1\).*top_k"):
        logit_loss(module, LOGITS, teacher, ones, top_k=2, tail=False)


def test_service_weights() -> None:
    rows = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="shapes"):
        sdpo.cross_entropy_weights(rows, rows[:1])
    with pytest.raises(ValueError, match="divergence"):
        sdpo.cross_entropy_weights(rows, rows, divergence="kl")
    for mixture in (0.0, 1.0, 1.5, -0.5, NAN):
        with pytest.raises(ValueError, match="mixture"):
            sdpo.cross_entropy_weights(rows, rows, divergence="jsd", mixture=mixture)
    for shape in ((3,), (2, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match="shapes"):
            sdpo.cross_entropy_weights(torch.zeros(shape), torch.zeros(shape))
    bad = rows.clone()
    bad[1, 0] = NAN
    with pytest.raises(ValueError, match="student row 1"):
        sdpo.cross_entropy_weights(bad, rows)
    bad[1, 0] = -INF
    with pytest.raises(ValueError, match=r"position \(1, 0\)"):
        sdpo.cross_entropy_weights(rows, bad)
    assert torch.isfinite(sdpo.cross_entropy_weights(bad - 2, rows - 2).weights).all()


@pytest.mark.parametrize("divergence", sdpo.DIVERGENCES)
@pytest.mark.parametrize("tail", [True, False])
def test_service_weights_of_an_entry_that_the_student_excludes(divergence: str, tail: bool) -> None:
    """Its weight is the teacher's mass there under a forward KL, else 0; with none of it, the others are as without."""
    student, teacher = torch.tensor([[-1.0, -INF, -2.0]]), torch.tensor([[-1.5, -1.0, -2.5]])
    options = {"divergence": divergence, "mixture": 0.3, "tail": tail}
    weights = sdpo.cross_entropy_weights(student, teacher, **options).weights
    assert torch.isfinite(weights).all()
    mass = torch.tensor(-1.0).exp() / (1.0 if tail else teacher.double().exp().sum())
    torch.testing.assert_close(weights[0, 1], (divergence == "forward_kl") * mass, rtol=1e-6, atol=0, check_dtype=False)
    teacher[0, 1] = -INF
    both = sdpo.cross_entropy_weights(student, teacher, **options).weights
    alone = sdpo.cross_entropy_weights(student[:, [0, 2]], teacher[:, [0, 2]], **options).weights
    torch.testing.assert_close(both[:, [0, 2]], alone, rtol=1e-14, atol=0)
    assert both[0, 1] == 0.0


ROWS = {
    "student_logprobs": torch.full((2, 3), -2.0),
    "teacher_logprobs": torch.full((2, 3), -2.0),
    "student_sampled": torch.tensor([-1.0, -1.0]),
    "teacher_sampled": torch.tensor([-1.0, -2.0]),
    "action_index": torch.tensor([0, 1]),
    "episode_index": torch.tensor([0, 0]),
    "success": torch.tensor([True]),
}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"student_logprobs": torch.zeros(3, 3)}, "3 rows of log-probabilities, 2 sampled tokens"),
        ({"teacher_logprobs": torch.zeros(2, 2)}, "shapes"),
        ({"teacher_sampled": torch.zeros(3)}, "shapes differ"),
        ({"student_sampled": torch.tensor([-1.0, -INF])}, "student's sampled logprob at position 1"),
        ({"student_sampled": torch.tensor([NAN, -1.0])}, "student's sampled logprob at position 0"),
        ({"teacher_sampled": torch.tensor([-1.0, INF])}, "teacher's sampled logprob at position 1"),
        ({"teacher_sampled": torch.tensor([NAN, -1.0])}, "teacher's sampled logprob at position 0"),
        ({"action_index": torch.tensor([0, 2])}, "action_index"),
        ({"success": torch.tensor([True, True])}, "episode 1 has no action"),
        ({"tau0": 0.0}, "tau0"),
        ({"floor_weight": INF}, "floor_weight"),
    ],
)
def test_service_weights_of_spod(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=place):
        spod.success_preserving_weights(**{**ROWS, **changes})
    unlikely = {**ROWS, "teacher_sampled": torch.tensor([-1.0, -INF])}  # a teacher may exclude what was sampled
    assert spod.success_preserving_weights(**unlikely).gate.tolist() == [False, True]


@pytest.mark.parametrize("mean", [grpo_reference.group_mean_advantage, grpo.group_mean_advantage])
def test_group_mean_advantage(mean: Callable[[Any], Any]) -> None:
    for rewards, place in (
        ([], "empty"),
        ([1.0, NAN], "position 1"),
        ([INF, 0.0], "position 0"),
        ([-INF], "position 0"),
    ):
        with pytest.raises(ValueError, match=place):
            mean(rewards)
    with pytest.raises(ValueError, match="reward"):
        mean(1.0)


def test_group_mean_advantage_of_a_batch() -> None:
    with pytest.raises(ValueError, match=r"empty.*\(2, 0\)"):
        grpo.group_mean_advantage(torch.zeros(2, 0))
    with pytest.raises(ValueError, match=r"position \(1, 0\)"):
        grpo.group_mean_advantage(torch.tensor([[0.0], [NAN]]))
    assert grpo.group_mean_advantage(torch.zeros(0, 2)).shape == (0, 2)


@pytest.mark.parametrize(
    ("new", "old", "advantages", "place"),
    [
        ([NAN, -1.0], [-1.0, -1.0], [1.0, 1.0], "logprob at position 0"),
        ([-1.0, INF], [-1.0, -1.0], [1.0, 1.0], "logprob at position 1"),
        ([-1.0, -1.0], [-1.0, -INF], [1.0, 1.0], "sampler logprob at position 1"),
        ([-1.0, -1.0], [NAN, -1.0], [1.0, 1.0], "sampler logprob at position 0"),
        ([-1.0, NAN], [-1.0, -1.0], [1.0, -1.0], "logprob at position 1"),
        ([-1.0, -1.0], [-1.0, -1.0], [1.0, NAN], "advantage at position 1"),
        ([-1.0, -1.0], [-1.0, -1.0], [-INF, 1.0], "advantage at position 0"),
        ([-1.0], [-1.0, -1.0], [1.0, 1.0], "shapes differ"),
    ],
)
def test_importance_sampling(new: Any, old: Any, advantages: Any, place: str) -> None:
    for module in (policy_gradient_reference, policy_gradient):
        for function in (module.importance_sampling_loss, module.importance_sampling_grad):
            with pytest.raises(ValueError, match=place):
                function(*as_given(module, new, old, advantages))


def test_three_level_mean_of_lists() -> None:
    for values, place in (([], "no episode"), ([[[1.0]], []], "episode 1"), ([[[1.0], []]], "episode 0, action 1")):
        with pytest.raises(ValueError, match=place):
            averaging_reference.three_level_mean(values)


LEVELS = [
    ([0, 0, 2], [0, 0, 0], "action 1 has no token"),
    ([0, 0, 1], [0, 0, 0], "action 2 has no token: action_index ends at 1"),
    ([0, 1, 5], [0, 0], "action_index is out of order at token 2: 5 after 1"),
    ([1, 1, 2], [0, 0, 0], "action 0 has no token"),
    ([0, 1, 0], [0, 0], "action_index is out of order at token 2: 0 after 1, where actions 0 to 1 come in turn"),
    ([0, 1, 2], [0, 0], "action_index is out of order at token 2"),
    ([-1, 0, 1], [0, 0], "action_index is out of order at token 0"),
    ([0, 1, 1], [0, 2], "episode 1 has no action"),
    ([0, 1, 1], [1, 0], "episode"),
    ([0, 1, 2], [0, 1, 0], "episode_index is out of order at action"),
    ([], [], "empty"),
    ([], [0], "empty"),
    ([0], [], "empty"),
]


@pytest.mark.parametrize(("action_index", "episode_index", "place"), LEVELS)
def test_levels(action_index: list[int], episode_index: list[int], place: str) -> None:
    actions, episodes = (torch.tensor(index, dtype=torch.int64) for index in (action_index, episode_index))
    with pytest.raises(ValueError, match=place):
        averaging.three_level_mean(torch.zeros(len(actions)), actions, episodes)
    with pytest.raises(ValueError, match=place):
        packed(action_index=actions, episode_index=episodes, rows=len(actions), episodes=max([*episode_index, 0]) + 1)


@pytest.mark.parametrize(
    ("values", "action_index", "episode_index"),
    [
        (torch.zeros(2, 2), torch.tensor([0, 0]), torch.tensor([0])),
        (torch.tensor(0.0), torch.tensor([0]), torch.tensor([0])),
        (torch.zeros(2), torch.tensor([0]), torch.tensor([0])),
        (torch.zeros(2), torch.tensor([0, 0, 0]), torch.tensor([0])),
        (torch.zeros(2), torch.tensor([[0], [0]]), torch.tensor([0])),
        (torch.zeros(2), torch.tensor([0, 0]), torch.tensor([[0]])),
        (torch.zeros(2), torch.tensor([0, 0]), torch.tensor(0)),
    ],
)
def test_shapes_of_levels(values: torch.Tensor, action_index: torch.Tensor, episode_index: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"shape.*\(N,\)"):
        averaging.three_level_mean(values, action_index, episode_index)


def packed(**changes: Any) -> Any:
    """SPOD's packed form, two episodes of an action each, some arguments changed."""
    rows = changes.pop("rows", 3)
    episodes = changes.pop("episodes", 2)
    arguments = {
        "student_logits": torch.zeros(rows, 4),
        "teacher_logits": torch.zeros(rows, 4),
        "actions": torch.zeros(rows, dtype=torch.int64),
        "action_index": torch.tensor([0, 0, 1]),
        "episode_index": torch.tensor([0, 1]),
        "success": torch.ones(episodes, dtype=torch.bool),
        **changes,
    }
    spod.success_preserving_loss(**arguments)
    return spod.success_preserving_loss_and_grad(**arguments)


def with_value(value: float) -> torch.Tensor:
    logits = torch.zeros(3, 4)
    logits[1] = value
    return logits


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"actions": torch.tensor([0, 4, 0])}, "token at position 1 is 4"),
        ({"actions": torch.tensor([0, 0, 9])}, "token at position 2 is 9"),
        ({"actions": torch.tensor([0, 0, -1])}, "token at position 2 is -1"),
        ({"actions": torch.zeros(2, dtype=torch.int64)}, "shapes differ"),
        ({"actions": torch.zeros(3, dtype=torch.int32)}, "actions are torch.int32"),
        ({"action_index": torch.tensor([0, 0, 1], dtype=torch.int32)}, "action_index is torch.int32"),
        ({"episode_index": torch.tensor([0.0, 1.0])}, "episode_index is torch.float32"),
        ({"teacher_logits": torch.zeros(3, 5)}, "shapes differ"),
        ({"tau0": 0.0}, "tau0"),
        ({"tau0": 1.5}, "tau0"),
        ({"tau0": -0.5}, "tau0"),
        ({"tau0": NAN}, "tau0"),
        ({"floor_weight": -1.0}, "floor_weight"),
        ({"floor_weight": NAN}, "floor_weight"),
        ({"floor_weight": INF}, "floor_weight"),
        ({"success": torch.ones(3, dtype=torch.bool)}, "episode 2 has no action"),
        ({"success": torch.ones(1, dtype=torch.bool)}, "episode_index is out of order"),
        ({"student_logits": with_value(NAN)}, "student_logits row 1"),
        ({"student_logits": with_value(INF)}, "student_logits row 1"),
        ({"student_logits": with_value(-INF)}, "student_logits row 1"),
        ({"teacher_logits": with_value(NAN)}, "teacher_logits row 1"),
        ({"teacher_logits": with_value(-INF)}, "teacher_logits row 1"),
    ],
)
def test_packed_spod(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=place):
        packed(**changes)


def test_spod_out() -> None:
    assert packed()[1].shape == (3, 4)
    for out in (torch.zeros(3, 5), torch.zeros(3, 3), torch.zeros(3, 4).double(), torch.zeros(3, 4, device="meta")):
        with pytest.raises(ValueError, match="out"):
            spod.success_preserving_loss_and_grad(
                torch.zeros(3, 4),
                torch.zeros(3, 4),
                torch.zeros(3, dtype=torch.int64),
                torch.tensor([0, 0, 1]),
                torch.tensor([0, 1]),
                torch.ones(2, dtype=torch.bool),
                out=out,
            )


def test_padded_spod() -> None:
    logits, actions = torch.zeros(2, 1, 2, 4), torch.zeros(2, 1, 2, dtype=torch.int64)
    success, mask = torch.ones(2, dtype=torch.bool), torch.ones(2, 1, 2)
    with pytest.raises(ValueError, match="shapes"):
        spod.success_preserving_loss_padded(logits[0], logits[0], actions, mask, success)
    with pytest.raises(ValueError, match="mask at position"):
        spod.success_preserving_loss_padded(logits, logits, actions, mask * 2, success)
    mask[1] = 0
    with pytest.raises(ValueError, match="episode 1 has no action"):
        spod.success_preserving_loss_padded(logits, logits, actions, mask, success)


def reference_episode(**changes: Any) -> dict[str, Any]:
    action = {
        "student_logits": np.zeros((2, 4)),
        "teacher_logits": np.zeros((2, 4)),
        "tokens": np.zeros(2, int),
        **changes,
    }
    return {"success": True, "actions": [action]}


@pytest.mark.parametrize(
    ("episodes", "options", "place"),
    [
        ([], {}, "no episode"),
        ([{"success": True, "actions": []}], {}, "episode 0 has no action"),
        ([reference_episode(tokens=np.zeros(0, int))], {}, "episode 0, action 0 has no token"),
        ([reference_episode(tokens=np.array([0, 4]))], {}, "episode 0, action 0: token 1 is 4"),
        ([reference_episode(tokens=np.array([-1, 0]))], {}, "episode 0, action 0: token 0 is -1"),
        ([reference_episode(teacher_logits=np.zeros((2, 5)))], {}, "episode 0, action 0: shapes differ"),
        ([reference_episode(student_logits=np.full((2, 4), NAN))], {}, "episode 0, action 0, student row 0"),
        ([reference_episode(teacher_logits=np.full((2, 4), -INF))], {}, "episode 0, action 0, teacher row 0"),
        ([reference_episode()], {"tau0": 0.0}, "tau0"),
        ([reference_episode()], {"tau0": 1.01}, "tau0"),
        ([reference_episode()], {"floor_weight": -1.0}, "floor_weight"),
    ],
)
def test_reference_spod(episodes: list[Any], options: dict[str, float], place: str) -> None:
    for function in (spod_reference.success_preserving_loss, spod_reference.success_preserving_grad):
        with pytest.raises(ValueError, match=place):
            function(episodes, **options)
