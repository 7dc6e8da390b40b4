"""Receipts held to their JSON schema in spec/schema/."""

import functools
import json
from pathlib import Path
from typing import Any

from paritygate.errors import Refused
from paritygate.receipts.files import canonical

SCHEMAS = Path(__file__).resolve().parents[3] / "spec" / "schema"


@functools.cache
def validator(name: str) -> Any:
    """The validator of spec/schema/<name>.schema.json; raises Refused when the file is missing or not a schema."""
    import jsonschema

    path = SCHEMAS / f"{name}.schema.json"
    try:
        schema = json.loads(path.read_bytes())
        jsonschema.Draft202012Validator.check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        why = error.message if isinstance(error, jsonschema.SchemaError) else error  # the whole is many lines
        raise Refused(f"{path} cannot be used as a schema ({why}): receipts work in a checkout only.") from error
    return jsonschema.Draft202012Validator(schema)


def check_schema(value: Any, name: str, path: Path) -> None:
    """Raise Refused, naming the file and the place in it, unless `value` keeps spec/schema/<name>.schema.json."""
    from jsonschema.exceptions import best_match

    error = best_match(validator(name).iter_errors(value))
    if error is not None:
        pointer = "/" + "/".join(str(part) for part in error.absolute_path)
        raise Refused(f"{path} does not keep spec/schema/{name}.schema.json at {pointer}: {error.message[:200]}.")


def read_canonical(path: Path, schema: str) -> tuple[dict[str, Any], bytes]:
    """The JSON value in `path` and its bytes; raises Refused unless the form is canonical and the schema kept."""
    try:
        data = path.read_bytes()
        value = json.loads(data)
        is_canonical = canonical(value) == data
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not JSON ({error}): it was not written by a session of ours.") from error
    if not is_canonical:
        raise Refused(f"{path} is not in canonical form (RFC 8785): it was not written by a session of ours.")
    check_schema(value, schema, path)
    return value, data
