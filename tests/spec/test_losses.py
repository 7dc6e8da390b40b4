"""spec/losses.json: classes of tolerances expand to the rows that were declared one by one before."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import Refused
from paritygate.spec.losses import load_losses

ROOT = Path(__file__).resolve().parents[2]
BEFORE = Path(__file__).parent / "data" / "losses_before_classes.json"
"""spec/losses.json of commit 28411c4, before tolerances had classes."""

Cell = tuple[str, str, str, str]
ROUNDED: dict[Cell, tuple[float, float]] = {
    ("spod/gradient", "float16", "any", "ordinary"): (8.999999999999999e-08, 9e-08),
    ("spod/gradient", "float16", "any", "near_equal"): (8.999999999999999e-08, 9e-08),
    ("spod/gradient", "float16", "any", "extreme"): (8.999999999999999e-08, 9e-08),
    ("spod/gradient", "bfloat16", "any", "ordinary"): (6.0000001e-08, 6e-08),
    ("spod/gradient", "bfloat16", "any", "near_equal"): (6.0000001e-08, 6e-08),
    ("spod/gradient", "bfloat16", "any", "extreme"): (6.0000001e-08, 6e-08),
    ("spod/gradient", "float32", "any", "ordinary"): (6.0000001e-08, 6e-08),
    ("spod/gradient", "float32", "any", "near_equal"): (6.0000001e-08, 6e-08),
    ("spod/gradient", "float32", "any", "extreme"): (6.0000001e-08, 6e-08),
    ("sdpo/logit_gradient", "float16", "any", "near_equal"): (3.000001e-08, 3e-08),
    ("sdpo/logit_gradient", "float16", "any", "extreme"): (3.006e-08, 3e-08),
}
"""Absolute tolerances rounded since: obligation, dtype, device, regime -> what it was, what it is."""


def root_with(folder: Path, spec: Any) -> Path:
    """A root whose spec/losses.json is `spec`, configured as this tree."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "spec").mkdir()
    (folder / "spec" / "losses.json").write_text(json.dumps(spec))
    return folder


def cells(spec: dict[str, Any]) -> dict[Cell, dict[str, Any]]:
    """Obligation, dtype, device, regime -> the limits declared for it."""
    result: dict[Cell, dict[str, Any]] = {}
    for loss in spec["losses"].values():
        for name, obligation in loss["obligations"].items():
            for row in obligation["tolerances"]:
                limits = dict(row)
                cell = (name, limits.pop("dtype"), limits.pop("device"), limits.pop("regime"))
                assert cell not in result
                result[cell] = limits
    return result


def test_classes_expand_to_the_rows_declared_before(tmp_path: Path) -> None:
    before = load_losses(root_with(tmp_path, json.loads(BEFORE.read_text())))
    assert before == json.loads(BEFORE.read_text()), "rows given in place stay as they are"
    was, now = cells(before), cells(load_losses(ROOT))
    assert was.keys() <= now.keys()
    moved = {
        cell: (limits["atol"], now[cell]["atol"]) for cell, limits in was.items() if limits["atol"] != now[cell]["atol"]
    }
    assert moved == ROUNDED
    assert all({**limits, "atol": now[cell]["atol"]} == now[cell] for cell, limits in was.items())


def test_claims_and_counts_are_those_of_before() -> None:
    now = load_losses(ROOT)["losses"]
    for loss, entry in json.loads(BEFORE.read_text())["losses"].items():
        for name, obligation in entry["obligations"].items():
            kept = now[loss]["obligations"][name]
            assert (kept["claim"], kept["min_comparisons"]) == (obligation["claim"], obligation["min_comparisons"])


def test_every_obligation_here_names_a_class_and_every_class_is_named() -> None:
    spec = json.loads((ROOT / "spec/losses.json").read_text())
    obligations = {name: o for loss in spec["losses"].values() for name, o in loss["obligations"].items()}
    in_place = [name for name, o in obligations.items() if not isinstance(o["tolerances"], str)]
    assert not in_place, f"a class at the top of the file, not rows in place: {', '.join(in_place)}"
    assert {o["tolerances"] for o in obligations.values()} == set(spec["tolerances"])


def small(tolerances: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A spec of one obligation with these `tolerances`, and one class `value` of these rows."""
    obligation = {"claim": "c", "min_comparisons": 1, "tolerances": tolerances}
    toy = {"title": "t", "source": "s", "functions": ["f"], "obligations": {"toy/value": obligation}}
    return {"version": 1, "tolerances": {"value": {"because": "b", "rows": rows}}, "losses": {"toy": toy}}


ROW = {"dtypes": ["float32", "float64"], "regimes": ["ordinary", "large"], "rtol": 1e-6, "atol": 0.0}


def test_a_row_stands_for_each_dtype_in_each_regime(tmp_path: Path) -> None:
    wider = {
        "dtypes": ["float32"],
        "device": "cuda",
        "regimes": ["ordinary"],
        "rtol": 1e-5,
        "atol": 0.0,
        "scale": "max",
    }
    assert cells(load_losses(root_with(tmp_path, small("value", [ROW, wider])))) == {
        **{
            ("toy/value", dtype, "any", regime): {"rtol": 1e-6, "atol": 0.0}
            for dtype in ("float32", "float64")
            for regime in ("ordinary", "large")
        },
        ("toy/value", "float32", "cuda", "ordinary"): {"rtol": 1e-5, "atol": 0.0, "scale": "max"},
    }


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (small("values", [ROW]), "toy/value names the tolerances 'values'; there are value."),
        (small("value", [ROW, {**ROW, "rtol": 1.0}]), "toy/value declares two tolerances for float32 / any / ordinary"),
        (small("value", []), "/tolerances/value/rows"),
        (small("", [ROW]), "/losses/toy/obligations/toy/value/tolerances"),
        (small([], [ROW]), "/losses/toy/obligations/toy/value/tolerances"),
        (small("value", [{**ROW, "dtype": "float32"}]), "/tolerances/value/rows/0"),
        (small("value", [{**ROW, "atol": -1.0}]), "/tolerances/value/rows/0/atol"),
        (small("value", [{**ROW, "atol": 1e308}]), "/tolerances/value/rows/0/atol"),
        (small("value", [{**ROW, "rtol": 1.5}]), "/tolerances/value/rows/0/rtol"),
        (small("value", [{**ROW, "regimes": []}]), "/tolerances/value/rows/0/regimes"),
    ],
)
def test_what_no_spec_of_losses_is(tmp_path: Path, spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as refusal:
        load_losses(root_with(tmp_path, spec))
    assert "spec/losses.json" in str(refusal.value)
    assert sentence in str(refusal.value)
