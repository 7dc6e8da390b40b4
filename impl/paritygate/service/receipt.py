"""The service receipt: what was held at which service, with a digest over all of it, and how it is checked again."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paritygate.errors import BadInputError, Refused
from paritygate.service.obligations import Obligations, load
from paritygate.service.outcome import OUTCOMES, Measured, judge
from paritygate.service.report import Report
from paritygate.service.schema import load_schema, violations
from paritygate.spec.strict import parse_json, read_plain

KIND = "paritygate service receipt 1"
SCHEMA = "service-receipt"


def receipt(report: Report, obligations: Obligations) -> dict[str, Any]:
    """The receipt of a finished report; programs are left out, they are in the report.

    Raises Refused where it would not keep spec/schema/service-receipt.schema.json or contradicts itself.
    """
    body = {key: value for key, value in report.to_json().items() if key not in ("format", "complete", "obligations")}
    declared = {entry.name: entry.bound for entry in obligations.entries}
    body["kind"], body["only"] = KIND, list(obligations.chosen)
    body["obligations"] = [
        {"tolerance": declared[result.name]}
        | {key: value for key, value in result.to_json().items() if key != "program"}
        for result in report.results
    ]
    whole = {**body, "sha256": digest(body)}
    check(whole, "the service receipt", obligations)
    return whole


def digest(body: dict[str, Any]) -> str:
    """Hexadecimal sha256 of the JSON with sorted keys and no spaces, without the entry `sha256`."""
    bare = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def verify(path: Path) -> dict[str, Any]:
    """The receipt in `path`, held to its schema, its digest, itself, and the obligations here where they are its own.

    Raises Refused with one sentence. Whoever writes files can write a receipt, with its digest: in a run the digest is
    in the chain of phases, and the run's other files have to agree.
    """
    try:
        value = parse_json(read_plain(path))
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read as a service receipt ({error}).") from None
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise Refused(f"{path} is no service receipt.")
    check(value, str(path), load())
    return value


def sentence(value: dict[str, Any]) -> str:
    """What a receipt says, for a terminal: where, with what, and how many obligations ended how."""
    outcomes = [entry["outcome"] for entry in value["obligations"]]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in OUTCOMES if name in outcomes)
    asked = f" of those asked for ({', '.join(value['only'])})" if value["only"] else ""
    same = "" if value["spec_sha256"] == load().sha256 else "; held to another spec/service.json than the one here"
    return f"{value['endpoint']} ({value['model']}, SDK {value['sdk']}): {counts}{asked}{same}"


def check(value: dict[str, Any], where: str, here: Obligations) -> None:
    """Refused, in a sentence about `where`, unless the receipt is whole, unchanged and consistent.

    here: the obligations of this version; a receipt about another file's is not held to them.
    """
    for problem in violations(load_schema(SCHEMA), value):
        raise Refused(f"{where} does not keep spec/schema/{SCHEMA}.schema.json at {problem}.")
    if value["sha256"] != digest(value):
        raise Refused(f"{where} was changed after it was written: its digest does not fit.")
    entries: list[dict[str, Any]] = value["obligations"]
    for entry in entries:
        if not follows(entry, entries):
            raise Refused(f"{where}: the outcome of {entry['name']} does not follow from its figures.")
    if value["spec_sha256"] == here.sha256:
        _held_to(here, value["only"], entries, where)


def _held_to(here: Obligations, only: Sequence[str], entries: Sequence[dict[str, Any]], where: str) -> None:
    try:
        asked = {entry.name: entry.bound for entry in here.only(only).entries}
    except BadInputError as error:
        raise Refused(f"{where} was asked for what is no obligation: {error}") from None
    names = [entry["name"] for entry in entries]
    for name in asked:
        if name not in names:
            raise Refused(f"{where} lacks the obligation {name}, which was asked for.")
    for entry, name in zip(entries, names, strict=True):
        if name not in asked or names.count(name) > 1:
            raise Refused(f"{where} has the obligation {name}, which was not asked for or is there twice.")
        if entry["tolerance"] != asked[name]:
            raise Refused(f"{where} gives {name} a tolerance of {entry['tolerance']:g}; {asked[name]:g} is declared.")


def follows(entry: dict[str, Any], entries: Sequence[dict[str, Any]]) -> bool:
    """Whether the outcome is what the rule makes of figure, contrast, tolerance and bound.

    A departure counts as undecided where another one, which it stands on and names, departs.
    """
    figure, bound, tolerance = entry.get("figure"), entry.get("bound"), entry["tolerance"]
    outcome = entry["outcome"]
    if figure is None or bound is None:
        return outcome != "holds"  # a departure without a number: no answer, or one that cannot be read
    if outcome == "refused" or bound < tolerance:
        return False
    ruled = judge(Measured(figure, "", entry.get("contrast"), bound if bound > tolerance else 0.0), tolerance).outcome
    if outcome == "undecided" and ruled == "departs":
        return any(e["outcome"] == "departs" and e["name"] in entry["because"] for e in entries)
    return outcome in (ruled, "undecided")
