"""What a plan counts, against counts made by hand."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from paritygate.experiment.check import plan
from paritygate.experiment.plan import forecast
from paritygate.spec import Experiment, load
from paritygate.spec.schema import spec_folder

FULL = json.loads((spec_folder() / "sdpo.json").read_text("utf-8"))


def experiment(tmp_path: Path, **protocol: Any) -> Experiment:
    document = copy.deepcopy(FULL) | {"protocol": protocol}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(document), "utf-8")
    spec = load(path)
    assert isinstance(spec, Experiment)
    return spec


def test_episodes_of_the_full_protocol(tmp_path: Path):
    assert forecast.episodes(experiment(tmp_path)) == {
        "probe": 1,
        "forced checks": 4,
        "timing pilot": 16,
        "activation pilot": 2 * 2 * 16,
        "fallbacks": 4 * 16,
        "train": 2 * 20 * 16,
        "evaluate": 2 * 60,
    }


def test_only_served_partners_are_asked(tmp_path: Path):
    served = {row.model for row in forecast.asked(experiment(tmp_path))}
    assert served == {"Qwen/Qwen3.5-4B", "Qwen/Qwen3-8B", "openai/gpt-oss-120b"}
    quiet = experiment(tmp_path, user={"kind": "scripted"}, judge={"kind": "rule"})
    assert {row.model for row in forecast.asked(quiet)} == {"Qwen/Qwen3.5-4B"}


def test_only_arms_with_a_teacher_score_one(tmp_path: Path):
    rows = {row.what: row.times for row in forecast.asked(experiment(tmp_path))}
    assert rows["sdpo_token: teacher scorings"] == 320
    assert "grpo: teacher scorings" not in rows
    assert rows["teacher scorings of the same"] == 1 + 2 * 4 + 16 + 2 * 16 + 4 * 16  # probe, checks, pilots, fallbacks


@pytest.mark.parametrize(("turns", "tokens", "fits"), [(12, 512, False), (7, 512, True), (12, 256, True)])
def test_the_room_for_an_episode(tmp_path: Path, tau_bench_dir: Path, turns: int, tokens: int, fits: bool):
    from paritygate.retail import load as load_retail

    spec = experiment(tmp_path, rollout={"max_turns": turns, "max_tokens_per_turn": tokens})
    budget = forecast.episode_budget(spec, load_retail(tau_bench_dir))
    assert budget.renderer == "qwen3.5"
    assert budget.prompt is not None
    assert 4_200 < budget.prompt < 4_500  # the policy and 16 tools; a few tokens depend on how tools are written
    assert budget.left == 8192 - budget.prompt
    assert budget.fits is fits


def test_how_many_tasks_fit_as_their_own_gold_actions(tmp_path: Path, tau_bench_dir: Path):
    """29 of the 60 evaluated tasks do not fit into 8,192 tokens even so: counted apart, with rollouts' own tokens."""
    from paritygate.experiment.plan.design import gold_lines
    from paritygate.retail import load as load_retail

    spec = experiment(tmp_path)
    evaluation, training = fits = forecast.gold_fits(spec, load_retail(tau_bench_dir))
    assert (evaluation.tasks, training.tasks) == (60, 80)
    assert evaluation.in_tokens == 60 - 29
    assert training.in_tokens == 79  # all but task 431, whose recorded gold fails: 8,302 tokens
    assert evaluation.longest > 11_000
    assert 40 < evaluation.in_turns < 60
    text = " ".join(gold_lines(spec, fits))
    assert f"31 of 60 tasks fit into 8,192 tokens and {evaluation.in_turns} into 12 turns" in text
    assert "79 of 80 tasks" in text
    local = load(spec_folder() / "sdpo-local.json")
    assert forecast.gold_fits(local, load_retail(tau_bench_dir)) == ()  # its tokenizer is the service's


def test_a_policy_whose_tokenizer_the_service_has_is_counted_later(tmp_path: Path, tau_bench_dir: Path):
    from paritygate.retail import load as load_retail

    local = load(spec_folder() / "sdpo-local.json")
    assert isinstance(local, Experiment)
    budget = forecast.episode_budget(local, load_retail(tau_bench_dir))
    assert (budget.prompt, budget.left, budget.fits) == (None, None, None)


def test_the_plan_names_every_phase_that_applies(tmp_path: Path):
    from paritygate.experiment.protocol import PHASES

    text = plan(experiment(tmp_path), tau_bench=tmp_path / "none").text()
    for phase in PHASES:
        assert (f" {phase.name}: " in text) == (phase.name != "warm_start"), phase.name


def test_a_margin_that_no_difference_can_reach_is_said(tmp_path: Path):
    tasks = {"split": "test", "tasks": [1, 2, 3, 4]}
    document = copy.deepcopy(FULL) | {"protocol": {"evaluation": tasks}}
    document["eval"]["n_examples"] = 4
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(document), "utf-8")
    assert "more than any difference can be" in plan(load(path), tau_bench=tmp_path / "none").text()
