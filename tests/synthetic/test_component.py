"""The command's part: input before receipts, one new file, and an artifact that a reader can recompute."""

import errno
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import paritygate_reference.spod as reference
from paritygate.errors import BadInputError, Refused
from paritygate.spec import SpecError, Synthetic, load
from paritygate.synthetic import component

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def green(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receipt that fits: whether one does is tested in tests/guard."""
    monkeypatch.setattr(component, "guard", lambda *_: SimpleNamespace(sha256="ab" * 32))
    monkeypatch.setattr(component, "refuse_other_code", lambda *_: None)


def written(spec: Synthetic, path: Path, **options: Any) -> dict[str, Any]:
    component.run(spec, root=ROOT, output=path, quiet=True, **options)
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("green")
def test_the_artifact_says_what_ran_and_what_came_out(spec: Synthetic, tmp_path: Path) -> None:
    facts = written(spec, tmp_path / "new" / "spod.json")
    assert facts["recipe"] == "synthetic:oct20-spod-v1"
    assert facts["seeds"] == [42, 43, 44]
    assert [result["seed"] for result in facts["results"]] == [42, 43, 44]
    assert all(len(result["updates"]) == 3 for result in facts["results"])
    for result in facts["results"]:
        for update in result["updates"]:
            assert update["loss"] > 0
            assert update["gradient_norm"] > 0
            assert 0 <= update["protected_below_floor"] <= update["protected"] <= update["actions"]
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    assert facts["parity_receipt"] == "ab" * 32
    assert len(facts["commit"] or "0" * 40) == 40
    assert "None of them is a success rate" in facts["note"]
    assert not any("success_rate" in key or "accuracy" in key for key in facts["results"][0]["updates"][0])
    for name, digest in facts["sha256"].items():
        assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == digest
    compiled = {path.relative_to(ROOT).as_posix() for path in (ROOT / "impl/paritygate/losses").rglob("*.[ch]pp")}
    assert compiled
    assert compiled | {"impl/paritygate/native/vector.hpp"} <= set(facts["sha256"])
    assert {"impl/run.py", "impl/paritygate/losses/spod/packed.py", "impl/paritygate/synthetic/training.py"} <= set(
        facts["sha256"]
    )


@pytest.mark.usefixtures("green")
def test_the_audit_can_be_recomputed_from_itself(spec: Synthetic, tmp_path: Path) -> None:
    facts = written(spec, tmp_path / "spod.json")
    rows = facts["audit"]
    assert len(rows) == 9
    assert {row["gate"] for row in rows} == {True, False}
    assert {row["success"] for row in rows} == {True, False}
    for row in rows:
        keys = ("student_logits", "teacher_logits")
        action = {key: np.array(row[key]) for key in keys} | {"tokens": np.array(row["action"])}
        expected = reference.success_preserving_loss([{"success": row["success"], "actions": [action]}])
        assert row["gate"] == expected.gate[0][0] == (row["success"] and row["l_q"] < row["l_p"])
        assert row["l_p"] == pytest.approx(expected.student_logprob[0][0], rel=1e-5, abs=0.0)
        assert row["l_q"] == pytest.approx(expected.teacher_logprob[0][0], rel=1e-5, abs=0.0)
        assert row["kl"] == pytest.approx(expected.kl[0][0], rel=1e-4, abs=0.0)
        assert row["floor"] == pytest.approx(expected.floor[0][0], rel=1e-5, abs=0.0)
        if row["gate"]:
            assert row["floor"] == pytest.approx(
                max(math.log(0.5) - row["l_p"], 0) / len(row["action"]), rel=1e-5, abs=0.0
            )
        assert row["action"][-1] == 0
        assert row["public_history"][-1] in range(12, 16)


@pytest.mark.usefixtures("green")
def test_the_same_seed_writes_the_same_bytes_whatever_its_company(spec: Synthetic, tmp_path: Path) -> None:
    names = ("one.json", "two.json")
    one, two = (written(spec, tmp_path / name, seeds="43,42") for name in names)
    for facts in (one, two):
        facts["commit"] = facts["dirty"] = facts["sha256"] = None  # others may commit to this checkout meanwhile
    assert one == two
    alone = written(spec, tmp_path / "alone.json", seeds=[42])
    assert alone["results"] == one["results"][1:]
    assert alone["audit"] == [row for row in one["audit"] if row["seed"] == 42]
    assert alone["spec"]["seeds"] == [42]


@pytest.mark.usefixtures("green")
def test_an_output_is_never_overwritten(
    spec: Synthetic, small: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spod.json"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(BadInputError, match="exists and is never overwritten"):
        component.run(spec, root=ROOT, output=path)
    (tmp_path / "dangling.json").symlink_to(tmp_path / "gone.json")
    with pytest.raises(BadInputError, match="exists and is never overwritten"):
        component.run(spec, root=ROOT, output=tmp_path / "dangling.json")
    monkeypatch.setattr(component, "checked_output", lambda output: output)  # it appears while the seeds run
    with pytest.raises(BadInputError, match="appeared while this ran"):
        component.run(small, root=ROOT, output=path, quiet=True)
    assert path.read_text(encoding="utf-8") == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dangling.json", "spod.json"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "cuda:99"}, "CUDA is unavailable"),
        ({"device": "tpu"}, "cpu or cuda is expected"),
        ({"device": "cuda:x"}, "cpu or cuda is expected"),
        ({"seeds": ""}, "--seeds"),
        ({"seeds": "1,x"}, "--seeds"),
        ({"seeds": "1,1"}, "different whole numbers"),
        ({"seeds": "-1"}, "--seeds"),
        ({"seeds": "4294967296"}, "--seeds"),
        ({"seeds": "1.5"}, "--seeds"),
        ({"output": Path("folder")}, "ends in .json"),
    ],
)
def test_bad_input_is_refused_before_any_receipt_and_touches_nothing(
    spec: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(component, "guard", lambda *_: pytest.fail("the receipt was asked for first"))
    with pytest.raises(BadInputError, match=sentence):
        component.run(spec, root=tmp_path, **{"output": tmp_path / "new" / "spod.json", **options})
    assert not list(tmp_path.iterdir())
    (finding,) = component.plan(spec, **{"output": tmp_path / "spod.json", **options}).facts["findings"]
    assert sentence in finding


def test_without_a_receipt_nothing_runs(spec: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_root: Path, losses: tuple[str, ...], device: str) -> None:
        assert (losses, device) == (spec.losses, "cpu")
        assert "spod" in losses
        raise Refused("no receipt")

    monkeypatch.setattr(component, "guard", refuse)
    with pytest.raises(Refused):
        component.run(spec, root=ROOT, output=tmp_path / "new" / "spod.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_without_cuda_says_so(spec: Synthetic, tmp_path: Path) -> None:
    output = tmp_path / "spod.json"
    command = [sys.executable, "impl/run.py", "--spec", "spec/spod.json", "--device", "cuda", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "CUDA is unavailable" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"updates": 9}, "/updates"),
        ({"updates": 0}, "/updates"),
        ({"recipe": "synthetic:other"}, "/recipe"),
        ({"seeds": [1, 1]}, "/seeds"),
        ({"states_per_episode": {"least": 5, "most": 4}}, "/states_per_episode/least"),
        ({"loss": {"tau0": 0}}, "/loss/tau0"),
        ({"model": {"hidden": 9}}, "/model/hidden"),
        ({"upd": 3}, "/upd"),
    ],
)
def test_a_spec_out_of_bounds_is_refused_by_pointer(tmp_path: Path, change: dict[str, Any], pointer: str) -> None:
    path = tmp_path / "spod.json"
    path.write_text(json.dumps({"recipe": "synthetic:oct20-spod-v1", **change}), encoding="utf-8")
    with pytest.raises(SpecError, match=pointer):
        load(path)


def test_the_shipped_spec_is_the_recipe_with_every_default_written_out(spec: Synthetic, tmp_path: Path) -> None:
    path = tmp_path / "bare.json"
    path.write_text('{"recipe": "synthetic:oct20-spod-v1"}', encoding="utf-8")
    bare = load(path)
    assert {**bare.frozen, "title": ""} == {**spec.frozen, "title": ""}
    assert (spec.updates, spec.seeds) == (3, (42, 43, 44))


@pytest.mark.usefixtures("green")
def test_a_full_disk_is_one_sentence(small: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, *, exclusive: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(component, "write_atomic", full)
    with pytest.raises(BadInputError, match=r"spod\.json cannot be written: No space left on device\."):
        component.run(small, root=ROOT, output=tmp_path / "spod.json", quiet=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("green")
def test_a_device_gives_the_same_bytes_twice_and_the_gates_of_the_cpu(
    device: str, spec: Synthetic, tmp_path: Path
) -> None:
    names = ("once", "again", "cpu")
    once, again, on_cpu = (
        written(spec, tmp_path / f"{name}.json", device="cpu" if name == "cpu" else device) for name in names
    )
    assert once["device"].partition(":")[0] == device
    for facts in (once, again):
        facts["commit"] = facts["dirty"] = facts["sha256"] = None  # others may commit to this checkout meanwhile
    assert json.dumps(once, sort_keys=True) == json.dumps(again, sort_keys=True)
    # Of the first update, where the weights are the same on every device.
    gates = [[(row["episode"], row["state"], row["gate"]) for row in facts["audit"]] for facts in (on_cpu, once)]
    assert gates[0] == gates[1]
