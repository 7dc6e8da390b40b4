"""Specs mutated at random from the real ones: accepted, or refused with JSON pointers; never a traceback."""

import copy
import json
import random
from pathlib import Path
from typing import Any

from paritygate.receipts import canonical
from paritygate.spec import Experiment, load
from paritygate.spec.schema import load_schema, spec_folder
from tests.counts import soak
from tests.spec.refusals import refusal

SPECS = soak(quick=300, full=10_000)
REAL = [
    json.loads(path.read_text("utf-8"))
    for path in (
        Path(__file__).with_name("sdpo_as_asked.json"),
        *(spec_folder() / name for name in ("sdpo.json", "sdpo-local.json", "spod.json")),
    )
    if path.is_file()
]
NUMBERS: list[Any] = [0, -1, 1, 2, 3, 20, 2**31, 2**63, 10**25, 0.0, -0.0, 0.5, 1.0, 1e-300, 1e300]
TEXTS: list[Any] = [
    "",
    " ",
    "grpo",
    "train",
    "{instruction}",
    "\u0000",
    "\U0001f600",
    "a" * 5000,
    "tree:reference",
    "~1/~0",
]
ODD: list[Any] = [None, True, False, *NUMBERS, *TEXTS, [], {}, [[]], {"": {}}, [1, 2, 3], {"split": "test", "first": 1}]


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def known_keys() -> list[str]:
    """Every key that the schema has, its own words included."""
    return sorted({str(path[-1]) for path in places(load_schema("experiment")) if path})


def mutate(document: Any, rng: random.Random, keys: list[str]) -> Any:
    """One random edit: replace, delete, duplicate, swap, rename or add."""
    spots = [path for path in places(document) if path]
    if not spots:
        return rng.choice(ODD)
    path = rng.choice(spots)
    parent, key = at(document, path[:-1]), path[-1]
    kind = rng.randrange(7)
    if kind == 0:
        del parent[key]
    elif kind == 1:
        parent[key] = copy.deepcopy(at(document, rng.choice(spots)))
    elif kind == 2 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == 3 and isinstance(parent, dict):
        parent[rng.choice(keys)] = copy.deepcopy(rng.choice(ODD))
    elif kind == 4 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = parent[key] * rng.choice([-1, 0, 2, 0.5, 10, 1.0000001]) + rng.choice([0, 0, 1, -1])
    elif kind == 5 and isinstance(parent[key], str):
        text = parent[key]
        cut = rng.randrange(len(text) + 1)
        parent[key] = text[:cut] + rng.choice(["", "x", "@" + "0" * 40, "; tree:reference", "("]) + text[cut:]
    else:
        parent[key] = copy.deepcopy(rng.choice(ODD))
    return document


def test_a_mutated_spec_is_accepted_or_refused_with_pointers(tmp_path: Path):
    rng, keys = random.Random(20260131), known_keys()
    path = tmp_path / "spec.json"
    accepted = refused = 0
    for _ in range(SPECS):
        document = copy.deepcopy(rng.choice(REAL))
        for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
            document = mutate(document, rng, keys)
        path.write_text(json.dumps(document), "utf-8")
        if refusal(path) is not None:
            refused += 1
            continue
        accepted += 1
        spec = load(path)
        canonical(dict(spec.frozen))  # what is accepted can be frozen
        if isinstance(spec, Experiment):
            arms = {arm.name: arm for arm in spec.arms}
            assert arms[spec.comparison.treatment] != arms[spec.comparison.baseline]
            assert spec.protocol.train.count == spec.dataset.n_examples
    assert accepted > SPECS // 100
    assert refused > SPECS // 3


def test_bytes_torn_anywhere_are_refused_in_words(tmp_path: Path):
    rng = random.Random(7)
    path = tmp_path / "spec.json"
    whole = (spec_folder() / "sdpo.json").read_bytes()
    for _ in range(soak(quick=50, full=1_000)):
        data = bytearray(whole[: rng.randrange(len(whole))])
        for _ in range(rng.randrange(3)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        refusal(path)
