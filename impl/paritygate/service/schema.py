"""JSON Schema as far as the service receipt uses it: the proof needs no library beside the SDK and NumPy."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from paritygate.service.obligations import default_path
from paritygate.spec.strict import parse_json, read_plain

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def load_schema(name: str) -> dict[str, Any]:
    """`spec/schema/<name>.schema.json` of the checkout, else of the installed package."""
    path: Path = default_path().parent / "schema" / f"{name}.schema.json"
    return cast("dict[str, Any]", parse_json(read_plain(path)))


def violations(schema: Mapping[str, Any], value: object, place: str = "") -> Iterator[str]:
    """What in `value` does not keep `schema`, each with its JSON pointer.

    Keywords: type, const, enum, pattern, minimum, required, properties, additionalProperties, items, minItems.
    """
    here = place or "/"
    wanted = schema.get("type", list(_TYPES))
    if not any(_is(value, name) for name in ([wanted] if isinstance(wanted, str) else wanted)):
        yield f"{here}: {_short(value)} is not of type {wanted}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{here}: {_short(value)} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{here}: {_short(value)} is none of {schema['enum']}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{here}: {_short(value)} does not match {schema['pattern']}"
    if _is(value, "number") and cast("float", value) < schema.get("minimum", float("-inf")):
        yield f"{here}: {_short(value)} is below {schema['minimum']}"
    if isinstance(value, dict):
        yield from _object(schema, cast("dict[str, object]", value), place)
    if isinstance(value, list):
        entries = cast("list[object]", value)
        if len(entries) < schema.get("minItems", 0):
            yield f"{here}: {len(entries)} entries, at least {schema['minItems']} are needed"
        for index, entry in enumerate(entries):
            yield from violations(schema.get("items", {}), entry, f"{place}/{index}")


def _object(schema: Mapping[str, Any], value: Mapping[str, object], place: str) -> Iterator[str]:
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{place}/{key}: missing"
    defined: Mapping[str, Any] = schema.get("properties", {})
    others = schema.get("additionalProperties", {})
    for key, entry in value.items():
        part = defined.get(key, others)
        if part is False:
            yield f"{place}/{key}: unknown key"
        else:
            yield from violations({} if part is True else part, entry, f"{place}/{key}")


def _is(value: object, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
