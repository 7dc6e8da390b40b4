"""The service receipt: what was held at which service, with a digest over all of it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from paritygate.errors import Refused
from paritygate.service.outcome import OUTCOMES
from paritygate.service.report import Report

KIND = "paritygate service receipt 1"


def receipt(report: Report) -> dict[str, Any]:
    """The receipt of a finished report; programs are left out, they are in the report."""
    body = {key: value for key, value in report.to_json().items() if key not in ("format", "complete", "obligations")}
    body["kind"] = KIND
    body["obligations"] = [
        {key: value for key, value in result.to_json().items() if key != "program"} for result in report.results
    ]
    return {**body, "sha256": digest(body)}


def digest(body: dict[str, Any]) -> str:
    """Hexadecimal sha256 of the JSON with sorted keys and no spaces, without the entry `sha256`."""
    bare = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def verify(path: Path) -> dict[str, Any]:
    """The receipt in `path`; Refused where its digest does not fit or an outcome does not follow from its figures."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read as a service receipt ({error}).") from None
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise Refused(f"{path} is no service receipt.")
    try:
        fits = value["sha256"] == digest(value)
        wrong = [entry["name"] for entry in value["obligations"] if not _follows(entry)]
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{path} is no whole service receipt ({error}).") from None
    if not fits:
        raise Refused(f"{path} was changed after it was written: its digest does not fit.")
    if wrong:
        raise Refused(f"{path}: the outcome of {wrong[0]} does not follow from its figures.")
    return value


def _follows(entry: dict[str, Any]) -> bool:
    if entry["outcome"] not in OUTCOMES:
        return False
    figure, bound = entry.get("figure"), entry.get("bound")
    if entry["outcome"] == "holds":
        return figure is not None and bound is not None and figure <= bound
    if entry["outcome"] == "departs" and figure is not None and bound is not None:
        return figure > bound
    return True
