"""An arm whose loss another repository has: examples/own_loss, proven there, named by its entry point."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import BadInputError, Refused
from paritygate.experiment import audit
from paritygate.experiment.correctness import parity
from paritygate.experiment.run import entry_points
from paritygate.experiment.run.entry_points import ScoredRollout
from paritygate.experiment.step.advantages import group_advantages
from paritygate.spec import Experiment, SpecError, load
from tests.experiment.scaled_spec import brief
from tests.experiment.tiny_spec import ROOT, write_spec
from tests.scripted_service import ScriptedService

NAME = "my_losses:gspo"
LOSS = "src/my_losses/gspo.py"


def with_own_loss(**arm: Any) -> dict[str, Any]:
    """GRPO against GSPO from examples/own_loss; the gates of an arm with a teacher left out."""
    spec = brief()
    text = json.dumps({key: spec[key] for key in ("arms", "restoration_preflight", "protocol")})
    spec |= json.loads(text.replace('"name": "sdpo_token"', '"name": "own"'))
    spec["arms"][1] |= {"loss": NAME} | arm
    spec["arms"][1] = {key: value for key, value in spec["arms"][1].items() if key != "kind" or "kind" in arm}
    checks = spec["activation_gate"]["checks"]
    spec["activation_gate"]["checks"] = [check for check in checks if not check["metric"].startswith("sdpo")]
    spec["protocol"] = spec["protocol"] | {"comparison": {"treatment": "own", "baseline": "grpo"}}
    return spec


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/own_loss elsewhere, with a receipt of a session of its own, and the metadata that pip would install."""
    root = tmp_path_factory.mktemp("own") / "loss"
    clean = shutil.ignore_patterns("__pycache__", ".hypothesis", "parity-*.json")
    shutil.copytree(ROOT / "examples" / "own_loss", root, ignore=clean)
    metadata = root / "src" / "own_loss-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-loss\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[paritygate.losses]\ngspo = my_losses.gspo:advantages\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--losses", "gspo"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "impl")}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert "parity: green, 3 obligations" in done.stdout, done.stdout
    return root


@pytest.fixture
def offered(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository's package, importable as an editable install makes it."""
    monkeypatch.syspath_prepend(repository / "src")
    monkeypatch.setattr(parity, "is_full_run", lambda: False)  # at a full run its parity is shown again: 5 s
    entry_points.load.cache_clear()
    return repository


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("lean")
def test_an_arm_trains_by_a_loss_that_its_own_repository_proves(
    offered: Path, run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    scripted(ScriptedService())
    spec = with_own_loss()
    run_spec(spec)
    run = tmp_path / "run"
    [receipt] = (offered / "receipts").glob("parity-*.json")
    copy = run / "losses" / "my_losses.gspo" / receipt.name
    assert copy.read_bytes() == receipt.read_bytes()
    document = json.loads((run / "receipt.json").read_bytes())["predicate"]["buildDefinition"]
    named = {entry["name"]: entry for entry in document["resolvedDependencies"]}[f"loss {NAME}"]
    assert named["digest"]["sha256"] == receipt.name[len("parity-") : -len(".json")]
    assert {LOSS, "spec/losses.json", "tests/parity/test_gspo.py"} <= named["annotations"]["sources"].keys()
    assert document["internalParameters"]["losses"] == ["grpo", "policy_gradient"]
    groups: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((run / "trajectories").glob("train-own-000*")):
        for line in lines(path):
            groups.setdefault(line["task_index"], []).append(line)
    assert groups
    for group in groups.values():
        composites = [line["judgement"]["composite"] for line in group]
        mean = sum(composites) / len(composites)
        for line, composite in zip(group, composites, strict=True):
            weight = (composite - mean) / (sum(line["mask"]) * len(group))
            assert line["advantages"] == pytest.approx([weight * mask for mask in line["mask"]], rel=1e-12, abs=1e-18)
    exp = load(run / "spec.json")
    assert isinstance(exp, Experiment)
    audit.check_steps(run, exp, audit.losses_of_arms(run, exp))
    (offered / LOSS).write_text((text := (offered / LOSS).read_text()) + "# edited\n")
    try:
        with pytest.raises(Refused, match=rf"{LOSS} was edited since parity was shown for the loss {NAME}"):
            audit.losses_of_arms(run, exp)
    finally:
        (offered / LOSS).write_text(text)


def test_no_run_starts_by_an_edited_or_an_unknown_loss(
    offered: Path, run_spec: Any, scripted: Any, tmp_path: Path
) -> None:
    scripted(ScriptedService())
    text = (offered / LOSS).read_text()
    (offered / LOSS).write_text(text.replace("1 + high", "1 + low"))
    try:
        with pytest.raises(Refused, match=rf"the loss {NAME} of {offered}: {LOSS} was edited since parity") as refused:
            run_spec(with_own_loss())
    finally:
        (offered / LOSS).write_text(text)
    with pytest.raises(BadInputError, match=rf"offers the loss my_losses:dpo in .*; those there are {NAME}") as unknown:
        run_spec(with_own_loss(loss="my_losses:dpo"))
    assert (refused.value.exit_code, unknown.value.exit_code) == (3, 2)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_lies_in_no_proven_repository_is_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a wheel puts it into site-packages: nothing there says by which bytes it was shown."""
    shutil.copytree(repository / "src", tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    with pytest.raises(Refused, match="install it from there with `pip install -e`"):
        entry_points.require(NAME)


@pytest.mark.parametrize(
    ("arm", "place", "sentence"),
    [
        ({"kind": "entry_point", "loss": None}, "/arms/1/loss", "names its loss, as PACKAGE:LOSS"),
        ({"kind": "sdpo_token"}, "/arms/1/loss", "an arm of kind sdpo_token has none, entry_point has"),
        ({"kind": "sdpo_token", "loss": None, "teacher": True}, "/arms/1/teacher", "entry_point has"),
        ({"loss": "gspo"}, "/arms/1/loss", "is not allowed here: pattern"),
    ],
)
def test_what_a_spec_says_of_such_an_arm(arm: dict[str, Any], place: str, sentence: str, tmp_path: Path) -> None:
    exp: Any = load(write_spec(tmp_path, with_own_loss()))
    loaded, taught = exp.arms[1], load(write_spec(tmp_path, with_own_loss(teacher=True))).arms[1]
    assert (loaded.name, loaded.kind, loaded.needs_teacher, exp.entry_points) == ("own", "entry_point", False, (NAME,))
    assert taught.needs_teacher
    with pytest.raises(SpecError) as error:
        load(write_spec(tmp_path, with_own_loss(**arm)))
    assert any(place in line and sentence in line for line in str(error.value).splitlines()), str(error.value)


def advantages_by(loss: Any) -> list[list[float]]:
    composites, masks = [1.0, None, 0.5], [(0, 1, 1), (0, 1), (1, 0)]
    logprobs = [(None, -1.0, -2.0), (None, -1.0), (-3.0, None)]
    none = [None, None, None]
    return group_advantages("entry_point", composites, masks, logprobs, none, clip=5.0, hybrid_weight=0.9, loss=loss)


def test_a_group_is_its_judged_rollouts_and_off_the_mask_there_is_nothing() -> None:
    seen: list[ScoredRollout] = []

    def loss(group: Any) -> list[list[float]]:
        seen.extend(group)
        return [[0.0, 2.0, 3.0], [-4.0, 0.0]]

    assert advantages_by(loss) == [[0.0, 2.0, 3.0], [0.0, 0.0], [-4.0, 0.0]]
    assert [rollout.composite for rollout in seen] == [1.0, 0.5]
    assert (seen[0].mask, seen[0].logprobs[1:], seen[0].teacher_logprobs) == ((0, 1, 1), (-1.0, -2.0), None)
    for wrong, sentence in (
        ([[0.0, 1.0, 1.0]], "gives 1 rows of advantages for 2 rollouts"),
        ([[1.0, 1.0, 1.0], [1.0, 0.0]], "have to be 0 where the mask is 0"),
        ([[0.0, 1.0], [1.0, 0.0]], "gives 2 advantages for 3 tokens"),
        (None, "its loss raised TypeError"),
    ):
        with pytest.raises(ValueError, match=sentence):
            advantages_by(lambda _, wrong=wrong: wrong)
