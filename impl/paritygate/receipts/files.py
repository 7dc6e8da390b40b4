"""Bytes on disk: canonical JSON, digests, and files that exist whole or not at all."""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Any

from paritygate.errors import Refused
from paritygate.spec.schema import check_schema
from paritygate.spec.strict import open_plain, parse_json, read_plain


def canonical(value: Any) -> bytes:
    """`value` as canonical JSON (RFC 8785, UTF-8); raises ValueError on NaN, infinities and integers beyond 2**53."""
    import rfc8785

    return rfc8785.dumps(value)


def digest(value: Any) -> str:
    """Hexadecimal sha256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value)).hexdigest()


def sha256_file(path: str | Path) -> str:
    """Hexadecimal sha256 of the bytes of the plain file at `path`, of any size."""
    with open(open_plain(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: str | Path, data: bytes, *, exclusive: bool = False) -> None:
    """Write `data` so that `path` holds all of it or does not exist, whenever the process dies.

    A temporary file beside it, fsync, rename (or link, which raises FileExistsError when `exclusive` and `path`
    exists), fsync of the folder.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with named(path), open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def append_whole(path: Path, data: bytes) -> None:
    """Add `data` to the end of the file, on the disk when this returns; the file is as it was where that fails.

    A disk that is full takes a part of a line, which the next line that has room would make one broken line of.
    """
    with named(path), path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while data:  # it may be taken in parts
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


@contextlib.contextmanager
def named(path: Path) -> Generator[None]:
    """Errors of writing, which know no file name, get that of `path`; so do those of its temporary file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def read_json(path: Path, data: bytes | None = None) -> Any:
    """The JSON value in a file that a run wrote, or in `data`, a part of it; raises Refused for anything else."""
    try:
        return parse_json(read_plain(path) if data is None else data)
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise Refused(f"{path} was not written by a run ({error}).") from error


def read_canonical(path: Path, schema: str) -> tuple[dict[str, Any], bytes]:
    """The JSON value in `path` and its bytes; raises Refused unless the form is canonical and the schema kept."""
    try:
        data = read_plain(path)
        value = parse_json(data)
        is_canonical = canonical(value) == data
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise Refused(f"{path} is no receipt ({error}): it was not written by a session of ours.") from error
    if not is_canonical:
        raise Refused(f"{path} is not in canonical form (RFC 8785): it was not written by a session of ours.")
    check_schema(value, schema, path)
    return value, data
