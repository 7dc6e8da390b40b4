"""What is said of a service with a mistake in it: what it does, with both numbers, and on the page the cause first.

The mistakes are put into the embedded server of this process, each for one test; tests/mutants has more.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from paritygate.server.engine import loop
from paritygate.server.engine.losses import LossInputs
from paritygate.server.engine.training import AdamParams, Datum, Pass
from paritygate.server.errors import RequestError
from paritygate.server.model.lora import Adapter, LoraSpec
from paritygate.server.sessions import trainers
from paritygate.server.wire import training as wire
from paritygate.service import receipt
from paritygate.service.checks import CHECKS
from paritygate.service.lab import Lab
from paritygate.service.obligations import load
from paritygate.service.outcome import judge
from paritygate.service.report import Report, page, table
from paritygate.service.runner import Result, run_one
from tests.counts import SOAK

NUMBER = r"([-\d.e]+)"
Edit = Callable[[Adapter, AdamParams], AdamParams]


def steps_with(monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    """Each step is taken with what `edit` makes of its parameters."""
    right = trainers.adam_step
    monkeypatch.setattr(trainers, "adam_step", lambda adapter, params: right(adapter, edit(adapter, params)))


def decay_dropped(adapter: Adapter, params: AdamParams) -> AdamParams:
    del adapter
    return replace(params, weight_decay=0.0)


def decay_of_a_alone(adapter: Adapter, params: AdamParams) -> AdamParams:
    for name, parameter in adapter.parameters():
        if name.endswith("lora_A"):
            parameter.detach().mul_(1 - params.learning_rate * params.weight_decay)
    return replace(params, weight_decay=0.0)


def decay_added_up(adapter: Adapter, params: AdamParams) -> AdamParams:
    """0.5 twice takes half of the weights that there were at first, twice."""
    decay = params.learning_rate * params.weight_decay
    for _, parameter in adapter.parameters():
        first = parameter.__dict__.setdefault("first", parameter.detach().clone())
        parameter.detach().sub_(decay * first)
    return replace(params, weight_decay=0.0)


def clipped_at_one(adapter: Adapter, params: AdamParams) -> AdamParams:
    del adapter
    return replace(params, grad_clip_norm=params.grad_clip_norm or 1.0)


@pytest.mark.parametrize(
    ("name", "edit", "sentence", "numbers"),
    [
        ("decay", decay_dropped, rf"leaves the adapter with {NUMBER} of its effect .*; 0 is right", [1.0]),
        ("decay_all", decay_of_a_alone, rf"0\.9 leaves {NUMBER} times the effect .* 0\.25 is right", [0.5]),
        ("decay_twice", decay_added_up, rf"0\.5 twice leaves the adapter with {NUMBER} of its effect", [0.0]),
    ],
)
def test_what_a_step_does_is_said(
    name: str, edit: Edit, sentence: str, numbers: list[float], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_with(monkeypatch, edit)
    measured = CHECKS[f"optimiser/{name}"](lab)
    sentence_match = re.search(sentence, measured.because)
    assert sentence_match, measured.because
    assert [float(number) for number in sentence_match.groups()] == pytest.approx(numbers, abs=0.01)
    assert judge(measured, 0.005).outcome == "departs"


def test_what_a_hidden_clip_leaves_of_a_gradient_is_said(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []

    def clipped(adapter: Adapter, params: AdamParams) -> AdamParams:
        squares = [float(p.grad.square().sum()) for _, p in adapter.parameters() if p.grad is not None]
        norms.append(sum(squares) ** 0.5)
        return clipped_at_one(adapter, params)

    steps_with(monkeypatch, clipped)
    because = CHECKS["optimiser/clip_off"](lab).because
    sentence_match = re.search(
        rf"^without grad_clip_norm the step of 200 times .*: it is that of {NUMBER} times the weights", because
    )
    assert sentence_match, because
    largest = max(norms)  # 200 times the weights; clipping leaves a norm of 1
    assert largest > 1
    assert float(sentence_match[1]) == pytest.approx(200 / largest, rel=0.02)


def test_flags_without_effect_are_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def unembedding_as_well(**given: Any) -> LoraSpec:
        return LoraSpec(**{**given, "unembed": True})

    monkeypatch.setattr(wire, "LoraSpec", unembedding_as_well)
    measured = CHECKS["state/flags"](lab)
    assert measured.figure == 1
    assert re.search(rf"train_mlp=False by {NUMBER}, train_unembed=False by 0 \(", measured.because)
    assert measured.because.endswith("without effect: train_unembed")


def proved(lab: Lab, *chosen: str) -> list[tuple[str, str, str]]:
    """Name, outcome and sentence of each row of the page, from above, and of what those chosen stand on."""
    obligations = load().only(chosen)
    results: dict[str, Result] = {}
    for entry in obligations.entries:
        results[entry.name] = run_one(lab, entry, results)
    report = Report("http://127.0.0.1:1", "tiny", ["tiny"], "0", "0" * 64, {}, results=list(results.values()))
    row = r'<tr><td><code>([^<]*)</code>.*?<td class="(\w+)">.*?</td><td>([^<]*)(?:<details>.*?)?</td></tr>'
    return re.findall(row, page(report, obligations), re.DOTALL)


def passes_with(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Adapter, list[Datum]], list[Datum]]) -> None:
    """Each pass is begun with what `edit` makes of its datums."""
    begin = Pass.__init__

    def begun(self: Pass, network: Any, adapter: Adapter, data: list[Datum], *rest: Any, **options: Any) -> None:
        begin(self, network, adapter, edit(adapter, data), *rest, **options)

    monkeypatch.setattr(Pass, "__init__", begun)


def last_call_alone(adapter: Adapter, data: list[Datum]) -> list[Datum]:
    for _, parameter in adapter.parameters():
        parameter.grad = None
    return data


def mean_over_datums(adapter: Adapter, data: list[Datum]) -> list[Datum]:
    del adapter
    shares = [{name: values / len(data) for name, values in d.inputs.tensors.items()} for d in data]
    inputs = [LossInputs(d.inputs.target_tokens, share) for d, share in zip(data, shares, strict=True)]
    return [Datum(d.tokens, each) for d, each in zip(data, inputs, strict=True)]


def test_where_weights_have_no_size_nothing_is_said_of_a_datum_twice(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both divided: a datum's weights by their sum, the call by its number; once, twice and doubled are one step."""

    def divided(adapter: Adapter, data: list[Datum]) -> list[Datum]:
        weights = [d.inputs.of("weights") for d in data]
        inputs = [
            LossInputs(d.inputs.target_tokens, {"weights": w / max(float(w.sum()), 1e-9)})
            for d, w in zip(data, weights, strict=True)
        ]
        return mean_over_datums(adapter, [Datum(d.tokens, each) for d, each in zip(data, inputs, strict=True)])

    passes_with(monkeypatch, divided)
    judged = judge(CHECKS["sums/duplicate"](lab), 0.005)
    assert judged.outcome == "undecided"
    assert "on each datum twice" in judged.because


@pytest.mark.parametrize(
    ("edit", "cause", "contrast", "consequence"),
    [
        (last_call_alone, "sums/split", "that after the second call alone", "gradient/cancels"),
        pytest.param(
            *(mean_over_datums, "sums/duplicate", "that on each once", "gradient/several_targets"),
            marks=pytest.mark.skipif(not SOAK, reason="ten steps to say which multiple it is: PARITYGATE_SOAK=1"),
        ),
    ],
)
def test_what_a_sum_is_instead_comes_before_what_stands_on_it(
    edit: Any, cause: str, contrast: str, consequence: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes_with(monkeypatch, edit)
    first, *others = proved(lab, cause, consequence)
    assert first[:2] == (cause, "departs")
    assert float(re.search(rf", and {NUMBER} from {contrast}$", first[2])[1]) < 1e-4  # type: ignore[index]
    (row,) = [row for row in others if row[0] == consequence]
    assert row[1] == "undecided"
    assert row[2].endswith(f"it stands on {cause}, which departs")


def test_a_hidden_top_k_is_the_cause_of_what_stands_on_draws(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    right = loop.draw
    monkeypatch.setattr(
        loop,
        "draw",
        lambda logits, params, *rest: right(
            logits.masked_fill(logits < torch.topk(logits, 50).values[-1], -torch.inf), params, *rest
        ),
    )
    rows = {
        name: (place, outcome, because) for place, (name, outcome, because) in enumerate(proved(lab, "sampling/top_p"))
    }
    assert rows["sampling/distribution"][:2] == (0, "departs")
    assert "hit 50 different tokens" in rows["sampling/distribution"][2]
    assert rows["sampling/top_p"][1] == "undecided"
    assert rows["sampling/top_p"][2].endswith("it stands on sampling/distribution, which departs")


def test_a_key_that_is_quoted_in_a_refusal_is_in_nothing_that_is_written(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a part of it, where the text is cut in its middle."""
    key = str(lab.connection.api_key)

    def refuse(_: Any) -> Any:
        raise RequestError(f"{'no ' * 95}{key} {key}", 422)

    monkeypatch.setattr(trainers, "loss_config", refuse)
    asked = load().only(["value/ppo"])
    result = run_one(lab, asked.entries[0], {})
    assert result.outcome == "refused"
    assert "no no [key]" in result.because
    report = Report("http://127.0.0.1:8000", "m", ["m"], "0.38.0", asked.sha256, {}, asdict(lab.noise))
    report.settings, report.results, report.time = asdict(lab.settings), [result], "2026-12-01T00:00:00+00:00"
    for text in (table([result]), page(report, asked), str(report.to_json()), str(receipt.receipt(report, asked))):
        assert "no no" in text
        assert not any(key[i : i + 5] in text for i in range(4, len(key) - 4))
