"""A JSON file, strictly: no duplicate keys, no NaN, no lone surrogates, nothing that two readers read differently."""

import json
from pathlib import Path
from typing import Any, NoReturn, cast

from paritygate.spec.error import Finding, SpecError

MOST_BYTES = 4 * 2**20
MOST_EXACT = 2**53 - 1  # RFC 8785 has no canonical form for larger integers


class _UnreadableError(ValueError):
    pass


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; SpecError (exit 2) says what is wrong with the file and where."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(path, [Finding("", "there is no such file")]) from None
    except (OSError, ValueError) as error:
        raise SpecError(path, [Finding("", f"cannot be read ({_reason(error)})")]) from None
    if len(data) > MOST_BYTES:
        raise SpecError(path, [Finding("", f"larger than {MOST_BYTES >> 20} MiB, which no spec is")])
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_exact,
        )
        json.dumps(document, ensure_ascii=False).encode("utf-8")  # lone surrogates have no canonical form
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise SpecError(path, [Finding("", f"not JSON: {error.msg} at {place}")]) from None
    except UnicodeError:
        raise SpecError(path, [Finding("", "not UTF-8, or a string holds half of a surrogate pair")]) from None
    except RecursionError:
        raise SpecError(path, [Finding("", "nested too deeply")]) from None
    except ValueError as error:
        raise SpecError(path, [Finding("", f"not usable JSON: {error}")]) from None
    if not isinstance(document, dict):
        raise SpecError(path, [Finding("", "a spec is one JSON object")])
    return cast("dict[str, Any]", document)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _UnreadableError(f"the key {twice!r} occurs twice in one object")
    return result


def _no_constant(name: str) -> NoReturn:
    raise _UnreadableError(f"{name} is no JSON number")


def _exact(text: str) -> int:
    if len(text) > len(str(MOST_EXACT)) + 1 or abs(int(text)) > MOST_EXACT:
        raise _UnreadableError(f"the integer {text[:40]} is beyond 2^53, where readers of JSON differ")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _UnreadableError(f"{text} is too large for a number")
    return value
