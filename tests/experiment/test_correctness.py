"""The correctness preflight: recorded numbers are what their sources give, and a wrong path is refused (exit 3)."""

import asyncio
import dataclasses
import importlib.metadata
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paritygate.errors import Refused
from paritygate.experiment.correctness import paths as correctness
from paritygate.experiment.correctness.comparison import compare_values, recorded
from paritygate.receipts import PhaseChain
from paritygate.spec import load
from paritygate.spec.experiment import CorrectnessPath
from paritygate_reference import sdpo as reference
from tests.experiment import model_gradients, stub_guard
from tests.experiment.scaled_spec import brief
from tests.experiment.tiny_spec import ROOT
from tests.golden.golden_numbers import golden, inputs, sampled_gradient
from tests.scripted_service import ScriptedService

PATHS = {path.id: path for path in load(ROOT / "spec" / "sdpo.json").correctness_preflight.paths}
GRPO, SDPO = PATHS["grpo_via_new_advantage_path"], PATHS["sdpo_token_advantage"]


def numbers(values: list[Any]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def test_recorded_reference_numbers_are_the_references() -> None:
    """A run cannot import the reference, so its numbers are recorded; here they are computed again."""
    cases = recorded("sdpo_token")["token_advantage"]
    assert len(cases) == 8
    for case in cases:
        teacher, student = numbers(case["teacher_logprobs"]), numbers(case["student_logprobs"])
        again = reference.token_advantage(teacher, student, case["mask"], clip=case["clip"])
        assert [float(value) for value in again] == case["advantages"]


def test_both_paths_pass_as_they_are() -> None:
    comparisons = [*correctness.grpo_path(GRPO), *correctness.sdpo_path(SDPO)]
    assert len(comparisons) > 30
    assert all(comparison.passed for comparison in comparisons)


@pytest.mark.parametrize("path", [GRPO, SDPO], ids=lambda path: path.id)
def test_loss_and_gradient_through_the_embedded_model(path: CorrectnessPath) -> None:
    comparisons = asyncio.run(model_gradients.model_comparisons(path))
    assert all(comparison.passed for comparison in comparisons)
    for gradient in (comparison for comparison in comparisons if comparison.tolerance.endswith("gradient")):
        assert gradient.values > 1000
        assert gradient.cosine is not None
        assert gradient.cosine > 0.999999


def test_every_tolerance_of_the_spec_is_compared_with() -> None:
    """A tolerance that nothing is held to promises what is not done: both paths use all four of theirs."""
    for path, check in ((GRPO, correctness.grpo_path), (SDPO, correctness.sdpo_path)):
        used = {comparison.tolerance for comparison in check(path)}
        assert used == set(path.tolerances), path.id


def test_the_official_codes_numbers_are_those_of_the_golden_file() -> None:
    """Recorded beside the code from tests/golden: the same inputs, the same loss, its gradient by the logprob."""
    case, x = recorded("sdpo_official"), inputs()
    [theirs] = [c for c in golden("sdpo_losses_official")["cases"] if c["name"] == case["case"]]
    assert case["loss"] == theirs["loss"]
    # exp and log of NumPy differ in the last bit between vector classes (AVX2, AVX-512).
    np.testing.assert_array_max_ulp(np.array(case["student_logprobs"]), x["student_logprobs"], maxulp=2)
    np.testing.assert_array_max_ulp(np.array(case["teacher_logprobs"]), x["teacher_logprobs"], maxulp=2)
    np.testing.assert_array_equal(case["mask"], x["distilled"])
    sampled = sampled_gradient(-np.array(case["gradient"]))
    np.testing.assert_allclose(sampled, theirs["grad_student_logits"], rtol=0, atol=3e-16)


@pytest.mark.parametrize(("installed", "live"), [("0.6.1", True), ("0.6.2", False), (None, False)])
def test_only_the_pinned_cookbook_counts_as_live(
    installed: str | None, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert correctness.cookbook_installed() is live


MISTAKES = {
    "standard deviation left in": lambda rows: [[3.0 * a for a in row] for row in rows],
    "sign turned": lambda rows: [[-a for a in row] for row in rows],
    "a constant added": lambda rows: [[a + 0.01 for a in row] for row in rows],
    "shifted by a token": lambda rows: [[0.0, *row[:-1]] for row in rows],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_advantage_path_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = correctness.group_advantages

    def wrong(*group: Any, **options: Any) -> list[list[float]]:
        return MISTAKES[mistake](right(*group, **options))

    monkeypatch.setattr(correctness, "group_advantages", wrong)
    for check, path in ((correctness.grpo_path, GRPO), (correctness.sdpo_path, SDPO)):
        assert not all(comparison.passed for comparison in check(path)), path.id


def test_a_wrong_loss_through_the_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over positions in place of the sum: the mistake that one known backend makes."""
    right = model_gradients.TokenSequence.datum

    def averaged(sequence: Any) -> Any:
        count = len(sequence.tokens) - 1
        return right(dataclasses.replace(sequence, advantages=[a / count for a in sequence.advantages]))

    monkeypatch.setattr(model_gradients.TokenSequence, "datum", averaged)
    assert not any(comparison.passed for comparison in asyncio.run(model_gradients.model_comparisons(GRPO)))


def test_a_failed_comparison_refuses_the_run(
    run_spec: Any, scripted: Any, lean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = correctness.group_advantages
    monkeypatch.setattr(
        correctness, "group_advantages", lambda *a, **o: [[2 * x for x in row] for row in right(*a, **o)]
    )
    service = scripted(ScriptedService())
    with pytest.raises(Refused, match="grpo_via_new_advantage_path, compute_advantages case 0: differs by") as refused:
        run_spec(brief())
    assert refused.value.exit_code == 3
    assert not service.samples


@pytest.mark.parametrize(
    ("actual", "expected", "passes"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0001], [1.0, 2.0], True),
        ([1.0, 2.001], [1.0, 2.0], False),
        ([math.nan, 2.0], [1.0, 2.0], False),
        ([1.0], [1.0, 2.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1e-6, -1e-6], [-1e-6, 1e-6], False),  # within atol, and pointing the other way
    ],
)
def test_a_comparison(actual: list[float], expected: list[float], passes: bool) -> None:
    assert compare_values(GRPO, "baseline_gradient", "here", actual, expected).passed is passes


@pytest.mark.skipif(importlib.util.find_spec("tinker_cookbook") is None, reason="tinker-cookbook is not installed")
def test_the_installed_cookbook_gives_the_recorded_numbers() -> None:
    from paritygate.experiment.correctness.cookbook import live_advantages

    for case in recorded("cookbook")["compute_advantages"]:
        assert live_advantages(case["rewards"]) == case["advantages"]


def test_a_receipt_of_a_killed_process_is_replaced(
    run_spec: Any, scripted: Any, lean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parity may be shown anew between the kill and --resume: a run has one receipt, that of the phase that ended."""
    scripted(ScriptedService())

    def killed(_: CorrectnessPath) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(correctness, "grpo_path", killed)
        with pytest.raises(KeyboardInterrupt):
            run_spec(brief(), until="correctness_preflight")
    [first] = (tmp_path / "run").glob("parity-*.json")
    monkeypatch.setitem(stub_guard.SESSION, "tests", 2)
    stub_guard.install(tmp_path, monkeypatch)
    run_spec(brief(), resume=True, until="correctness_preflight")
    [second] = (tmp_path / "run").glob("parity-*.json")
    assert second.name != first.name
    assert PhaseChain(tmp_path / "run").record("correctness_preflight")["facts"]["parity"] in second.name
