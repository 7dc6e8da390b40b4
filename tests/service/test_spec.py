"""spec/service.json: its schema, one check for each obligation, and the answer to a file that cannot be used."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from paritygate.errors import BadInputError
from paritygate.service.checks import CHECKS
from paritygate.service.obligations import default_path, load
from paritygate.service.outcome import STEP

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_keeps_its_schema_and_has_the_checks_that_exist() -> None:
    value = json.loads(default_path().read_bytes())
    jsonschema.Draft202012Validator(json.loads((ROOT / "spec/schema/service.schema.json").read_bytes())).validate(value)
    assert set(value["obligations"]) == set(CHECKS)
    assert {entry["tolerance"] for entry in value["obligations"].values()} <= set(value["tolerances"])


def test_the_tolerance_of_steps_is_the_one_that_checks_go_by() -> None:
    assert {entry.bound for entry in load().entries if entry.tolerance == "step"} == {STEP}


def test_obligations_come_after_what_they_stand_on() -> None:
    seen: set[str] = set()
    for entry in load().entries:
        assert set(entry.needs) <= seen, entry.name
        seen.add(entry.name)


def test_what_a_need_stands_on_is_a_need_the_first_cause_before_others() -> None:
    needs = {entry.name: entry.needs for entry in load().entries}
    assert needs["sums/losses"] == ("gradient/cross_entropy", "sums/split", "gradient/importance_sampling")


def test_only_takes_groups_and_names_and_what_they_stand_on() -> None:
    chosen = load().only(["gradient/ppo", "value"])
    assert {entry.name for entry in chosen.entries if entry.group == "gradient"} == {
        "gradient/ppo",
        "gradient/cross_entropy",
    }
    in_two_steps = load().only(["gradient/cross_entropy_above_one"])
    assert [entry.name for entry in in_two_steps.entries][:2] == ["gradient/cross_entropy", "optimiser/clip_off"]
    with pytest.raises(BadInputError, match="'gradients' is no group or obligation"):
        load().only(["gradients"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON that can be used"),
        ("[]", "no object `obligations`"),
        ('{"obligations": {"a/b": {}}}', "a/b cannot be used"),
        (
            '{"tolerances": {"t": {"bound": 1, "unit": "u"}}, "obligations": {"a/b": {"claim": "", "tolerance": "x"}}}',
            "x",
        ),
        (
            '{"tolerances": {"t": {"bound": 1, "unit": "u"}}, '
            '"obligations": {"a/b": {"claim": "c", "tolerance": "t", "needs": ["q"]}}}',
            "stands on 'q'",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "o.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInputError, match=words):
        load(path)


def test_the_package_needs_neither_torch_nor_the_sdk_to_be_imported() -> None:
    """Everything but the SDK and NumPy is hidden, and the SDK is imported on first use."""
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "impl")!r})
for name in ("torch", "tinker", "transformers", "jsonschema", "rfc8785", "jinja2", "rich", "paritygate_reference"):
    sys.modules[name] = None
import numpy
start = time.process_time()
import paritygate.service.__main__, paritygate.service.runner, paritygate.service.receipt
print(time.process_time() - start)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import site; site.main()\n" + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5
