"""Writing data in the layout of upstream's repository: the same files, as Python source where upstream has it."""

import json
import pprint
from pathlib import Path
from typing import Any

from paritygate.receipts.git import git

RETAIL = Path("tau_bench/envs/retail")


def write_repository(folder: Path, parts: dict[str, Any], *, poison: str = "") -> str:
    """A git repository with one commit that holds `parts`; the id of that commit."""
    retail = folder / RETAIL
    (retail / "data").mkdir(parents=True)
    (retail / "tools").mkdir()
    for table in ("orders", "products", "users"):
        (retail / "data" / f"{table}.json").write_text(_json(parts[table]), encoding="utf-8")
    for split in ("train", "dev", "test"):
        tasks = ",\n".join(_task(task) for task in parts[f"tasks/{split}"])
        source = f"from tau_bench.types import Task, Action\n{poison}\nTASKS_{split.upper()} = [\n{tasks}\n]\n"
        (retail / f"tasks_{split}.py").write_text(source, encoding="utf-8")
    (retail / "wiki.md").write_text(parts["wiki"], encoding="utf-8")
    (retail / "rules.py").write_text(f"{poison}\nRULES = {parts['rules']!r}\n", encoding="utf-8")
    _write_tools(retail / "tools", parts["tools"], poison)
    (folder / "LICENSE").write_text("MIT License\n", encoding="utf-8")
    (folder / "large.bin").write_bytes(bytes(1000))
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "--quiet", "-m", "data")
    return git(folder, "rev-parse", "HEAD")


def _write_tools(folder: Path, tools: list[Any], poison: str) -> None:
    imports, names = [], []
    for tool in tools:
        name = tool["function"]["name"]
        class_name = name.title().replace("_", "")
        imports.append(f"from .{name} import {class_name}")
        names.append(class_name)
        body = pprint.pformat(tool, sort_dicts=False, width=100)  # long texts become ("a" "b"), as upstream writes them
        source = f"{poison}\nclass {class_name}:\n    @staticmethod\n    def get_info():\n        return {body}\n"
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    source = "\n".join([*sorted(imports), f"\nALL_TOOLS = [{', '.join(names)}]", ""])
    (folder / "__init__.py").write_text(source, encoding="utf-8")


def _task(task: dict[str, Any]) -> str:
    actions = ", ".join(f"Action(name={action['name']!r}, kwargs={action['kwargs']!r})" for action in task["actions"])
    return (
        f"Task(annotator='0', user_id={task['user_id']!r}, instruction={task['instruction']!r}, "
        f"actions=[{actions}], outputs={task['outputs']!r})"
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=4)
