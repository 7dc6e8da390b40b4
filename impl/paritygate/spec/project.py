"""Where a repository keeps what parity is shown for: `[tool.paritygate]` of its pyproject.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paritygate.errors import Refused

KEYS = ("spec", "reference", "implementation", "tests", "receipts", "subjects")


@dataclass(frozen=True)
class Project:
    """A repository whose losses are proven; every path is relative to `root`, with /.

    spec: the file that declares the losses. reference, implementation: the package of the definitions, and the one of
    the losses that run, a module a loss. tests: the folder of the parity tests. receipts: where receipts are written.
    subjects: further files, and folders (named with a / at their end), whose bytes a receipt is bound to.
    """

    root: Path
    spec: str
    reference: str
    implementation: str
    tests: str
    receipts: str
    subjects: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The single files that a receipt is bound to."""
        return ("pyproject.toml", self.spec, *(name for name in self.subjects if not name.endswith("/")))

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that a receipt is bound to, none inside another."""
        named = {
            self.reference,
            self.implementation,
            self.tests,
            *(name.rstrip("/") for name in self.subjects if name.endswith("/")),
        }
        return tuple(
            sorted(name for name in named if not any(name.startswith(f"{other}/") for other in named if other != name))
        )

    @property
    def package(self) -> str:
        """The import name of the implementation."""
        return _import_name(self.root / self.implementation)

    @property
    def homes(self) -> dict[str, Path]:
        """Top-level import name -> the folder on sys.path that it has to come from, of implementation and reference."""
        packages = (self.root / self.implementation, self.root / self.reference)
        return {_import_name(package).partition(".")[0]: _import_root(package) for package in packages}


def project_at(root: Path) -> Project:
    """The project at `root`; raises Refused where its pyproject.toml says nothing of one, or something else."""
    table = configuration(root)
    if table is None:
        raise Refused(f"{root / 'pyproject.toml'} has no [tool.paritygate]: it says where losses and tests lie.")
    for name in KEYS:
        value = table.get(name, () if name == "subjects" else None)
        several = name == "subjects" and isinstance(value, list | tuple)
        texts: Any = value if several else [value]
        if (name == "subjects") != several or not all(_is_inside(text) for text in texts):
            raise Refused(
                f"{root / 'pyproject.toml'}: [tool.paritygate] {name} is {value!r}, expected "
                f"{'a list of paths' if name == 'subjects' else 'a path'} inside the repository."
            )
    if unknown := sorted(table.keys() - set(KEYS)):
        raise Refused(f"{root / 'pyproject.toml'}: [tool.paritygate] has no {unknown[0]!r}; it has {', '.join(KEYS)}.")
    paths = {name: str(table[name]).rstrip("/") for name in KEYS if name != "subjects"}
    return Project(root, **paths, subjects=tuple(table.get("subjects", ())))


def project_around(place: Path) -> Project:
    """The project of the nearest folder at or above `place` that has one; raises Refused where there is none."""
    for folder in (place, *place.parents):
        if configuration(folder) is not None:
            return project_at(folder)
    raise Refused(f"no pyproject.toml at or above {place} has [tool.paritygate]: it says where losses and tests lie.")


def configuration(root: Path) -> dict[str, Any] | None:
    """`[tool.paritygate]` of the pyproject.toml in `root`, or None; raises Refused for a file that is no TOML."""
    path = root / "pyproject.toml"
    if not path.is_file():
        return None
    try:
        return tomllib.loads(path.read_text("utf-8")).get("tool", {}).get("paritygate")
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read ({error}).") from error


def _is_inside(text: object) -> bool:
    """Whether it is a relative path that leads nowhere up."""
    return isinstance(text, str) and bool(text.strip("/")) and not text.startswith("/") and ".." not in text.split("/")


def _import_root(package: Path) -> Path:
    """The folder that has to be on sys.path for `package` to be imported."""
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    return package.parent


def _import_name(package: Path) -> str:
    return ".".join(package.relative_to(_import_root(package)).parts)
