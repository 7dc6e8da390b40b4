"""JSON Schemas: where they lie, what a document violates, which defaults it leaves out."""

import copy
import difflib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from paritygate.errors import Refused
from paritygate.spec.error import Finding, pointer
from paritygate.spec.strict import parse_json, read_plain

_HERE = Path(__file__).resolve()


def spec_folder() -> Path:
    """The folder `spec/` of a plain checkout, else the copy inside an installed wheel."""
    checkout = _HERE.parents[3] / "spec"
    return checkout if (checkout / "schema").is_dir() else _HERE.parent / "data"


@functools.cache
def load_schema(name: str) -> dict[str, Any]:
    """The schema `spec/schema/<name>.schema.json`; raises Refused when it cannot be read: the checkout is damaged."""
    path = spec_folder() / "schema" / f"{name}.schema.json"
    try:
        return cast("dict[str, Any]", parse_json(read_plain(path)))
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be used as a schema ({error}): get it again from the repository.") from error


@functools.cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator, SchemaError  # 0.1 s of imports that `run.py --help` does not need
    from jsonschema.validators import extend

    # JSON Schema calls 4.0 an integer; a count of 4.0 in a spec is a slip, and would be frozen as a float.
    def is_count(_checker: object, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    try:
        Draft202012Validator.check_schema(load_schema(name))
    except SchemaError as error:
        raise Refused(f"spec/schema/{name}.schema.json is no schema ({error.message}): get it again.") from error
    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", is_count)
    return extend(Draft202012Validator, type_checker=checker)(load_schema(name))


def violations(name: str, document: object) -> list[Finding]:
    """Every way in which a document violates a schema, by JSON pointer; empty when it is valid."""
    findings = [one for error in _validator(name).iter_errors(document) for one in _explain(error)]
    return sorted(set(findings), key=lambda finding: (finding.pointer, finding.message))


def check_schema(document: object, name: str, path: Path) -> None:
    """Raise Refused, naming the file and the place in it, unless `document` keeps spec/schema/<name>.schema.json."""
    from jsonschema.exceptions import best_match

    error = best_match(_validator(name).iter_errors(document))
    if error is not None:
        place = "/" + "/".join(str(part) for part in error.absolute_path)
        raise Refused(f"{path} does not keep spec/schema/{name}.schema.json at {place}: {error.message[:200]}.")


def _explain(error: Any) -> Iterator[Finding]:
    path: list[str | int] = list(error.absolute_path)
    kind = str(error.validator)
    rule: Any = error.validator_value
    value: Any = error.instance
    if kind == "anyOf" and value is not None:  # a nullable object: what is wrong with the object
        for inner in error.context:
            if not (inner.validator == "type" and inner.validator_value == "null"):
                yield from _explain(inner)
    elif kind == "additionalProperties":
        allowed: list[str] = sorted(cast("dict[str, Any]", error.schema).get("properties", {}))
        for key in sorted(set(cast("dict[str, Any]", value)) - set(allowed)):
            close = difflib.get_close_matches(key, allowed, 1)
            yield Finding(pointer([*path, key]), "unknown key" + (f"; did you mean {close[0]!r}?" if close else ""))
    elif kind == "required":
        for key in (key for key in rule if key not in value):
            yield Finding(pointer([*path, key]), "missing key")
    elif kind == "type":
        wanted = rule if isinstance(rule, str) else " or ".join(rule)
        yield Finding(pointer(path), f"expected {wanted}, found {_name(value)}")
    else:
        yield Finding(pointer(path), f"{_short(value)} is not allowed here: {kind} is {_short(rule)}")


def _name(value: object) -> str:
    names: dict[type, str] = {bool: "boolean", type(None): "null", dict: "object", list: "array", str: "string"}
    return names.get(type(value), "number") + f" {_short(value)}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def with_defaults(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """A copy of a valid document with the schema's `default` of every absent key written out."""
    schema = load_schema(name)
    filled = copy.deepcopy(document)
    _fill(schema, schema, filled)
    return filled


def _fill(root: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if isinstance(value, dict):
        for branch in schema.get("anyOf", ()):
            _fill(root, branch, value)
        for key, part in schema.get("properties", {}).items():
            if key not in value and "default" in part:
                value[key] = copy.deepcopy(part["default"])
            if key in value:
                _fill(root, part, value[key])
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            _fill(root, schema.get("items", {}), item)
