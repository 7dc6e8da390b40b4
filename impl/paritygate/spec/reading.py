"""The JSON object in the file of a spec."""

from pathlib import Path
from typing import Any, cast

from paritygate.spec import strict
from paritygate.spec.error import Finding, SpecError

MOST_BYTES = 4 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; SpecError (exit 2) says what is wrong with the file and where."""
    try:
        with open(strict.open_plain(path), "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(path, [Finding("", "there is no such file")]) from None
    except (OSError, ValueError) as error:
        raise SpecError(path, [Finding("", f"cannot be read ({_reason(error)})")]) from None
    if len(data) > MOST_BYTES:
        raise SpecError(path, [Finding("", f"larger than {MOST_BYTES >> 20} MiB, which no spec is")])
    try:
        document = strict.parse_json(data)
    except ValueError as error:
        raise SpecError(path, [Finding("", str(error))]) from None
    if not isinstance(document, dict):
        raise SpecError(path, [Finding("", "a spec is one JSON object")])
    return cast("dict[str, Any]", document)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
