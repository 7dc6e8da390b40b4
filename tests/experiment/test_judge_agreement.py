"""The model judge beside the rules: over items that both judged, absent where the rules are the judge."""

import pytest

from paritygate.experiment.phases.evaluate import agreement_with_rules


def item(judged: tuple[float, float, float] | None, ruled: tuple[float, float, float] | None) -> dict[str, object]:
    names = ("invalid_tool_use", "ungrounded_claims", "upfront_clarification")
    return {
        key: None if scores is None else dict(zip(names, scores, strict=True))
        for key, scores in (("dimensions", judged), ("rules", ruled))
    }


def test_agreement_is_over_the_items_that_both_judged():
    rows = [
        item((1.0, 0.5, 0.0), (1.0, 1.0, 0.0)),
        item((0.0, 0.5, 0.0), (0.5, 1.0, 0.0)),
        item(None, (1.0, 1.0, 1.0)),
        item((0.0, 0.0, 0.0), None),
    ]
    agreement = agreement_with_rules(rows)
    assert agreement is not None
    assert {name: row["n"] for name, row in agreement.items()} == dict.fromkeys(agreement, 2)
    assert agreement["invalid_tool_use"]["mean_abs_difference"] == pytest.approx(0.25)
    assert agreement["invalid_tool_use"]["correlation"] == pytest.approx(1.0)
    assert agreement["ungrounded_claims"]["correlation"] is None  # neither judge varies
    assert agreement["composite"]["mean_abs_difference"] == pytest.approx((0.5 / 3 + 1.0 / 3) / 2)


def test_there_is_none_where_the_rules_are_the_judge():
    assert agreement_with_rules([item((1.0, 1.0, 1.0), None)]) is None
