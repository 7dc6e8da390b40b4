"""`python -m paritygate.harness MODULE`: other losses against the definitions, their mistakes, and the command itself.

The mistakes are those that were measured in other projects (design/022); each is written here in a few lines, so that
no project is needed. Inputs and numbers are the smallest that are known of each.
"""

import importlib.metadata
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from paritygate.harness import Unsupported
from paritygate.harness.conformance import FUNCTIONS, command
from paritygate.harness.conformance.child import facts
from paritygate.harness.conformance.functions import Function
from paritygate.harness.conformance.rows import rows_of
from paritygate.harness.conformance.smallest import smallest
from paritygate.harness.implementation import losses_under_test
from tests.counts import SOAK

ROOT = Path(__file__).resolve().parents[2]
losses: Any = losses_under_test(
    "paritygate.losses", ("sdpo", "grpo", "policy_gradient", "kl_estimators", "averaging", "spod")
)
OPTION = "{}, all, token_mean"


def function(name: str) -> Function:
    return next(one for one in FUNCTIONS if one.name == name)


def rows(name: str, call: Callable[..., Any]) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {"plain": [], "stress": [], "promises": []}
    for kind, row in rows_of(function(name), call):
        results[kind].append(row)
    return results


def one(results: list[dict[str, Any]], **wanted: str) -> dict[str, Any]:
    """The only row with these values."""
    (row,) = [row for row in results if all(row.get(key) == value for key, value in wanted.items())]
    return row


def only(call: Callable[..., Any], **served: str) -> Callable[..., Any]:
    """The function, for these options alone: a row less is a second less."""

    def narrowed(*arrays: Any, **options: Any) -> Any:
        if any(name in options and options[name] != value for name, value in served.items()):
            raise Unsupported("not asked here")
        return call(*arrays, **options)

    return narrowed


def by_kl_div(student: Any, teacher: Any, mask: Any, *, divergence: str, aggregation: str, **options: Any) -> Any:
    """As many trainers write it: torch's kl_div, multiplied with the mask."""
    if aggregation != "token_mean" or options:
        raise Unsupported("the mean over tokens of the whole vocabulary")
    p, q = log_softmax(student, -1), log_softmax(teacher, -1)
    if divergence == "jsd":
        raise Unsupported("no jsd")
    pair = (p, q) if divergence == "forward_kl" else (q, p)
    values = kl_div(*pair, reduction="none", log_target=True).sum(-1)
    return (values * mask).sum() / mask.sum()


def test_our_own_losses_agree_everywhere() -> None:
    for one_function in FUNCTIONS:
        home = getattr(losses, one_function.module)
        served = {} if SOAK else {"aggregation": "token_mean"}
        results = rows(one_function.name, only(getattr(home, one_function.name.partition(".")[2]), **served))
        outcomes = {row["outcome"] for row in itertools.chain(*results.values())}
        assert outcomes <= {"agrees", "unsupported"}, one_function.name


def test_plain_agreement_is_reported_as_agreement_whatever_the_stresses_do() -> None:
    results = rows("sdpo.logit_loss", by_kl_div)
    assert {row["outcome"] for row in results["plain"]} == {"agrees", "unsupported"}
    for divergence, dtype in itertools.product(("forward_kl", "reverse_kl"), ("float64", "float32")):
        row = one(results["plain"], option=OPTION.format(divergence), dtype=dtype)
        assert (row["outcome"], row["factor"], row["smallest"]) == ("agrees", None, None)
    assert one(results["stress"], stress="masked NaN", option=OPTION.format("forward_kl"))["outcome"] == "departs"


def test_an_entry_that_the_teacher_excludes() -> None:
    """0 log 0 is 0: the forward KL of [0, 0] to a teacher of [0, -inf] is log 2, the reverse KL is +inf."""
    results = rows("sdpo.logit_loss", by_kl_div)["stress"]
    row = one(results, stress="excluded teacher entry", option=OPTION.format("forward_kl"))
    small = row["smallest"]
    assert (row["outcome"], row["departs_in"]) == ("departs", {"value": "NaN"})
    assert small["input"]["student_logits"] == [[[0.0, 0.0]]]
    assert sorted(map(str, small["input"]["teacher_logits"][0][0])) == ["-inf", "0.0"]
    assert (small["theirs"]["value"], small["defined"]["value"]) == ("nan", pytest.approx(math.log(2.0)))
    row = one(results, stress="excluded teacher entry", option=OPTION.format("reverse_kl"))
    assert row["outcome"] == "agrees", "+inf is what it is"


def test_a_constant_factor_is_named() -> None:
    def twice(*arrays: Any, **options: Any) -> Any:
        return 2.0 * losses.sdpo.logit_loss(*arrays, **options)

    served = only(twice, divergence="jsd", aggregation="token_mean", tail="no")  # tail stands for every truncation
    row = one(rows("sdpo.logit_loss", served)["plain"], option=OPTION.format("jsd"), dtype="float64")
    assert row["outcome"] == "scaled"
    assert row["factor"] == pytest.approx(2.0)


def test_a_mean_where_the_sum_belongs_is_no_constant_factor() -> None:
    def mean(logprobs: Any, sampler: Any, advantages: Any) -> Any:
        return losses.policy_gradient.importance_sampling_loss(logprobs, sampler, advantages) / logprobs.numel()

    row = one(rows("policy_gradient.importance_sampling_loss", mean)["plain"], dtype="float64")
    assert (row["outcome"], row["factor"]) == ("departs", None)


def test_a_cross_entropy_as_the_forward_kl_departs_in_the_value_alone() -> None:
    """Of [0, 1] to itself it is 0.5822, where the KL is 0; the gradient is right."""

    def cross_entropy(student: Any, teacher: Any, mask: Any, *, divergence: str, aggregation: str) -> Any:
        if (divergence, aggregation) != ("forward_kl", "token_mean"):
            raise Unsupported("forward KL, mean over tokens")
        return -((teacher.softmax(-1) * student.log_softmax(-1)).sum(-1) * mask).sum() / mask.sum()

    row = one(rows("sdpo.logit_loss", cross_entropy)["plain"], option=OPTION.format("forward_kl"), dtype="float64")
    assert (row["outcome"], row["departs_in"]) == ("departs", {"value": "another number"})
    logits = torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
    value = cross_entropy(logits, logits, torch.ones(1, 1), divergence="forward_kl", aggregation="token_mean")
    assert float(value) == pytest.approx(0.5822, abs=1e-4)
    assert row["smallest"]["defined"]["value"] == 0.0


def k3(student: Any, teacher: Any, mask: Any, *, divergence: str, aggregation: str) -> Any:
    """k3 of each token, weighted by the student's probability, used as a loss."""
    if (divergence, aggregation) != ("reverse_kl", "token_mean"):
        raise Unsupported("reverse KL, mean over tokens")
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    values = (log_p.exp().detach() * ((log_q - log_p).exp() - 1 - (log_q - log_p))).sum(-1)
    return (values * mask).sum() / mask.sum()


def test_k3_as_a_loss_has_another_gradient_than_the_reverse_kl() -> None:
    row = one(rows("sdpo.logit_loss", k3)["plain"], option=OPTION.format("reverse_kl"), dtype="float64")
    assert (row["outcome"], row["departs_in"]) == ("departs", {"gradient": "another number"})
    arrays = {
        "student_logits": np.array([[[1.0, 0.0, -1.0]]]),
        "teacher_logits": np.array([[[0.0, 0.5, -0.2]]]),
        "mask": np.ones((1, 1), dtype=np.int64),
    }
    defined = function("sdpo.logit_loss").define(arrays, {"divergence": "reverse_kl"})
    np.testing.assert_allclose(defined.gradient, [[[0.3520, -0.2376, -0.1144]]], atol=5e-5)


def test_a_mean_over_rows_that_are_masked_too() -> None:
    """One of two rows masked, student 0, teacher [1, 0]: 0.0555 where 0.1109 is defined."""

    def over_all_rows(student: Any, teacher: Any, mask: Any, *, divergence: str, aggregation: str) -> Any:
        if (divergence, aggregation) != ("forward_kl", "sequence_mean"):
            raise Unsupported("forward KL, mean over sequences")
        values = kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()

    results = rows("sdpo.logit_loss", over_all_rows)
    assert all(row["outcome"] in ("agrees", "unsupported") for row in results["plain"])
    small = one(results["stress"], stress="empty row")["smallest"]
    assert small["theirs"]["value"] == pytest.approx(0.0555, abs=5e-5)
    assert small["defined"]["value"] == pytest.approx(0.1109, abs=5e-5)


def test_an_impossible_token_that_counts_as_certain() -> None:
    """Student log-probabilities [0, -inf], teacher [.5, .5]: 1.3863 where log 2 is defined."""

    def without_infinities(student: Any, teacher: Any, mask: Any, *, divergence: str, aggregation: str) -> Any:
        if (divergence, aggregation) != ("reverse_kl", "token_sum"):
            raise Unsupported("reverse KL, summed")
        log_p = torch.nan_to_num(student.log_softmax(-1), neginf=0.0)
        values = (log_p.exp() * (log_p - teacher.log_softmax(-1)).detach()).sum(-1)
        return torch.where(mask == 1, values, 0.0).sum()

    results = rows("sdpo.logit_loss", without_infinities)
    assert all(row["outcome"] in ("agrees", "unsupported") for row in results["plain"])
    small = one(results["stress"], stress="excluded student entry")["smallest"]
    assert small["theirs"]["value"] == pytest.approx(1.3863, abs=5e-5)
    assert small["defined"]["value"] == pytest.approx(0.6931, abs=5e-5)


def test_advantages_in_float32_and_a_group_of_one() -> None:
    def advantages(rewards: Any) -> Any:
        rewards = rewards.float()
        return rewards if len(rewards) == 1 else rewards - rewards.mean()

    results = rows("grpo.group_mean_advantage", advantages)
    assert {row["outcome"] for row in results["plain"]} == {"agrees"}
    assert one(results["promises"], promise="float64 is computed in float64")["outcome"] == "departs"
    large = one(results["stress"], stress="large rewards")["smallest"]
    assert (large["theirs"]["value"], large["defined"]["value"]) == ([0.0, 0.0], [-0.5, 0.5])
    single = one(results["stress"], stress="group of one")["smallest"]
    assert (single["theirs"]["value"], single["defined"]["value"]) == ([1.0], [0.0])


def test_a_log_ratio_that_is_clamped() -> None:
    def clamped(
        logprobs: Any, sampler: Any, advantages: Any, clip_low_threshold: float, clip_high_threshold: float
    ) -> Any:
        ratio = (logprobs - sampler).clamp(-20.0, 20.0).exp()
        return -torch.minimum(
            ratio * advantages, ratio.clamp(clip_low_threshold, clip_high_threshold) * advantages
        ).sum()

    results = rows("policy_gradient.ppo_loss", clamped)
    assert {row["outcome"] for row in results["plain"]} == {"agrees"}
    small = one(results["stress"], stress="large log ratio")["smallest"]
    assert small["theirs"]["value"] == pytest.approx(math.exp(20.0))
    assert small["defined"]["value"] > math.exp(25.0)


def test_ties_are_a_promise_and_no_arithmetic() -> None:
    """Which of two equal entries the top k keeps is a convention: kept apart from the numbers."""

    def last_of_equals(student: Any, teacher: Any, mask: Any, **options: Any) -> Any:
        flipped = [logits.flip(-1) for logits in (student, teacher)]
        return losses.sdpo.logit_loss(*flipped, mask, **options)

    results = rows("sdpo.logit_loss", only(last_of_equals, divergence="jsd", aggregation="token_mean", top_k_of="no"))
    assert {row["outcome"] for row in results["stress"] if row["stress"] == "ties in the top k"} == {"agrees"}
    assert one(results["promises"], promise="ties in the top k go to the lowest index")["outcome"] == "departs"


def test_the_smallest_input_keeps_what_departs() -> None:
    arrays = {"x": np.array([[3.7, -2.2, 0.4], [1.5, 9.0, -1.0]]), "mask": np.array([[1, 0, 1], [1, 1, 1]])}
    small = smallest(arrays, {"x": "BT", "mask": "BT"}, lambda shrunk: bool((shrunk["x"] > 5.0).any()))
    assert small["x"].tolist() == [[9.0]]


# The command

TWICE = '''"""Twice the loss. Install: pip install nothing-of-this-name."""
from types import SimpleNamespace
import torch
from paritygate.harness import Unsupported

def importance_sampling_loss(logprobs, sampler_logprobs, advantages):
    return -2.0 * ((logprobs - sampler_logprobs).exp() * advantages).sum()

def group_mean_advantage(rewards):
    return rewards - rewards.mean()

policy_gradient = SimpleNamespace(importance_sampling_loss=importance_sampling_loss)
grpo = SimpleNamespace(group_mean_advantage=group_mean_advantage)
'''


def judge(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "paritygate.harness", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT / "impl"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_table_json_page_and_a_program_that_needs_the_project_alone(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    done = judge(tmp_path, "twice", "--json", "report.json")
    assert done.returncode == 3, done
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"module", "versions", "digests", "plain", "stress", "promises"}
    assert report["versions"]["torch"] == torch.__version__
    row = one(report["plain"], loss="policy_gradient.importance_sampling_loss", dtype="float64")
    assert (row["outcome"], row["factor"]) == ("scaled", pytest.approx(2.0))
    assert one(report["plain"], loss="grpo.group_mean_advantage", dtype="float64")["outcome"] == "agrees"
    assert {row["loss"] for row in report["plain"]} == {
        "policy_gradient.importance_sampling_loss",
        "grpo.group_mean_advantage",
    }
    page = (tmp_path / "report.html").read_text()
    assert "scaled by 2" in page
    assert "http" not in page
    assert "scaled by 2" in done.stdout
    (tmp_path / "program.py").write_text(row["snippet"])
    (tmp_path / "twice.py").unlink()
    without_us = f"import sys; sys.modules['paritygate'] = None; exec(open({str(tmp_path / 'program.py')!r}).read())"
    shown = subprocess.run([sys.executable, "-c", without_us], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown
    theirs = json.loads(shown.stdout.splitlines()[0].removeprefix("theirs: "))
    assert theirs == pytest.approx(row["smallest"]["theirs"]["value"])


def test_known_departures_have_reasons(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    entry = {"module": "twice", "loss": "policy_gradient.*", "in": "plain", "reason": "they count each token twice"}
    (tmp_path / "known.json").write_text(json.dumps({"departures": [entry, {"in": "no such", "reason": "none"}]}))
    done = judge(tmp_path, "twice", "--known", "known.json")
    assert done.returncode == 0, done
    assert "known: they count each token twice" in done.stdout
    assert 'known departure that does not depart: {"in": "no such"' in done.stdout
    del entry["reason"]
    (tmp_path / "known.json").write_text(json.dumps({"departures": [entry]}))
    done = judge(tmp_path, "twice", "--known", "known.json")
    assert (done.returncode, done.stderr) == (2, "paritygate.harness: known.json: /departures/0 has no reason.\n")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "there is no module theirs on the path."),
        (
            '"""Theirs. Install: pip install nowhere==1."""\nimport nowhere\n',
            "theirs needs nowhere, which is not installed. Install: pip install nowhere==1.",
        ),
        ("1 / 0\n", "theirs does not import (ZeroDivisionError: division by zero)."),
        ("", "theirs offers none of sdpo.logit_loss"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "its process was ended by signal SIGSEGV"),
    ],
)
def test_a_module_that_does_not_import_is_one_sentence(tmp_path: Path, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "theirs.py").write_text(text)
    done = judge(tmp_path, "theirs")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert sentence in done.stderr


@pytest.mark.parametrize(
    ("limit", "value", "text", "sentence"),
    [
        ("SECONDS", 1.0, "import time\ntime.sleep(60)\n", "it took more than 1 seconds"),
        ("MEMORY", 1 << 20, "import time\ntime.sleep(60)\n", "it used more than 0 GB"),
    ],
)
def test_time_and_memory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, text: str, sentence: str
) -> None:
    assert (command.SECONDS, command.MEMORY) == (300.0, 2 * 1024**3)
    monkeypatch.setattr(command, limit, value)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "slow.py").write_text(text)
    options = SimpleNamespace(module="slow", json=None, html=None, known=None)
    with pytest.raises(command.BadInputError, match=sentence):
        command.conformance(options)


def test_a_checkout_has_the_version_of_no_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on the path that is imported in place of an installed package of that name is held by its own files."""
    folder = tmp_path / "tqdm"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (tmp_path / "adapter_of_a_checkout.py").write_text("import tqdm\nimport mpmath\n")
    monkeypatch.syspath_prepend(tmp_path)
    shadow = ModuleType("tqdm")
    shadow.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, "tqdm", shadow)
    result = facts(ModuleType("adapter_of_a_checkout"))
    assert result["versions"]["tqdm"] == "checkout"
    assert result["versions"]["mpmath"] == importlib.metadata.version("mpmath")
    # sha256 of "__init__.py " and the sha256 of an empty file
    assert result["digests"]["tqdm"] == "05bf8857b51ea94cbad55bf8b87dbfdb3d42122fb7ba3e18e3949767817d4fbc"


def test_a_clamped_k3_and_one_that_cancels() -> None:
    """exp(30) - 31 = 1.0687e13 where a clamp of the log ratio at 10 gives less; float32 has no exp(1e-4) - 1 - 1e-4."""

    def clamped(logprobs: Any, reference: Any, mask: Any = None) -> Any:
        log_r = (reference - logprobs).clamp(-10.0, 10.0)
        return log_r.exp() - 1.0 - log_r

    results = rows("kl_estimators.k3", clamped)
    assert all(row["outcome"] == "agrees" for row in results["plain"])
    far = one(results["stress"], stress="large log ratio")
    assert far["outcome"] == "departs"
    given = {"logprobs": np.array([[-31.0]]), "reference_logprobs": np.array([[-1.0]])}
    defined = function("kl_estimators.k3").define(given, {})
    assert float(defined.value.item()) == pytest.approx(1.0686e13, rel=1e-4)
    near = one(results["stress"], stress="near-equal")
    assert (near["outcome"], near["dtype"]) == ("departs", "float32")
    assert one(results["stress"], stress="masked NaN")["outcome"] == "departs"


def test_k1_of_the_other_sign_is_a_factor_of_minus_one() -> None:
    row = one(rows("kl_estimators.k1", lambda p, q: q - p)["plain"], dtype="float64")
    assert (row["outcome"], row["factor"]) == ("scaled", -1.0)


def test_a_mean_over_all_tokens_where_three_levels_are_defined() -> None:
    row = one(rows("averaging.three_level_mean", lambda values, *_: values.mean())["plain"], dtype="float64")
    assert row["outcome"] == "departs"
    small = row["smallest"]
    action, episode = (np.array(small["input"][name]) for name in ("action_index", "episode_index"))
    assert len(action) == 3  # no two tokens weigh differently
    assert sorted(np.bincount(action).tolist()) in ([1, 2], [1, 1, 1]), (action, episode)


def test_a_gate_that_protects_at_a_tie() -> None:
    """Teacher equal to student in an episode that succeeded: nothing is protected, the KL is 0, so is the loss."""

    def protects(
        student: Any, teacher: Any, actions: Any, action: Any, episode: Any, success: Any, **options: Any
    ) -> Any:
        if bool((student == teacher).all()):
            n = torch.bincount(action).double()
            log_p = student.double().log_softmax(-1)[torch.arange(len(actions)), actions]
            l_p = torch.zeros(len(n), dtype=torch.float64).index_add(0, action, log_p)
            floor = options["floor_weight"] * (math.log(options["tau0"]) - l_p).clamp(min=0.0) / n
            weight = 1.0 / (torch.bincount(episode)[episode] * len(torch.bincount(episode))).double()
            return (floor * weight).sum()
        return losses.spod.success_preserving_loss(student, teacher, actions, action, episode, success, **options)

    results = rows("spod.success_preserving_loss", protects)
    assert all(row["outcome"] == "agrees" for row in results["plain"])
    row = one(results["stress"], stress="tied gate", option="tau0 0.5, floor weight 1")
    assert (row["outcome"], row["smallest"]["defined"]["value"]) == ("departs", pytest.approx(0.0, abs=1e-15))
    assert row["smallest"]["theirs"]["value"] > 0.0
