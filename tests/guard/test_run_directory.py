"""A run directory that was touched after the run: verification names the file, offline."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2

from paritygate.errors import Refused
from paritygate.experiment.run.replay import verdict
from paritygate.receipts import PhaseChain, canonical, provenance, require_parity, verify_run, write_atomic
from paritygate.receipts.files import digest
from paritygate.receipts.signature import run_signer
from tests.counts import soak
from tests.guard.run_directory import LOSSES, build_run, new_chain, recount
from tests.guard.small_tree import Tree
from tests.guard.test_forged_receipts import new_key, sign
from tests.guard.test_receipt import forged, validate_statement


@pytest.fixture(scope="module")
def finished(tree_template: Tree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tree_template, tmp_path_factory.mktemp("run") / "finished")


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def check(tree: Tree, run_dir: Path) -> dict:
    return verify_run(run_dir, root=tree.root, stands_on=lambda _: LOSSES, recompute=verdict)


def refused(tree: Tree, run_dir: Path, sentence: str) -> None:
    with pytest.raises(Refused) as refusal:
        check(tree, run_dir)
    assert sentence in str(refusal.value)
    assert refusal.value.exit_code == 3


def files(run_dir: Path) -> list[Path]:
    return sorted(path for path in run_dir.rglob("*") if path.is_file())


def test_a_finished_run_verifies_at_another_place(tree_template: Tree, run_dir: Path) -> None:
    (run_dir / "lock").write_text("")  # the lock file of a finished run says nothing
    receipt = check(tree_template, run_dir)
    named = [entry["name"] for entry in receipt["predicate"]["runDetails"]["byproducts"]]
    assert named == [
        path.relative_to(run_dir).as_posix() for path in files(run_dir) if path.name not in ("receipt.json", "lock")
    ]


def test_the_receipt_is_slsa_provenance(run_dir: Path) -> None:
    statement = json.loads((run_dir / "receipt.json").read_bytes())
    validate_statement(statement)
    predicate = statement["predicate"]
    message = json_format.ParseDict(predicate, provenance_pb2.Provenance())
    assert message.build_definition.build_type == "urn:paritygate:run:v1"
    assert message.build_definition.resolved_dependencies[0].name == "parity receipt"


def test_one_byte_of_any_file(tree_template: Tree, run_dir: Path) -> None:
    rng = random.Random(0)
    for path in files(run_dir):
        data = path.read_bytes()
        for _ in range(soak(quick=3, full=60)):
            at, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            refused(tree_template, run_dir, path.name)
        path.write_bytes(data)
    check(tree_template, run_dir)


def test_every_byte_of_the_receipt(tree_template: Tree, run_dir: Path) -> None:
    path = run_dir / "receipt.json"
    data = path.read_bytes()
    for at in range(0, len(data), soak(quick=97, full=3)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        refused(tree_template, run_dir, "receipt.json")


def test_any_file_cut_short_or_removed(tree_template: Tree, run_dir: Path) -> None:
    for path in files(run_dir):
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        refused(tree_template, run_dir, path.name)
        path.unlink()
        refused(tree_template, run_dir, path.name)
        path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["extra.txt", "phases/05-report.json", "trajectories/x/y.jsonl", "parity-x.json", ".x.tmp"]
)
def test_a_file_added(tree_template: Tree, run_dir: Path, name: str) -> None:
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).write_text("")
    refused(tree_template, run_dir, f"{name} was added since the run ended")


def test_an_empty_folder_and_a_lock_that_holds_something(tree_template: Tree, run_dir: Path) -> None:
    (run_dir / "trajectories" / "more").mkdir()
    refused(tree_template, run_dir, "trajectories/more is an empty folder")
    (run_dir / "trajectories" / "more").rmdir()
    (run_dir / "lock").write_text("a message")
    refused(tree_template, run_dir, "lock holds something: the lock of a run is an empty file")
    (run_dir / "lock").write_text("")
    check(tree_template, run_dir)


def test_a_signature_over_a_run(tree: Tree, run_dir: Path, tmp_path: Path) -> None:
    key = new_key(tmp_path / "key")
    assert run_signer(tree.root, run_dir) is None
    sign(run_dir / "receipt.json", key, namespace="paritygate-run")
    check(tree, run_dir)  # the signature is no file of the run
    with pytest.raises(Refused, match=r"receipt.json.sig is not by a key in spec/allowed_signers"):
        run_signer(tree.root, run_dir)
    with (tree.root / "spec" / "allowed_signers").open("a") as file:
        file.write(f'reviewer@localhost namespaces="paritygate-run" {key.with_suffix(".pub").read_text()}')
    assert run_signer(tree.root, run_dir) == "reviewer@localhost"
    with (run_dir / "receipt.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(Refused, match=r"does not verify for the bytes of receipt.json"):
        run_signer(tree.root, run_dir)


def test_a_symbolic_link(tree_template: Tree, run_dir: Path, tmp_path: Path) -> None:
    shutil.move(run_dir / "items.jsonl", tmp_path / "items.jsonl")
    (run_dir / "items.jsonl").symlink_to(tmp_path / "items.jsonl")
    refused(tree_template, run_dir, "items.jsonl is a symbolic link")


def test_two_phases_swapped(tree_template: Tree, run_dir: Path) -> None:
    second, third = sorted((run_dir / "phases").iterdir())[1:3]
    one, other = second.read_bytes(), third.read_bytes()
    second.write_bytes(other)
    third.write_bytes(one)
    refused(tree_template, run_dir, second.name)
    for path, data, name in ((second, other, "02-evaluate.json"), (third, one, "03-train.json")):
        path.unlink()
        (run_dir / "phases" / name).write_bytes(canonical(json.loads(data) | {"index": int(name[:2])}))
    refused(tree_template, run_dir, "phases/02-")
    with pytest.raises(Refused, match="does not follow the phase before it"):
        PhaseChain(run_dir)


def test_a_phase_removed_from_the_chain(run_dir: Path) -> None:
    next(iter((run_dir / "phases").glob("02-*"))).unlink()
    with pytest.raises(Refused, match=r"03-evaluate.json is not phase 2 of the chain"):
        PhaseChain(run_dir)


def test_a_record_edited_breaks_the_next_link(run_dir: Path) -> None:
    path = run_dir / "phases" / "02-train.json"
    path.write_bytes(path.read_bytes().replace(b'"done"', b'"good"'))
    with pytest.raises(Refused, match=r"03-evaluate.json does not follow the phase before it"):
        PhaseChain(run_dir)


def test_what_a_phase_vouched_for_may_grow_but_not_change(run_dir: Path) -> None:
    chain = PhaseChain(run_dir)
    path = run_dir / "metrics.jsonl"
    data = path.read_bytes()
    path.write_bytes(data + b'{"step":3}\n')
    chain.verify()
    path.write_bytes(data.replace(b'"step":1', b'"step":9'))
    with pytest.raises(Refused, match=r"metrics.jsonl was changed since the phase train ended: its first 11 bytes"):
        chain.verify()
    path.unlink()
    with pytest.raises(Refused, match=r"metrics.jsonl is missing"):
        chain.verify()


def test_a_chain_read_again_goes_on(tmp_path: Path) -> None:
    new_chain(tmp_path / "run", {"a": 1})
    chain = PhaseChain(tmp_path / "run")
    assert chain.completed == ["spec_preflight", "train"]
    assert chain.record("train") == {"outcome": "done"}
    with pytest.raises(KeyError):
        chain.record("evaluate")
    with pytest.raises(ValueError, match="has a receipt for the phase train already"):
        chain.append("train", {})
    with pytest.raises(ValueError, match="is not a plain file"):
        chain.append("evaluate", {}, ["../elsewhere"])
    assert chain.append("evaluate", {}) == chain.head == PhaseChain(tmp_path / "run").head


# A forger who makes every digest consistent again -------------------------------------------------------------------


def test_an_item_edited_and_everything_recounted(tree_template: Tree, run_dir: Path) -> None:
    path = run_dir / "items.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"reward":1', b'"reward":0', 1))
    recount(tree_template, run_dir)
    refused(tree_template, run_dir, "verdict.json is not the verdict that the per-item results give")


def test_a_verdict_edited_and_everything_recounted(tree_template: Tree, run_dir: Path) -> None:
    path = run_dir / "verdict.json"
    verdict = json.loads(path.read_bytes())
    path.write_bytes(canonical(verdict | {"outcome": "validated" if verdict["outcome"] != "validated" else "failed"}))
    recount(tree_template, run_dir)
    refused(tree_template, run_dir, "verdict.json is not the verdict that the per-item results give")


def test_a_verdict_removed_and_everything_recounted(tree_template: Tree, run_dir: Path) -> None:
    write_atomic(
        run_dir / "phases" / "04-decide.json",
        (run_dir / "phases" / "04-decide.json").read_bytes().replace(b'"verdict.json"', b'"report.html"'),
    )
    (run_dir / "verdict.json").unlink()
    recount(tree_template, run_dir)
    refused(tree_template, run_dir, "verdict.json is missing: a finished run has a verdict")


def test_another_tree(tree: Tree, run_dir: Path) -> None:
    check(tree, run_dir)
    tree.edit("impl/paritygate/losses/toy.py", '"""A toy loss', '"""The toy loss')
    refused(tree, run_dir, "impl/paritygate/losses/toy.py was edited since parity was shown for the run")


def test_a_run_and_its_proof_that_both_say_nothing_of_the_settings(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is not equal to nothing: either may have had any."""
    true = provenance.environment
    monkeypatch.setattr(
        provenance, "environment", lambda device: {k: v for k, v in true(device).items() if k != "settings"}
    )

    def without(statement: dict) -> None:
        part = statement["predicate"]["configuration"][0]
        del part["annotations"]["settings"]
        part["digest"]["sha256"] = digest(part["annotations"])

    forged(tree, without)
    refused(tree, build_run(tree, tmp_path / "run"), "and receipt.json say nothing of settings")


def test_a_run_is_ended_by_the_code_that_began_it(tree: Tree, run_dir: Path) -> None:
    require_parity(tree.root, LOSSES, "cpu", resumed=run_dir)
    tree.edit("impl/paritygate/losses/toy.py", '"""A toy loss', '"""The toy loss')
    for path in tree.receipts():
        path.unlink()
    assert "parity: green" in tree.parity()
    require_parity(tree.root, LOSSES, "cpu")
    with pytest.raises(Refused, match=r"toy.py was edited since the run in .* was begun"):
        require_parity(tree.root, LOSSES, "cpu", resumed=run_dir)


def test_a_spec_that_stands_on_other_losses(tree_template: Tree, run_dir: Path) -> None:
    with pytest.raises(Refused, match="names other losses than"):
        verify_run(run_dir, root=tree_template.root, stands_on=lambda _: ["toy"], recompute=verdict)


def test_an_unfinished_run(tree_template: Tree, tmp_path: Path) -> None:
    new_chain(tmp_path / "run", {"a": 1})
    refused(tree_template, tmp_path / "run", "receipt.json is missing")
    refused(tree_template, tmp_path / "none", "receipt.json is missing")
    assert os.listdir(tmp_path) == ["run"]
