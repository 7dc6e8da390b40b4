"""The retail data from either layout: plain JSON files, or upstream's package folder, whose code is never run."""

import ast
import gzip
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from paritygate.retail.errors import DataError
from paritygate.spec.strict import parse_json, read_plain

SPLITS = ("train", "dev", "test")
TABLES = ("orders", "products", "users")
UPSTREAM_FOLDER = Path("tau_bench/envs/retail")
_CONSTRUCTORS = ("Task", "Action")

Parts = dict[str, Any]
"""`orders`, `products`, `users`, `tasks/train|dev|test` (lists), `wiki` (text), `rules`, `tools`: all as JSON data."""


def read(folder: Path) -> Parts:
    """All parts of the data in `folder`, in JSON layout or as upstream's tau_bench/envs/retail.

    Raises DataError naming the file that is missing or cannot be read.
    """
    require_folder(folder)
    return dict(_upstream_parts(folder) if (folder / "tasks_train.py").exists() else _json_parts(folder))


def require_folder(folder: Path) -> None:
    """DataError where there is none."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder of tau-bench retail data; `make data` fetches it")


def digest(folder: Path) -> str:
    """sha256, hex, of the names and bytes of all files that `read` may take; DataError where one cannot be read."""
    require_folder(folder)
    if (folder / "tasks_train.py").exists():
        names = [f"data/{table}.json" for table in TABLES] + [f"tasks_{split}.py" for split in SPLITS]
        names += ["wiki.md", "rules.py", *sorted(f"tools/{path.name}" for path in (folder / "tools").glob("*.py"))]
    else:
        names = [f"{name}.json" for name in (*TABLES, *(f"retail_tasks_{split}" for split in SPLITS))]
        names += ["wiki.md", "rules.json", "tools_info.json"]
    read_bytes = sha256()
    for name in names:
        content = _bytes(folder / name)
        read_bytes.update(f"{name} {len(content)}\n".encode() + content)
    return read_bytes.hexdigest()


def _json_parts(folder: Path) -> Iterator[tuple[str, Any]]:
    for table in TABLES:
        yield table, _json(folder / f"{table}.json")
    for split in SPLITS:
        path = folder / f"retail_tasks_{split}.json"
        yield f"tasks/{split}", _tasks(path, _json(path))
    yield "wiki", _text(folder / "wiki.md")
    yield "rules", _json(folder / "rules.json")
    yield "tools", _json(folder / "tools_info.json")


def _bytes(path: Path) -> bytes:
    """The content of `path`, or of `path`.gz."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        return read_plain(path) if path.exists() or not packed.exists() else gzip.decompress(read_plain(packed))
    except FileNotFoundError:
        raise DataError(f"{path}: this file of the tau-bench retail data is missing; `make data` fetches it") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); `make data` fetches it again") from error


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}); `make data` fetches it again") from error


def _json(path: Path) -> Any:
    try:
        return parse_json(_bytes(path))
    except ValueError as error:
        raise DataError(f"{path}: {error}; `make data` fetches it again") from error


def _tasks(path: Path, tasks: Any) -> list[dict[str, Any]]:
    """The fields that upstream's Task keeps (user_id, instruction, actions, outputs), in one order."""
    if not isinstance(tasks, list):
        raise DataError(f"{path}: {type(tasks).__name__}, not a list of tasks; `make data` fetches it again")
    try:
        return [
            {
                "user_id": task["user_id"],
                "instruction": task["instruction"],
                "actions": [{"name": action["name"], "kwargs": action["kwargs"]} for action in task["actions"]],
                "outputs": list(task["outputs"]),
            }
            for task in tasks
        ]
    except KeyError as error:
        raise DataError(f"{path}: a task without the field {error}; `make data` fetches it again") from error
    except TypeError as error:
        raise DataError(f"{path}: a task of another form ({error}); `make data` fetches it again") from error


def _upstream_parts(folder: Path) -> Iterator[tuple[str, Any]]:
    for table in TABLES:
        yield table, _json(folder / "data" / f"{table}.json")
    for split in SPLITS:
        path = folder / f"tasks_{split}.py"
        yield f"tasks/{split}", _tasks(path, _assigned(path, f"TASKS_{split.upper()}"))
    yield "wiki", _text(folder / "wiki.md")
    yield "rules", _assigned(folder / "rules.py", "RULES")
    yield "tools", [_tool(folder / "tools" / f"{name}.py") for name in _tool_modules(folder / "tools/__init__.py")]


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(_text(path), str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{path}: not Python source ({error})") from error


def _assigned(path: Path, name: str) -> Any:
    """The literal assigned to `name` at the top of a module."""
    for statement in _tree(path).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [name]:
            return _literal(path, statement.value)
    raise DataError(f"{path}: nothing is assigned to {name}, so this is not upstream's layout")


def _tool_modules(path: Path) -> list[str]:
    """Module names of the tools in the order of ALL_TOOLS."""
    tree = _tree(path)
    module_of = {
        alias.name: statement.module
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.level == 1 and statement.module
        for alias in statement.names
    }
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.List):
            names = [ast.unparse(element) for element in statement.value.elts]
            for name in names:
                if name not in module_of:
                    raise DataError(f"{path}: the tool {name} is imported from no module, so this is not upstream's")
            return [module_of[name] for name in names]
    raise DataError(f"{path}: no list of tools, so this is not upstream's layout")


def _tool(path: Path) -> Any:
    """What a tool's `get_info` returns, where that is a literal."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef) and node.name == "get_info":
            for statement in node.body:
                if isinstance(statement, ast.Return) and statement.value is not None:
                    return _literal(path, statement.value)
    raise DataError(f"{path}: no get_info with a literal, so this is not upstream's layout")


def _literal(path: Path, node: ast.expr) -> Any:
    """The value of literals, with Task(...) and Action(...) as dictionaries; nothing is executed."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _CONSTRUCTORS and not node.args:
        return {word.arg: _literal(path, word.value) for word in node.keywords if word.arg is not None}
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(path, element) for element in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = zip(node.keys, node.values, strict=True)
        return {_literal(path, key): _literal(path, value) for key, value in pairs if key is not None}
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise DataError(f"{path}:{node.lineno}: {ast.unparse(node)[:60]!r} is no literal; it is not executed") from None
