"""Known departures: a JSON file that says which rows depart, and why that is accepted.

{"departures": [{"module": "trl_sdpo", "loss": "sdpo.logit_loss", "in": "empty row", "reason": "..."}]}

`in` is "plain", a stress or a promise; `option` and `dtype` may be given too. Each takes * and ?; what is left out
matches everything, `reason` has to be there.
"""

import fnmatch
from pathlib import Path
from typing import Any

from paritygate.errors import BadInputError
from paritygate.spec.strict import parse_json, read_plain

FIELDS = ("module", "loss", "option", "dtype", "in")


def load(path: Path) -> list[dict[str, str]]:
    """The entries; raises BadInputError for a file of another form."""
    try:
        document: Any = parse_json(read_plain(path))
    except OSError as error:
        raise BadInputError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise BadInputError(f"{path}: {error}.") from error
    entries: Any = document.get("departures") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadInputError(f'{path}: {{"departures": [...]}} is expected.')
    for i, entry in enumerate(entries):
        if not entry.get("reason") or not all(isinstance(value, str) for value in entry.values()):
            raise BadInputError(f"{path}: /departures/{i} has no reason.")
        if unknown := sorted(entry.keys() - {*FIELDS, "reason"}):
            raise BadInputError(f"{path}: /departures/{i} has no {unknown[0]!r}; it has {', '.join(FIELDS)}, reason.")
    return entries


def apply(entries: list[dict[str, str]], report: dict[str, Any]) -> list[dict[str, str]]:
    """Write the reason as `known` into each row that departs and is known; the entries of this module without one."""
    unused = [entry for entry in entries if fnmatch.fnmatchcase(report["module"], entry.get("module", "*"))]
    for entry in list(unused):
        for kind in ("plain", "stress", "promises"):
            for row in report[kind]:
                if row["outcome"] in ("departs", "scaled") and matches(entry, row, place_of(row)):
                    row["known"] = entry["reason"]
                    unused = [other for other in unused if other is not entry]
    return unused


def place_of(row: dict[str, Any]) -> str:
    """Where a row belongs: a stress, a promise, or plain."""
    return row.get("stress") or row.get("promise") or "plain"


def matches(entry: dict[str, str], row: dict[str, Any], place: str) -> bool:
    """Whether the entry is about the row."""
    values = {"loss": row["loss"], "option": row["option"], "dtype": row["dtype"], "in": place}
    return all(fnmatch.fnmatchcase(value, entry.get(field, "*")) for field, value in values.items())
