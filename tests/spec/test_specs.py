"""The specs that ship: the experiment as it was asked for, pinned, and at the size of a laptop."""

import inspect
import json
from pathlib import Path
from typing import get_args

import pytest

from paritygate.errors import Refused
from paritygate.losses import sdpo
from paritygate.spec import Arm, ArmKind, Experiment, load, schema
from paritygate.spec.pins import PINS, TAU_BENCH_DATABASE_SHA256, is_pinned, unknown_pins
from paritygate.spec.schema import load_schema, spec_folder
from paritygate_reference import sdpo as reference

SPECS = spec_folder()
AS_ASKED = Path(__file__).with_name("sdpo_as_asked.json")


def differences(one: object, other: object, place: str = "") -> set[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() | other.keys()
        return {
            difference for key in keys for difference in differences(one.get(key), other.get(key), f"{place}/{key}")
        }
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return {difference for index, (a, b) in pairs for difference in differences(a, b, f"{place}/{index}")}
    return set() if one == other and type(one) is type(other) else {place}


def experiment(path: Path) -> Experiment:
    spec = load(path)
    assert isinstance(spec, Experiment)
    return spec


def test_the_experiment_as_asked_is_accepted_and_unresolved():
    spec = experiment(AS_ASKED)
    assert set(spec.unresolved) == {
        "/dataset/name",
        *(f"/correctness_preflight/paths/{i}/{k}_revision" for i in (0, 1) for k in ("baseline", "reference")),
    }


def test_the_pinned_experiment_differs_from_the_one_asked_for_in_its_revisions_only():
    pinned = SPECS / "sdpo.json"
    asked_for = json.loads(AS_ASKED.read_text("utf-8"))
    assert differences(asked_for, json.loads(pinned.read_text("utf-8"))) == set(experiment(AS_ASKED).unresolved)
    assert experiment(pinned).unresolved == ()


def test_the_dataset_says_the_same_but_for_its_commit():
    asked_for, pinned = experiment(AS_ASKED).dataset.name, experiment(SPECS / "sdpo.json").dataset.name
    assert pinned.replace(f"@{PINS['tau-bench'].revision};", ", pinned commit;") == asked_for


def test_what_the_prose_says_is_written_out_in_the_frozen_spec():
    frozen = experiment(AS_ASKED).frozen
    prose = json.loads(AS_ASKED.read_text("utf-8"))
    assert frozen["protocol"]["rollout"] == {
        "tasks_per_step": 4,
        "rollouts_per_task": 4,
        "max_turns": 12,
        "max_tokens_per_turn": 512,
        "temperature": 1.0,
    }
    for sentence in (
        "Max 12 agent turns per episode, 512 tokens per turn, temperature 1.0",
        "clipped to [-5,5]",
        ">= 0.8",
    ):
        assert sentence in prose["method"]
    assert frozen["protocol"]["advantage"]["clip"] == 5.0
    assert frozen["protocol"]["advantage"]["sibling_threshold"] == 0.8
    for served in ("user", "judge"):
        assert f"served {frozen['protocol'][served]['model']}" in prose["method"]
    assert [arm["kind"] for arm in frozen["arms"]] == ["grpo", "sdpo_token"]
    assert frozen["protocol"]["comparison"] == {"treatment": "sdpo_token", "baseline": "grpo"}
    assert frozen["feasibility"] is None


def test_the_training_tasks_are_the_first_80_of_the_seeded_shuffle():
    chosen = experiment(AS_ASKED).protocol.train.indices(500)
    assert len(chosen) == 80
    assert chosen[:8] == (419, 459, 130, 431, 370, 26, 201, 56)  # random.Random(0).shuffle(list(range(500)))
    assert {24, 27, 431} <= set(chosen)  # gold-failing tasks: flagged, not dropped


def test_the_local_experiment_is_the_same_protocol_on_disjoint_tasks():
    spec = experiment(SPECS / "sdpo-local.json")
    warm = spec.protocol.warm_start
    assert warm is not None
    parts = [warm.tasks, spec.protocol.train, spec.protocol.evaluation]
    assert [part.split for part in parts] == ["train"] * 3
    chosen = [set(part.indices(500)) for part in parts]
    assert sum(map(len, chosen)) == len(set.union(*chosen)) == warm.tasks.count + 16 + spec.eval.n_examples
    assert all(part.why for part in parts)
    full = experiment(SPECS / "sdpo.json")
    assert spec.adam == full.adam
    assert spec.decision_rule.criteria == full.decision_rule.criteria
    assert spec.correctness_preflight == full.correctness_preflight
    gates = [(check.metric, check.min, check.max) for check in spec.activation_gate.checks]
    assert gates == [(check.metric, check.min, check.max) for check in full.activation_gate.checks]


@pytest.mark.parametrize("name", ["experiment", "synthetic", "prices"])
def test_every_object_of_every_schema_is_closed(name: str):
    from jsonschema import Draft202012Validator

    schema = load_schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"

    def visit(node: object, place: str) -> None:
        if isinstance(node, dict):
            if node.get("type") in ("object", ["object", "null"]):
                assert node["additionalProperties"] is False or "pattern" in node["propertyNames"], place
            for key, child in node.items():
                visit(child, f"{place}/{key}")
        elif isinstance(node, list):
            for index, child in enumerate(node):
                visit(child, f"{place}/{index}")

    visit(schema, "")


COOKBOOK = PINS["tinker-cookbook"].token
SDPO = PINS["sdpo-official"].token


@pytest.mark.parametrize(
    ("revision", "pinned"),
    [
        (COOKBOOK, True),
        (SDPO, True),
        ("tree:reference", True),
        (f"tree:reference (float64); {SDPO} (the official code)", True),
        (f"{COOKBOOK}, or a later one", False),
        (f"{COOKBOOK} pinned at run time", False),
        (f"{COOKBOOK}; the same", False),
        (f"commit {SDPO}", False),
        (SDPO[:-1], False),
        (SDPO.upper(), False),
        ("tinker-cookbook==0.6.1", False),
        (f"{SDPO}\n", False),
        ("tree:reference (a) (b)", False),
        ("", False),
    ],
)
def test_a_revision_is_pinned_when_it_is_a_list_of_pins_and_nothing_else(revision: str, pinned: bool):
    assert is_pinned(revision) is pinned
    assert not (pinned and unknown_pins(revision))


def test_an_experiment_stands_on_the_losses_of_its_arms():
    assert experiment(SPECS / "sdpo.json").losses == ("grpo", "policy_gradient", "sdpo")
    assert load(SPECS / "spod.json").losses == ("averaging", "spod")
    losses = json.loads((SPECS / "losses.json").read_text("utf-8"))["losses"]
    for kind in get_args(ArmKind):
        arm = Arm("a", "", kind, 1e-4, 0, 0.9, 20)
        assert "policy_gradient" in arm.losses
        assert set(arm.losses) <= set(losses)
        assert arm.needs_teacher == ("sdpo" in arm.losses)


def test_pinned_digests_stand_in_one_table_only():
    root = SPECS.parent
    digests = {pin.sha256 or pin.revision for pin in PINS.values()} | {TAU_BENCH_DATABASE_SHA256}
    holders = {
        str(path.relative_to(root))
        for path in (root / "impl").rglob("*.py")
        if any(digest in path.read_text("utf-8") for digest in digests)
    }
    assert holders == {"impl/paritygate/spec/pins.py"}


@pytest.mark.parametrize("name", ["sdpo.json", "sdpo-local.json", "spod.json"])
def test_a_frozen_spec_freezes_to_itself(name: str, tmp_path: Path):
    frozen = dict(load(SPECS / name).frozen)
    copy = tmp_path / "spec.json"
    copy.write_text(json.dumps(frozen), "utf-8")
    assert load(copy).frozen == frozen


def test_the_wheel_carries_the_schemas_where_the_loader_looks():
    """pyproject puts spec/ into paritygate/spec/data, the folder that is taken where there is no checkout."""
    import tomllib

    project = tomllib.loads((SPECS.parent / "pyproject.toml").read_text("utf-8"))
    targets = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert targets == {"spec": "paritygate/spec/data"}


def test_without_a_checkout_the_installed_copy_is_read(tmp_path: Path):
    """The package as a wheel lays it out, in a folder of its own: it finds its own data."""
    import shutil
    import subprocess
    import sys

    package = tmp_path / "site" / "paritygate"
    shutil.copytree(SPECS.parent / "impl" / "paritygate" / "spec", package / "spec")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(SPECS.parent / "impl" / "paritygate" / name, package / name)
    shutil.copytree(SPECS, package / "spec" / "data")
    code = "from paritygate.spec import load; print(load(__import__('sys').argv[1]).title)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(AS_ASKED)],
        cwd=tmp_path / "site",
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == experiment(AS_ASKED).title


@pytest.mark.parametrize("content", [b"", b"{", b'{"type": "objekt"}', b"\xff"], ids=str)
def test_a_damaged_schema_is_refused_by_name(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "schema").mkdir()
    (tmp_path / "schema" / "experiment.schema.json").write_bytes(content)
    monkeypatch.setattr(schema, "spec_folder", lambda: tmp_path)
    for cached in (schema.load_schema, schema._validator):
        monkeypatch.setattr(schema, cached.__name__, cached.__wrapped__)
    with pytest.raises(Refused, match=r"experiment\.schema\.json"):
        schema.violations("experiment", {})


def test_the_defaults_of_an_advantage_are_those_of_the_losses() -> None:
    """The schema writes them out where a spec leaves them; the losses and their definition have them as arguments."""
    schema_defaults = {
        name: entry["default"]
        for name, entry in load_schema("experiment")["$defs"]["protocol"]["properties"]["advantage"][
            "properties"
        ].items()
        if "default" in entry
    }
    for package in (sdpo, reference):
        clip = inspect.signature(package.token_advantage).parameters["clip"].default
        sibling = inspect.signature(package.select_sibling).parameters
        assert (clip, sibling["threshold"].default) == (
            schema_defaults["clip"],
            schema_defaults["sibling_threshold"],
        )
    assert schema_defaults["clip"] == 5.0
