"""The retail database as shared, read-only records with the touched ones beside them: a reset copies nothing."""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from paritygate.retail.layout import TABLES

Record = dict[str, Any]


def to_hashable(item: Any) -> Any:
    """`item` with dicts as tuples of sorted pairs, lists and sets as tuples.

    Source: upstream tau_bench/envs/base.py at 59a200c6.
    """
    if isinstance(item, dict):
        return tuple((key, to_hashable(value)) for key, value in sorted(item.items()))
    if isinstance(item, list):
        return tuple(to_hashable(element) for element in item)
    if isinstance(item, set):
        return tuple(sorted(to_hashable(element) for element in item))
    return item


def canonical_text(record: Any) -> str:
    """What a record contributes to upstream's hash: 1 and 1.0 differ, the order of keys does not."""
    return str(to_hashable(record))


class Base:
    """The database as it was loaded, with each record's canonical text computed once; never written to."""

    def __init__(self, tables: Mapping[str, dict[str, Record]]) -> None:
        self.tables: dict[str, dict[str, Record]] = {name: tables[name] for name in TABLES}
        self._texts: dict[str, dict[str, str]] | None = None

    @property
    def texts(self) -> dict[str, dict[str, str]]:
        """Canonical text of every record, by table and key in sorted order."""
        if self._texts is None:
            self._texts = {
                name: {key: canonical_text(table[key]) for key in sorted(table)} for name, table in self.tables.items()
            }
        return self._texts


class Database:
    """One episode's view: `record` reads, `edit` gives a private copy to write to; the base stays as it is."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.touched: dict[tuple[str, str], Record] = {}

    def has(self, table: str, key: Any) -> bool:
        """Whether `key` names a record; TypeError for an unhashable key, as upstream's dict look-up."""
        return key in self.base.tables[table]

    def record(self, table: str, key: str) -> Record:
        """The present state of a record, to be read only; KeyError where there is none."""
        return self.touched.get((table, key)) or self.base.tables[table][key]

    def edit(self, table: str, key: str) -> Record:
        """The present state of a record, to be written to: copied on the first call."""
        place = (table, key)
        if place not in self.touched:
            self.touched[place] = _copied(self.base.tables[table][key])
        return self.touched[place]

    def records(self, table: str) -> Iterator[tuple[str, Record]]:
        """(key, present state) of every record in the order of the data file."""
        for key in self.base.tables[table]:
            yield key, self.record(table, key)

    def changes(self) -> dict[tuple[str, str], str]:
        """Canonical text of every record that differs from the base: equal changes mean equal upstream hashes."""
        texts: dict[tuple[str, str], str] = {}
        for (table, key), record in self.touched.items():
            text = canonical_text(record)
            if text != self.base.texts[table][key]:
                texts[table, key] = text
        return texts


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value


def database_hash(database: "Database | Mapping[str, Any]") -> str:
    """Upstream's hash of a database, hex: sha256 of str(to_hashable(database)); a plain dictionary is taken too.

    Source: consistent_hash in upstream tau_bench/envs/base.py at 59a200c6.
    """
    if not isinstance(database, Database):
        return sha256(_encoded(canonical_text(dict(database)))).hexdigest()
    changed = database.changes()
    tables: list[str] = []
    for name in sorted(TABLES):
        pairs = (f"({key!r}, {changed.get((name, key), text)})" for key, text in database.base.texts[name].items())
        tables.append(f"({name!r}, {_tuple_text(list(pairs))})")
    return sha256(_encoded(_tuple_text(tables))).hexdigest()


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # a lone surrogate in an address is a wrong answer, not a crash


def _tuple_text(parts: list[str]) -> str:
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def ordered_digest(value: Any) -> str:
    """sha256, hex, of JSON data in the order that it has: upstream's hash cannot see a changed order of keys."""
    return sha256(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
