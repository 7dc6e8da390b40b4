"""Files and JSON read strictly: plain files only, and nothing that two readers of JSON read differently."""

import errno
import json
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 64 * 2**20
"""Of a file that is read whole: no spec, schema or receipt is a hundredth of it."""
MOST_EXACT = 2**53 - 1  # RFC 8785 has no canonical form for larger integers


def open_plain(path: str | Path) -> int:
    """A descriptor of the plain file at `path`, for reading; OSError for all else, a pipe without a writer included."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return descriptor


def read_plain(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of the plain file at `path`; OSError for anything else, and for one of more than `most` bytes."""
    with open(open_plain(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"over {most >> 20} MiB, which none of ours is", str(path))
        return file.read()


def parse_json(data: bytes, largest: int = MOST_EXACT) -> Any:
    """The JSON value in `data`; raises ValueError, with what is wrong and where in one clause.

    Refused: anything but UTF-8 (a byte order mark, UTF-16, half of a surrogate pair), a key that occurs twice in one
    object, NaN and infinities, integers beyond `largest`, floats that overflow, nesting too deep to be read.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique_keys,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=partial(_exact, largest=largest),
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # lone surrogates have no canonical form
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeError:
        raise ValueError("not UTF-8, or a string holds half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not usable JSON: {error}") from None
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for `object_pairs_hook`; raises ValueError for a key that occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _exact(text: str, largest: int) -> int:
    if len(text) > len(str(largest)) + 1 or abs(int(text)) > largest:
        raise ValueError(f"the integer {text[:40]} is beyond 2^{largest.bit_length()}, where readers of JSON differ")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value
