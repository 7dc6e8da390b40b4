"""The process that imports an adapter and judges it: `python -m paritygate.harness.conformance.child MODULE OUTPUT`.

OUTPUT gets a line of JSON as soon as something is known: {"start": ...}, {"plain" | "stress" | "promises": row},
{"failed": sentence}, {"done": true}. What the adapter and its project print is theirs.
"""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from paritygate.harness.conformance import FUNCTIONS
from paritygate.harness.conformance.functions import found_in
from paritygate.harness.conformance.rows import rows_of


def main(name: str, output: Path) -> None:
    """Judge the module `name`."""
    sys.path.insert(0, "")
    with output.open("w") as file:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            return write(file, "failed", why_not(name, error))
        functions = [(function, call) for function in FUNCTIONS if (call := found_in(module, function)) is not None]
        if not functions:
            offered = ", ".join(function.name for function in FUNCTIONS)
            return write(file, "failed", f"{name} offers none of {offered}: see examples/trainers.")
        write(file, "start", facts(module))
        for function, call in functions:
            for kind, row in rows_of(function, call):
                write(file, kind, row)
        return write(file, "done", True)


def write(file: TextIO, kind: str, content: Any) -> None:
    """One line, at once."""
    file.write(json.dumps({kind: content}) + "\n")
    file.flush()


def why_not(name: str, error: Exception) -> str:
    """One sentence for a module that does not import, with what its docstring says about installing."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (name == missing or name.startswith(f"{missing}.")):
        return f"there is no module {missing} on the path."
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    sentence = f"{name} needs {missing}, which is not installed." if missing else f"{name} does not import ({what})."
    source = source_of(name)
    text = ast.get_docstring(ast.parse(source)) if source else None
    install = re.search(r"Install:\s+(.+?)(?:\n\n|\Z)", text or "", re.DOTALL)
    return f"{sentence} {' '.join(install[0].split())}" if install else sentence


def source_of(name: str) -> str:
    """The text of a module that is one file, "" for anything else."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py") or spec.submodule_search_locations:
        return ""
    return Path(spec.origin).read_text("utf-8")


def facts(module: ModuleType) -> dict[str, Any]:
    """Versions and digests of the distributions that the adapter imports, and of the adapter itself.

    What is imported from a folder on the path, and not from the distribution of that name, has no version: its
    digest is that of its files.
    """
    source = source_of(module.__name__)
    names = {"torch", "numpy"}
    for node in ast.walk(ast.parse(source)):
        names |= {alias.name.partition(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    homes = importlib.metadata.packages_distributions()
    versions: dict[str, str] = {}
    digests = {module.__name__: hashlib.sha256(source.encode()).hexdigest() if source else None}
    for name in sorted(name for name in names if name in homes and name != "paritygate"):
        distribution, folder = homes[name][0], folder_of(name)
        site = Path(str(importlib.metadata.distribution(distribution).locate_file(""))).resolve()
        if folder is None or folder.is_relative_to(site):
            versions[distribution], digests[distribution] = (
                importlib.metadata.version(distribution),
                digest_of(distribution),
            )
        else:
            versions[name], digests[name] = "checkout", digest_of_folder(folder)
    return {"source": source, "versions": versions, "digests": digests}


def folder_of(name: str) -> Path | None:
    """The folder of an imported package, or None for one that is a single file or was not imported."""
    places = getattr(sys.modules.get(name), "__path__", None)
    return Path(next(iter(places))).resolve() if places else None


def digest_of_folder(folder: Path) -> str:
    """sha256 over the names and digests of the Python files below `folder`."""
    files = sorted(folder.rglob("*.py"))
    lines = [f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_of(distribution: str) -> str | None:
    """sha256 over the installed Python files' own digests, as the distribution's RECORD has them."""
    files = importlib.metadata.files(distribution) or []
    lines = sorted(f"{file} {file.hash.value}" for file in files if file.hash and file.suffix == ".py")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
