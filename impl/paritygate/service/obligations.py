"""spec/service.json: the obligations of a service, read and checked without any library."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paritygate.errors import BadInputError
from paritygate.spec.strict import parse_json, read_plain

PREPARATION = (90, 2700)
"""Calls and tokens before the first check, about: a warmed state, a calibrated step, the noise."""


@dataclass(frozen=True)
class Obligation:
    """A claim, the bound that its figure is held to, what its contrast arm is, what it stands on, and its price.

    needs: in the order of the file, those of what it stands on among them.
    """

    name: str
    claim: str
    tolerance: str
    bound: float
    unit: str
    contrast: str
    needs: tuple[str, ...]
    calls: int
    tokens: int

    @property
    def group(self) -> str:
        return self.name.split("/")[0]


@dataclass(frozen=True)
class Obligations:
    """Those of one file, in the order in which they are checked, and the digest of its bytes.

    chosen: the groups and names that `only` was asked for; empty where all of the file are meant.
    """

    entries: tuple[Obligation, ...]
    sha256: str
    chosen: tuple[str, ...] = ()

    @property
    def price(self) -> tuple[int, int]:
        """Calls and tokens that a proof of these takes, about; preparation included."""
        calls, tokens = PREPARATION
        return calls + sum(entry.calls for entry in self.entries), tokens + sum(entry.tokens for entry in self.entries)

    def only(self, chosen: Sequence[str]) -> "Obligations":
        """Those whose group or name is among `chosen`, and what they stand on; BadInputError for an unknown one."""
        if not chosen:
            return self
        names = {entry.name for entry in self.entries}
        groups = {entry.group for entry in self.entries}
        for one in chosen:
            if one not in names | groups:
                raise BadInputError(
                    f"--only {one!r} is no group or obligation; the groups are {', '.join(_ordered(self))}."
                )
        wanted = {e.name for e in self.entries if e.name in chosen or e.group in chosen}
        wanted |= {need for entry in self.entries if entry.name in wanted for need in entry.needs}
        return Obligations(tuple(e for e in self.entries if e.name in wanted), self.sha256, tuple(chosen))


def _ordered(obligations: Obligations) -> list[str]:
    return list(dict.fromkeys(entry.group for entry in obligations.entries))


def default_path() -> Path:
    """spec/service.json of the checkout, else of the installed package."""
    here = Path(__file__).resolve()
    checkout = here.parents[3] / "spec" / "service.json"
    return checkout if checkout.exists() else here.parents[1] / "spec" / "data" / "service.json"


def load(path: Path | None = None) -> Obligations:
    """The obligations in `path`; BadInputError names the file and the entry that cannot be used."""
    path = path or default_path()
    try:
        data = read_plain(path)
        value = parse_json(data)
    except OSError as error:
        raise BadInputError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON that can be used ({error}).") from error
    if not isinstance(value, dict) or not isinstance(value.get("obligations"), dict):
        raise BadInputError(f"{path} is no file of service obligations: it has no object `obligations`.")
    tolerances = value.get("tolerances", {})
    entries = [_entry(path, name, entry, tolerances) for name, entry in value["obligations"].items()]
    names = {entry.name for entry in entries}
    for entry in entries:
        for need in entry.needs:
            if need not in names:
                raise BadInputError(f"{path}: {entry.name} stands on {need!r}, which is no obligation there.")
    return Obligations(tuple(_with_needs_of_needs(entries)), hashlib.sha256(data).hexdigest())


def _with_needs_of_needs(entries: Sequence[Obligation]) -> list[Obligation]:
    """What is judged by another that cannot be told, since a third departs, stands on that third one."""
    places = {entry.name: place for place, entry in enumerate(entries)}
    whole: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        needs = {*entry.needs, *(further for need in entry.needs for further in whole.get(need, ()))}
        whole[entry.name] = tuple(sorted(needs, key=places.__getitem__))
    return [replace(entry, needs=whole[entry.name]) for entry in entries]


def _entry(path: Path, name: str, entry: Any, tolerances: Mapping[str, Any]) -> Obligation:
    try:
        tolerance = tolerances[entry["tolerance"]]
        return Obligation(
            name=name,
            claim=str(entry["claim"]),
            tolerance=str(entry["tolerance"]),
            bound=float(tolerance["bound"]),
            unit=str(tolerance["unit"]),
            contrast=str(entry.get("contrast", "")),
            needs=tuple(entry.get("needs", ())),
            calls=int(entry.get("calls", 0)),
            tokens=int(entry.get("tokens", 0)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"{path}: {name} cannot be used ({type(error).__name__}: {error}).") from error
