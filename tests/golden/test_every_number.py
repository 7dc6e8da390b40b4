"""No number of data/ is there for nothing: each is changed in turn, and the test that claims it has to fail.

What no test claims is named below with its reason; a case that is neither claimed nor named fails here.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden import test_edge_cases as edge
from tests.golden import test_other_projects as others
from tests.golden import test_sdpo_official as official
from tests.golden import test_tinker as tinker
from tests.golden import test_trl as trl
from tests.golden.golden_numbers import golden

FILES = sorted(path.stem for path in (Path(__file__).parent / "data").glob("*.json"))

NO_CASE = {  # pattern of paths, whole: why no test has to fail when it changes
    r"\w+/(sources|source|seed|fn|note|formula|inputs_ref|changes|fake_teacher|backend_divergence)(/.*)?": "where from",
    r"\w+/inputs/.*": "what the cases were made from",
    r".*/(name|impl|params|tag|note)(/.*)?": "how a case was made",
    r"edge_cases/results/isclip2/old_log_probs/.*": "an input of isclip2",
    r"sibling_selection/cases/\w+/\w+/(rewards|self_excluded|threshold)": "inputs",
    r"teacher_and_microbatch/results/\w+/(teacher_before|student|rate|ref_logits|student_logits|mix)": "inputs",
    r".*/(max_dev\w*|max_abs_grad_diff_vs_exact_rkl|gdiff|formula)": "a check of the recorder against itself",
    r"other_impls/results/\w+(=[-\w.]+)?/(student_logits|teacher_logits|k|\w+_logprobs|mask)": "inputs",
    r"tinker_advantages/cases/\d+/(rewards|dtype|sum)": "inputs, and how float32 summed",
    r"tinker_advantages/remove_constant/.*": "a filter of whole groups, no loss; ours is in tests/experiment",
    r"tinker_assemble/datums/\d+/mask/(shape|dtype)": "its datums as sent; ours have no mask",
    r"tinker_importance_sampling/cases/\d+/datums/\d+/(target_logprobs|sampling_logprobs|advantages|mask)": "inputs",
    r"tinker_distillation/.*/(model_input|target_tokens/\w+|(logprobs|mask)/\w+|\w+/(shape|dtype))": "as sent",
    r"tinker_distillation/results/\w+/(teacher_prompt|teacher_seen)/?.*": "what its teacher was shown",
    r"tinker_distillation/results/sdft_reverse_kl_custom_loss/(student_logprobs|datums/.*)": "inputs",
    r"token_math/(prefixes|student_logits|teacher_logprobs)(/.*)?": "inputs",
    r"token_math/diffs/grad variance A.*": "the spread of three estimators of one gradient: nothing defined here",
}

Claim = Callable[..., None]
EDGE = r"edge_cases/results/"
OFFICIAL = r"sdpo_losses_official/cases/"
TRL = r"sdpo_losses_trl/"
OTHERS = r"other_impls/results/"
TINKER = r"tinker_distillation/results/"
EITHER = r"(?P<implementation>official|trl)_"
CLAIMS: dict[str, Claim] = {  # pattern of paths, whole: the test, whose parameters are the pattern's groups
    OFFICIAL + r"official_full_rkl_seq-mean-token-mean/.*": official.test_its_sequence_mean_adds_1e_8_to_each_length,
    OFFICIAL + r"official_full_rkl_seq-mean-token-sum-norm/.*": official.test_its_sum_norm_divides_by_the_padded_length,
    OFFICIAL + r"(?P<name>official_sampled\w+)/.*": official.test_sampled_token_is_the_token_level_advantage,
    OFFICIAL + r"(?P<name>[-\w]+)/.*": official.test_logit_level,
    TRL + r"cases/(?P<name>trl_sampled\w+)/.*": trl.test_sampled_token,
    TRL + r"cases/(?P<name>\w+)/.*": trl.test_it_is_the_mean_of_row_means_over_all_rows,
    TRL + r"per_token_trl_loss_utils/sampled_token": trl.test_each_sampled_token,
    TRL + r"per_token_trl_loss_utils/(?P<name>\w+)": trl.test_each_token,
    TRL + r"gkd_generalized_jsd/beta(?P<beta>[\d.]+)/.*": trl.test_generalised_jsd_of_its_gkd,
    EDGE + r"all_masked/official_(?P<mode>seq-mean-[-\w]+)/.*": edge.test_or_nan_with_a_gradient_of_zero,
    EDGE + r"all_masked/" + EITHER + r"(?P<name>[-\w]+)/.*": edge.test_a_fully_masked_batch_is_zero_there,
    EDGE + r"(?P<change>base|teacher_\w+|both_\w+)/" + EITHER + r"(?P<loss>\w+)/.*": edge.test_it_is_ours_or_nan,
    EDGE + r"(?P<name>K_eq_V(-1)?)/torch\.(?P<dtype>\w+)/tail_(?P<kind>\w+)/.*": (
        edge.test_top_k_of_the_whole_vocabulary_has_an_empty_tail
    ),
    EDGE + r"jsd_limit/alpha=(?P<alpha>[-.e\d]+)/.*": edge.test_the_discontinuity_at_the_ends_of_alpha,
    EDGE + r"precision/torch\.(?P<place>\w+)/(?P<name>\w+)/.*": edge.test_nearly_equal_rows_in_low_precision,
    EDGE + r"isclip2/official_sampled/.*": edge.test_sampled_tokens_off_policy,
    EDGE + r"gkd_all_masked/loss": edge.test_trls_gkd_of_a_fully_masked_batch_is_zero,
    OTHERS + r"sdpo_rl.*": others.test_sdpo_rl_returns_the_official_numbers,
    OTHERS + r"verl_forward_kl_topk/.*": others.test_verl_keeps_the_teachers_top_k_and_neither_a_tail_nor_renormalises,
    OTHERS + r"verl_forward_kl_topk_confident_disagree_clamp=.*": (
        others.test_verls_clamp_kills_the_gradient_where_teacher_and_student_disagree_most
    ),
    OTHERS + r"prime_rl_ref_kl/.*": others.test_prime_rls_reference_kl_is_the_token_advantage_under_importance_sampling,
    OTHERS + r"skyrl_torch_importance_sampling/.*": others.test_skyrls_torch_backend_sums_as_documented,
    OTHERS + r"trl_iw_opd_gamma1/.*": (
        others.test_trls_importance_weighted_distillation_weighs_a_token_by_what_is_left_of_its_sequence
    ),
    r"sibling_selection/cases/(?P<name>\w+)/official/chosen": official.test_siblings_are_the_first_above_the_threshold,
    r"sibling_selection/cases/(?P<name>\w+)/trl/chosen": trl.test_siblings,
    r"teacher_and_microbatch/results/official_microbatch.*": official.test_its_result_depends_on_the_micro_batches,
    r"teacher_and_microbatch/results/official_.*": official.test_teachers,
    r"teacher_and_microbatch/results/trl_ema/.*": trl.test_ema,
    r"tinker_advantages/cases/(?P<i>\d+)/advantages": tinker.test_group_mean,
    r"tinker_advantages/step_plus_final/.*": tinker.test_step_rewards_and_final_reward_are_added_before_centring,
    r"tinker_assemble/.*": tinker.test_its_datums_are_ours,
    r"tinker_importance_sampling/cases/(?P<i>\d+)/.*/alt_mean_\w+": tinker.test_a_backend_that_divides_departs,
    r"tinker_importance_sampling/cases/(?P<i>\d+)/.*": tinker.test_importance_sampling,
    TINKER
    + r"opd_incorporate_kl_penalty/discount=0\.0/.*": tinker.test_its_on_policy_distillation_adds_the_token_advantage,
    TINKER + r"rl_metrics_incorporate_kl_penalty/discount=0\.0/.*": tinker.test_its_other_penalty_subtracts_the_mean,
    TINKER + r"(?P<kind>opd|rl_metrics)_incorporate_kl_penalty/discount=0\.9/.*": (
        tinker.test_its_discount_leaks_onto_positions_that_are_not_actions
    ),
    TINKER
    + r"sdft_advantages_061/.*": tinker.test_its_self_distillation_is_the_token_advantage_on_the_teachers_context,
    TINKER + r"sdft_advantages_061_truncated_ctx8/.*": tinker.test_a_truncated_teacher_silences_its_turn,
    TINKER
    + r"sdft_advantages_commit_9dfcc3a_MULTITURN_MISALIGNED/.*": tinker.test_an_older_commit_misaligned_the_second_turn,
    TINKER + r"sdft_topk_datums_skip(?P<skip>\d)/.*": tinker.test_its_top_k_weights_are_truncated_cross_entropy,
    TINKER + r"sdft_reverse_kl_custom_loss/.*": tinker.test_its_custom_reverse_kl_is_the_renormalised_reverse_kl,
    r"token_math/(values|diffs)/.*": others.test_the_enumerated_values_and_differences,
    r"token_math/grads/(full_.*)": others.test_the_enumerated_gradient_is_the_one_defined_here,
    r"token_math/grads/(rtg_gamma1|seqkl)": others.test_token_level_is_not_the_gradient_of_the_sequence_kl,
    r"token_math/grads/.*": others.test_k3_has_the_gradient_of_the_forward_kl_and_naive_k1_none,
}
NUMBERS: dict[str, Callable[[str], Any]] = {
    "alpha": float,
    "beta": float,
    "i": int,
    "skip": int,
    "place": lambda dtype: int(dtype == "bfloat16"),
}


def numbers(value: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """(path, container, key) of each number or list of numbers in a golden file; cases go by their names."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        name = inner.get("name", key) if isinstance(inner, dict) else key
        nested = isinstance(inner, dict) or (isinstance(inner, list) and any(isinstance(x, dict) for x in inner))
        if nested:
            yield from numbers(inner, f"{path}/{name}")
        else:
            yield f"{path}/{name}", value, key


def changed(value: Any) -> Any:
    """Something else of the same kind."""
    if isinstance(value, list):
        return [changed(x) for x in value] if value else [0.5]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.3
    return 0.25  # None, and the words for NaN and infinity


def first(table: dict[str, Any], path: str) -> tuple[re.Match[str], Any] | None:
    """The first pattern of a table that a path matches, with what stands beside it."""
    matches = ((re.fullmatch(pattern, path), beside) for pattern, beside in table.items())
    return next(((match, beside) for match, beside in matches if match), None)


@pytest.mark.parametrize("file", FILES)
def test_each_is_claimed_by_a_test_that_fails_without_it(file: str) -> None:
    content = golden(file)
    paths = list(numbers(content, file))
    unclaimed, idle = [], []
    for path, container, key in paths:
        if first(NO_CASE, path):
            continue
        claim = first(CLAIMS, path)
        if claim is None:
            unclaimed.append(path)
            continue
        arguments = {name: NUMBERS.get(name, str)(value) for name, value in claim[0].groupdict().items()}
        original = container[key]
        container[key] = changed(original)
        try:
            claim[1](**arguments)
        except (AssertionError, ValueError, IndexError, TypeError):
            continue
        finally:
            container[key] = original
        idle.append(f"{path}, {claim[1].__name__}")
    assert not unclaimed
    assert not idle
    assert content == json.loads((Path(__file__).parent / "data" / f"{file}.json").read_text())


def test_every_pattern_is_of_use() -> None:
    paths = [path for file in FILES for path, _, _ in numbers(golden(file), file)]
    for table in (NO_CASE, CLAIMS):
        for pattern in table:
            assert any((match := first(table, path)) and match[0].re.pattern == pattern for path in paths), pattern
