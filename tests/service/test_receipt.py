"""The service receipt: its schema, and forgeries. The attack comes first; a careful forger also writes the digest."""

import copy
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paritygate.errors import Refused
from paritygate.service import receipt
from paritygate.service.lab import Noise, Settings
from paritygate.service.obligations import load
from paritygate.service.report import Report
from paritygate.service.runner import Result
from paritygate.service.schema import load_schema, violations

ASKED = load().only(["value/ppo", "gradient/ppo", "optimiser/clip"])


def made() -> dict[str, Any]:
    """A receipt of four obligations: one holds, two depart, one is undecided since it stands on one that departs."""
    report = Report(
        "http://127.0.0.1:8000",
        "some/model",
        ["some/model"],
        "0.38.0",
        ASKED.sha256,
        asdict(Settings()),
        asdict(Noise()),
        calls=90,
        tokens=4000,
        seconds=2.5,
        time="2026-12-01T00:00:00+00:00",
        complete=True,
        results=[
            Result("value/ppo", "holds", 3e-9, 1e-4, 0.1, "loss:sum is right", None),
            Result("gradient/cross_entropy", "departs", 0.4, 0.005, 0.4, "a mean", "print()"),
            Result("gradient/ppo", "undecided", 0.3, 0.005, 0.4, "stands on gradient/cross_entropy, which departs"),
            Result("optimiser/clip", "departs", because="hangs: optim_step: no answer within 120 s", program="wait()"),
        ],
    )
    return receipt.receipt(report, ASKED)


def written(value: dict[str, Any], folder: Path, *, again: bool) -> Path:
    """A file with `value`; with a digest that fits where it is computed `again`."""
    if again:
        value["sha256"] = receipt.digest(value)
    path = folder / "p.receipt.json"
    path.write_text(json.dumps(value))
    return path


def test_it_verifies_and_says_what_it_is(tmp_path: Path) -> None:
    value = made()
    assert receipt.verify(written(value, tmp_path, again=False)) == value
    sentence = receipt.sentence(value)
    assert "1 holds, 2 departs, 1 undecided" in sentence
    assert "gradient/ppo" in sentence
    assert not any("program" in entry for entry in value["obligations"])


ATTACKS: dict[str, tuple[Any, str]] = {
    "a figure over its bound": (lambda r: r["obligations"][0].update(figure=0.5), "value/ppo does not follow"),
    "a departure called held": (lambda r: r["obligations"][1].update(outcome="holds"), "does not follow"),
    "a departure called undecided": (
        lambda r: (r["obligations"][1].update(outcome="undecided"), r["obligations"][3].update(outcome="undecided")),
        "gradient/cross_entropy does not follow",
    ),
    "a hang called held": (lambda r: r["obligations"][3].update(outcome="holds"), "optimiser/clip does not follow"),
    "what holds called refused": (lambda r: r["obligations"][0].update(outcome="refused"), "does not follow"),
    "a wider bound": (lambda r: r["obligations"][1].update(outcome="holds", bound=0.5), "does not follow"),
    "a wider tolerance": (
        lambda r: r["obligations"][0].update(figure=0.3, bound=0.5, tolerance=0.5, contrast=9.0),
        "0.0001 is declared",
    ),
    "a bound below the tolerance": (lambda r: r["obligations"][0].update(bound=1e-8), "does not follow"),
    "a contrast that shows nothing": (lambda r: r["obligations"][0].update(contrast=1e-4), "does not follow"),
    "a missing obligation": (lambda r: r["obligations"].pop(0), "lacks the obligation value/ppo"),
    "the departure that another stands on": (lambda r: r["obligations"].pop(1), "gradient/ppo does not follow"),
    "an obligation twice": (lambda r: r["obligations"].append(r["obligations"][0]), "there twice"),
    "an obligation that is none": (lambda r: r["obligations"][0].update(name="value/none"), "lacks the obligation"),
    "asked for what is none": (lambda r: r["only"].append("values"), "no obligation"),
    "another outcome": (lambda r: r["obligations"][0].update(outcome="passes"), "/obligations/0/outcome"),
    "a key in the address": (lambda r: r.update(endpoint="http://me:secret@127.0.0.1"), "/endpoint"),
    "no time": (lambda r: r.pop("time"), "/time: missing"),
    "an unknown key": (lambda r: r.update(note="trust me"), "/note: unknown key"),
    "another kind": (lambda r: r.update(kind="another"), "is no service receipt"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_careful_forgery_is_refused_for_what_it_is(attack: str, tmp_path: Path) -> None:
    change, words = ATTACKS[attack]
    value = made()
    change(value)
    with pytest.raises(Refused, match=words):
        receipt.verify(written(value, tmp_path, again=True))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_careless_one_by_its_digest_or_its_form(attack: str, tmp_path: Path) -> None:
    value = made()
    ATTACKS[attack][0](value)
    with pytest.raises(Refused, match=r"digest does not fit|does not keep|no service receipt"):
        receipt.verify(written(value, tmp_path, again=False))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"kind": 1, "kind": 2}', "\x00", '{"kind": NaN}'])
def test_no_receipt_at_all(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(Refused, match=r"r\.json"):
        receipt.verify(path)
    with pytest.raises(Refused, match="cannot be read"):
        receipt.verify(tmp_path / "nowhere.json")


def test_what_would_not_verify_is_not_written() -> None:
    report = Report("http://x", "m", [], "0.38.0", ASKED.sha256, asdict(Settings()), asdict(Noise()), complete=True)
    report.time = "2026-12-01T00:00:00+00:00"
    report.results = [Result("value/ppo", "holds", 0.0, 1e-4, 0.1)]
    with pytest.raises(Refused, match="lacks the obligation"):
        receipt.receipt(report, ASKED)


def test_another_obligations_file_is_not_held_to_the_one_here(tmp_path: Path) -> None:
    value = made()
    value["spec_sha256"] = 64 * "0"
    value["obligations"].pop(0)
    path = written(value, tmp_path, again=True)
    assert "another spec/service.json" in receipt.sentence(receipt.verify(path))


def test_the_schema_says_here_what_it_says_to_jsonschema() -> None:
    """The proof carries a validator of its own, since it needs no library; on 400 mutated receipts both agree."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = load_schema(receipt.SCHEMA)
    jsonschema.Draft202012Validator.check_schema(schema)
    other = jsonschema.Draft202012Validator(schema)
    rng, values = random.Random(0), [None, True, 0, -1, 1.5, "", "x", [], {}, "2026-12-01T00:00:00+00:00", 64 * "a"]
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        value = copy.deepcopy(made())
        place: Any = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
                place = place[key]
                continue
            if rng.random() < 0.2:
                place.pop(key)
            elif rng.random() < 0.2 and isinstance(place, dict):
                place["another"] = rng.choice(values)
            else:
                place[key] = rng.choice(values)
            break
        right = not list(violations(schema, value))
        assert right == other.is_valid(value), (place, key)
        outcomes[right] += 1
    assert min(outcomes.values()) > 20
