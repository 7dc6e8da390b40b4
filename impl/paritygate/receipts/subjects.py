"""The files that a parity receipt is about, by the digest of their bytes."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from paritygate.errors import Refused
from paritygate.receipts.files import sha256_file
from paritygate.spec.project import project_at
from paritygate.spec.strict import MOST_BYTES

PACKAGE = Path(__file__).resolve().parents[1]
# Files at the root that pytest or Python would load in spite of pyproject.toml; none belongs there.
STEERING = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg")


def subjects(root: Path) -> dict[str, str]:
    """Path relative to `root` (with /) -> sha256, for every file that parity stands on, by walking the folders.

    What they are, [tool.paritygate] says; the paritygate that is installed is among them, by its own files, where it is
    not the repository's own. git is not asked: it can be told to look away. Cached bytecode (`__pycache__/*.pyc`) is
    left out, since `paritygate.bootstrap` never reads it. Raises Refused for a symbolic link, and when a listed file is
    missing.
    """
    project = project_at(root)
    digests: dict[str, str] = {}
    for name in project.files:
        if not (root / name).exists() and not (root / name).is_symlink():
            raise Refused(f"{root / name} is missing: parity is shown for it.")
        digests[name] = digest_of(root, name)
    for folder in project.folders:
        for name in walk(root, folder):
            digests[name] = digest_of(root, name)
    for entry in sorted(os.listdir(root)):
        if entry in STEERING or entry.endswith((".py", ".pth")):
            digests[entry] = digest_of(root, entry)
    if "paritygate" not in project.homes:
        digests |= {f"installed/{name}": digest_of(PACKAGE.parent, name) for name in walk(PACKAGE.parent, PACKAGE.name)}
    return dict(sorted(digests.items()))


def digest_of(root: Path, name: str) -> str:
    """sha256 of the file `name` under `root`; raises Refused for anything but a plain file."""
    path = root / name
    for part in (path, *path.parents):
        if part == root:
            break
        if part.is_symlink():
            raise Refused(f"{part.relative_to(root)} is a symbolic link: parity is bound to the bytes of plain files.")
    try:
        name.encode()
        if path.is_file():
            if path.stat().st_size > MOST_BYTES:
                raise Refused(f"{name} is over {MOST_BYTES >> 20} MiB, which no file that parity stands on is.")
            return sha256_file(path)
    except (OSError, UnicodeEncodeError) as error:
        raise Refused(f"{name!a} cannot be read ({error}): parity is shown for it.") from error
    raise Refused(f"{name} is not a plain file: parity is bound to the bytes of plain files.")


def walk(root: Path, folder: str) -> Iterator[str]:
    """Names under `folder`, sorted, cached bytecode left out; raises Refused for a missing folder or a link in it."""
    if (root / folder).is_symlink():
        raise Refused(f"{folder} is a symbolic link: parity is bound to the bytes of plain files.")
    try:
        entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
    except OSError as error:
        raise Refused(
            f"{root / folder} cannot be read ({error.strerror}): parity is shown for the files in it."
        ) from error
    for entry in entries:
        name = f"{folder}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from walk(root, name)
        elif not (folder.endswith("/__pycache__") and entry.name.endswith(".pyc") and not entry.is_symlink()):
            yield name


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first change between two sets of subjects as `PATH was edited|added|deleted`, or None when they are equal."""
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            return f"{name} was deleted"
        if name not in before:
            return f"{name} was added"
        if before[name] != now[name]:
            return f"{name} was edited"
    return None
