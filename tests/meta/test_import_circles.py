"""No module of ours imports itself through others, imports inside functions counted: read from the syntax, not run."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Graph = dict[str, set[str]]


def modules(*roots: Path) -> dict[str, Path]:
    """Dotted name -> file of every module below source roots; a package is its `__init__.py`."""
    files = {}
    for root in roots:
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    """The modules among `files` that a module imports, at its top and anywhere inside it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{origin}.{alias.name}"
                yield from (x for x in (whole if whole in files else origin,) if x in files)


def graph(files: Mapping[str, Path]) -> Graph:
    return {name: set(imported(name, path, files)) - {name} for name, path in files.items()}


def circle(arrows: Graph) -> list[str] | None:
    """One circle of modules, the first again at its end, or None."""
    done: set[str] = set()

    def walk(name: str, above: list[str]) -> list[str] | None:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return None
        for target in sorted(arrows[name]):
            if closed := walk(target, [*above, name]):
                return closed
        done.add(name)
        return None

    return next((closed for name in sorted(arrows) if (closed := walk(name, []))), None)


def test_no_import_goes_in_a_circle() -> None:
    closed = circle(graph(modules(ROOT / "impl", ROOT / "reference")))
    assert closed is None, " -> ".join(closed or [])


def test_a_circle_through_a_function_is_seen(tmp_path: Path) -> None:
    """What the test above is worth: relative and absolute, a package by its submodule, inside a function."""
    for name, text in {
        "a/__init__.py": "",
        "a/b.py": "from . import c\n",
        "a/c.py": "import math\nfrom .d.e import f\n",
        "a/d/__init__.py": "",
        "a/d/e.py": "def f():\n    from a.b import g\n    return g\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert circle(graph(modules(tmp_path))) == ["a.b", "a.c", "a.d.e", "a.b"]
    (tmp_path / "a/d/e.py").write_text("def f():\n    return 1\n")
    assert circle(graph(modules(tmp_path))) is None
