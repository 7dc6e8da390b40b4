"""The parity receipt itself: its shape, what it holds against random edits, and how fast it is checked."""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement

from paritygate.errors import Refused
from paritygate.receipts import canonical, read_parity_receipt, require_parity, write_parity_receipt
from paritygate.receipts.environment import KERNELS
from paritygate.receipts.files import digest
from paritygate.receipts.parity import by_likeness
from paritygate.receipts.subjects import subjects
from tests.counts import soak
from tests.guard.small_tree import ROOT, Tree


def validate_statement(statement: dict) -> None:
    """Hold a statement to the in-toto-attestation package: the envelope, and every resource descriptor."""
    parsed = json_format.ParseDict(statement, Statement([], "", {}).pb)
    Statement.copy_from_pb(parsed).validate()
    for descriptor in parsed.subject:
        ResourceDescriptor.copy_from_pb(descriptor).validate()


def test_the_receipt_is_an_in_toto_test_result(tree_template: Tree) -> None:
    statement = json.loads(tree_template.receipts()[0].read_bytes())
    validate_statement(statement)
    result = json_format.ParseDict(statement["predicate"], test_result_pb2.TestResult())
    assert result.result == "PASSED"
    assert list(result.passed_tests) == ["other/sign", "other/value", "toy/sign", "toy/value"]
    for descriptor in result.configuration:
        ResourceDescriptor.copy_from_pb(descriptor).validate()
    assert (
        json_format.MessageToDict(result, preserving_proto_field_name=False)["configuration"][0]["name"]
        == "environment"
    )


def test_it_says_what_was_shown_and_with_what(tree_template: Tree) -> None:
    receipt = read_parity_receipt(tree_template.receipts()[0])
    assert receipt.subjects == subjects(tree_template.root)
    assert {"spec/losses.json", "spec/allowed_signers", "pyproject.toml", "constraints.txt"} <= receipt.subjects.keys()
    value = receipt.part("obligations")["toy/value"]
    assert (value["comparisons"], value["cells"][0]["oracle"]) == (30, "reference")
    assert 0.0 <= value["worst_margin"] <= 1.0
    assert receipt.part("hypothesis")["derandomized"] is True
    assert receipt.part("session")["dtypes"] == ["float64"]
    assert receipt.part("installed")["numpy"] != "absent"


def test_a_seed_is_recorded(bare: Tree) -> None:
    bare.parity("-p", "_hypothesis_pytestplugin", "--hypothesis-seed", "7")
    receipt = read_parity_receipt(bare.receipts()[0])
    hypothesis = receipt.part("hypothesis")
    assert (hypothesis["derandomized"], hypothesis["seed"]) == (False, "7")


@pytest.mark.parametrize("path", sorted((ROOT / "spec" / "schema").glob("*.schema.json")), ids=lambda path: path.name)
def test_every_schema_is_one(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(path.read_bytes()))


def test_the_spec_of_the_losses_keeps_its_schema(tree_template: Tree) -> None:
    schema = json.loads((ROOT / "spec" / "schema" / "losses.schema.json").read_bytes())
    for root in (ROOT, tree_template.root):
        jsonschema.validate(json.loads((root / "spec" / "losses.json").read_bytes()), schema)


def test_random_single_bytes_flipped(tree: Tree) -> None:
    """A byte anywhere among the subjects or in the receipt: refused, and the sentence names the file."""
    rng = random.Random(1)
    (receipt,) = tree.receipts()
    names = [*subjects(tree.root), *[str(receipt.relative_to(tree.root))] * 8]
    for _ in range(soak(quick=100, full=500)):
        path = tree.root / rng.choice(names)
        data = path.read_bytes()
        if not data:
            continue
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        with pytest.raises(Refused) as refusal:
            require_parity(tree.root, ["toy"], "cpu")
        assert path.name in str(refusal.value) or "spec/losses.json" in str(refusal.value)
        path.write_bytes(data)
    require_parity(tree.root, ["toy", "other"], "cpu")


def spoilt(value: Any) -> Iterator[Any]:
    """Every copy of a JSON value in which one key is misspelt, or one value is of another kind."""
    if isinstance(value, dict):
        for key, inner in value.items():
            rest = {k: v for k, v in value.items() if k != key}
            yield rest | {key + "-": inner}
            yield from (rest | {key: other} for other in spoilt(inner))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in spoilt(inner))
    yield from ((), {}, None) if isinstance(value, str) else ("x", [], None)


def test_a_spec_of_the_losses_of_another_form(tree: Tree) -> None:
    """No traceback, whatever stands there: refused, and the sentence names the file."""
    path = tree.root / "spec" / "losses.json"
    right = path.read_bytes()
    for wrong in [*map(json.dumps, spoilt(json.loads(right))), "", "[" * 100_000, "\0"]:
        path.write_text(wrong)
        with pytest.raises(Refused) as refusal:
            require_parity(tree.root, ["toy"], "cpu")
        assert "spec/losses.json" in str(refusal.value), wrong
    path.write_bytes(right)
    for name in ("losses", "parity-receipt"):
        schema = tree.root / "spec" / "schema" / f"{name}.schema.json"
        right = schema.read_bytes()
        for wrong in (right.replace(b'"type"', b'"tyqe"', 1), right.replace(b'"object"', b'"objekt"', 1), right[:-9]):
            schema.write_bytes(wrong)
            tree.refused(schema.name)
        schema.write_bytes(right)
    require_parity(tree.root, ["toy"], "cpu")


def test_every_byte_of_the_receipt_flipped(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    data = receipt.read_bytes()
    for at in range(0, len(data), soak(quick=101, full=7)):
        receipt.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(Refused, match="was edited or cut short"):
            require_parity(tree.root, ["toy"], "cpu")


@pytest.mark.parametrize("place", ["subject", "predicate", "configuration", "annotations"])
def test_a_field_that_the_schema_does_not_know(tree: Tree, place: str) -> None:
    (receipt,) = tree.receipts()
    statement = json.loads(receipt.read_bytes())
    target = {
        "subject": statement["subject"][0],
        "predicate": statement["predicate"],
        "configuration": statement["predicate"]["configuration"][0],
        "annotations": statement["predicate"]["configuration"][0]["annotations"],
    }[place]
    target["more"] = "x"
    receipt.unlink()
    write_parity_receipt(tree.root, statement)
    with pytest.raises(Refused, match=r"does not keep spec/schema/parity-receipt.schema.json at /"):
        require_parity(tree.root, ["toy"], "cpu")


def forged(tree: Tree, edit: Callable[[dict], object]) -> Path:
    """The tree's receipt, edited, under the name of its new digest."""
    (receipt,) = tree.receipts()
    statement = json.loads(receipt.read_bytes())
    receipt.unlink()
    edit(statement)
    return write_parity_receipt(tree.root, statement)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda s: s["predicate"]["passedTests"].pop(), "other obligations were met than it has results for"),
        (lambda s: s["subject"].append(s["subject"][0]), "names a subject twice"),
        (lambda s: s["subject"].reverse(), "out of order"),
        (lambda s: s["subject"].remove(next(e for e in s["subject"] if e["name"] == "installed")), "other versions"),
        (lambda s: s["predicate"]["configuration"][4]["digest"].update(sha256="0" * 64), "'obligations' does not have"),
    ],
)
def test_a_receipt_that_contradicts_itself(tree: Tree, edit: Callable[[dict], object], sentence: str) -> None:
    forged(tree, edit)
    with pytest.raises(Refused, match=sentence):
        require_parity(tree.root, ["toy"], "cpu")


@pytest.mark.parametrize("key", ["settings", *KERNELS])
def test_a_receipt_of_before_something_was_bound_is_read_and_does_not_hold(tree: Tree, key: str) -> None:
    """As the committed ones of before `settings`: what it says nothing of is refused, whatever is so here."""

    def without(statement: dict) -> None:
        part = statement["predicate"]["configuration"][0]
        del part["annotations"][key]
        part["digest"]["sha256"] = digest(part["annotations"])

    path = forged(tree, without)
    assert key not in read_parity_receipt(path).part("environment")
    tree.refused_here(f"{path.name} was shown with nothing said of it")


def test_many_old_receipts_do_not_slow_it_and_the_likest_gives_the_reason(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    statement = json.loads(receipt.read_bytes())
    for number in range(100):
        for entry in statement["subject"][: 3 + number % 5]:
            entry["digest"]["sha256"] = f"{number:064x}"
        write_parity_receipt(tree.root, statement)
    tree.edit("impl/paritygate/losses/toy.py", '"""A toy loss', '"""The toy loss')
    start = time.process_time()
    with pytest.raises(Refused, match=rf"losses/toy.py was edited since parity was shown \({receipt.name}\)"):
        require_parity(tree.root, ["toy"], "cpu")
    assert time.process_time() - start < 2.0
    tree.edit("impl/paritygate/losses/toy.py", '"""The toy loss', '"""A toy loss')
    assert require_parity(tree.root, ["toy"], "cpu").path == receipt


def test_of_equally_likely_receipts_an_edit_goes_before_an_addition_and_then_the_newest(tree: Tree) -> None:
    """The tree is shown, train.py is added and shown, edited and shown, and edited once more."""
    (first,) = tree.receipts()
    statement = json.loads(first.read_bytes())
    paths, arguments = [first], statement["predicate"]["configuration"][3]
    assert arguments["name"] == "session"
    arguments["annotations"]["arguments"] = ["-q", "--losses", "toy"]
    arguments["digest"]["sha256"] = digest(arguments["annotations"])
    for number in range(8):
        entry = {"name": "train.py", "digest": {"sha256": f"{number:064x}"}}
        subject = sorted([*statement["subject"], entry], key=lambda entry: entry["name"])
        paths.append(write_parity_receipt(tree.root, statement | {"subject": subject}))
        os.utime(paths[-1], (number, number))
    (tree.root / "train.py").write_text("# the third text\n")
    ranked = by_likeness(tree.root, subjects(tree.root))
    assert ranked == paths[8:4:-1]
    with pytest.raises(Refused, match=r"^train.py was edited since .*: run `pytest --losses toy` and try again\.$"):
        require_parity(tree.root, ["toy"], "cpu")


def test_a_good_receipt_holds_whatever_lies_beside_it(tree: Tree) -> None:
    (receipt,) = tree.receipts()
    (receipt.parent / f"parity-{'0' * 64}.json").write_bytes(canonical({"not": "a receipt"}))
    (receipt.parent / "notes.txt").write_text("anything")
    tree.accepted()


def test_verification_is_fast_and_loads_no_torch(tree: Tree) -> None:
    def seconds(*arguments: str) -> float:
        """Of CPU, which a busy machine does not stretch as it does the wall clock."""
        start = os.times()
        assert tree.python(*arguments).returncode == 0
        end = os.times()
        return end.children_user + end.children_system - start.children_user - start.children_system

    best = min(seconds("impl/verify.py", "--parity") for _ in range(3))
    assert best <= 2.0
    done = tree.python("-X", "importtime", "impl/verify.py", "--parity")
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "paritygate.receipts" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "pytest", "hypothesis"}
