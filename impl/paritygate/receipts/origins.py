"""Where the modules of this process come from: nothing takes the place of what this Python has by itself."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from paritygate.bootstrap import alone
from paritygate.errors import Refused

OURS = frozenset(("paritygate", "paritygate_pytest", "paritygate_reference", "tests", "__main__", "__mp_main__"))
"""`refuse_foreign` judges these."""

STARTUP = frozenset(("sitecustomize", "usercustomize"))
"""Python imports these by itself before anything else, from wherever PYTHONPATH has them: they can replace anything."""

PROBE = """
import importlib.util, json, sys
found = {}
for name in json.load(sys.stdin):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        spec = None
    found[name] = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
json.dump(found, sys.stdout)
"""


def refuse_shadowed(root: Path, homes: Mapping[str, Path] | None = None) -> None:
    """Raise Refused when a module here does not come from where this Python, asked alone, has it; `homes` hold ours.

    That is what a folder in the working directory, PYTHONPATH and `-o pythonpath=` can do: put a module before the
    installed one of its name. Judged are all modules that are loaded and the dependencies that pyproject.toml names,
    unless they lie in the interpreter's own folders, against a process of it that ignores PYTHON* and has no script's
    or working folder on its path. A module that this Python does not have at all replaces nothing, unless it is one of
    those dependencies, or one of STARTUP.
    """
    judged = OURS | (homes or {}).keys()
    here = {name: places(module) for name, module in sorted(sys.modules.items()) if "." not in name}
    declared = dependencies(root) | STARTUP
    here |= {name: look_up(name) for name in declared - STARTUP if name not in here}
    here = {name: paths for name, paths in here.items() if name not in judged and not installed_here(paths)}
    alone = ask_alone(here) if here else {}
    for name, paths in sorted(here.items()):
        usual = [place for place in alone[name] if place is not None]
        other = [place for place in paths if not any(same(place, one) for one in usual)]
        if not other or (not usual and name not in declared):
            continue
        where = usual[0] if usual else "nowhere"
        raise Refused(
            f"{name} comes from {other[0]}, this Python by itself has it {where}: "
            "take it off PYTHONPATH, or out of the working folder, and try again."
        )


def installed_here(places: Iterable[str]) -> bool:
    """Whether all these places are this interpreter's own folders: no other process has to be asked about them."""
    folders = interpreter_folders()
    return all(
        place in ("built-in", "frozen") or (os.path.realpath(place) + os.sep).startswith(folders) for place in places
    )


@functools.cache
def interpreter_folders() -> tuple[str, ...]:
    """The folders of this interpreter's library and of what is installed for it: links resolved, a separator last."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names})


def places(module: ModuleType) -> list[str]:
    """The file of a loaded top-level module and the folders that its submodules come from; empty for one of neither."""
    spec = getattr(module, "__spec__", None)
    if spec is None or spec.name != module.__name__:
        return []
    return [*filter(None, [spec.origin]), *(spec.submodule_search_locations or ())]


def look_up(name: str) -> list[str]:
    """The same for a module that is not loaded yet, which is not imported for it; empty where there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return []
    return [] if spec is None else [*filter(None, [spec.origin]), *(spec.submodule_search_locations or ())]


def dependencies(root: Path) -> set[str]:
    """Import names of what pyproject.toml asks for: those of its distributions that are named as they are imported."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8")).get("project", {})
    extras = project.get("optional-dependencies", {}).values()
    asked = [*project.get("dependencies", []), *(requirement for extra in extras for requirement in extra)]
    return {re.split(r"[^A-Za-z0-9._-]", text.strip(), maxsplit=1)[0].lower().replace("-", "_") for text in asked}


def ask_alone(names: Iterable[str]) -> dict[str, list[str | None]]:
    """For each top-level name its file and folders in an interpreter of its own, out of this environment's reach."""
    python, environment = alone()
    try:
        done = subprocess.run(
            [*python, "-c", PROBE],
            input=json.dumps(list(names)),
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise Refused(f"{sys.executable} cannot be asked where its modules are: {error}.") from error


def same(one: str, other: str) -> bool:
    """Whether two places are one: by name (`built-in`, `frozen`), or by what links lead to."""
    return one == other or os.path.realpath(one) == os.path.realpath(other)
