"""pytest's entry point of paritygate.harness: silent, and nothing of paritygate imported, without [tool.paritygate].

Bytecode is not read: neither of paritygate, nor of the losses, the reference and the tests, nor what pytest caches of
rewritten tests. `-p paritygate_pytest` loads it where plugins are not loaded by themselves.
"""

import os
import sys
import tomllib
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plugin, which adds its options, where the repository of this session is configured."""
    config = pluginmanager.get_plugin("pytestconfig")
    if config is not None and _configured(config.rootpath):
        _start(config, pluginmanager)


def _configured(root: Path) -> bool:
    try:
        return "paritygate" in tomllib.loads((root / "pyproject.toml").read_text("utf-8")).get("tool", {})
    except (OSError, ValueError):
        return False  # pytest says what is wrong with its own configuration


def _start(config: pytest.Config, pluginmanager: pytest.PytestPluginManager) -> None:
    if pluginmanager.has_plugin("paritygate-harness"):
        return
    for path in reversed(config.getini("pythonpath")):
        if (path / "paritygate").is_dir() and sys.path[:1] != [str(path)]:
            sys.path.insert(0, str(path))  # paritygate's own repository: this checkout, not an installed one
    prefix, sys.pycache_prefix = sys.pycache_prefix, os.devnull  # no cached bytecode of what is imported next can exist
    try:
        from paritygate import bootstrap
        from paritygate.errors import Refused
        from paritygate.spec.project import project_at

        try:
            project = project_at(config.rootpath)
        except Refused as refusal:
            raise pytest.UsageError(str(refusal)) from refusal
        folders = [project.root / name for name in project.folders]
        bootstrap.read_sources_only(*folders, *project.homes.values(), Path(bootstrap.__file__).parent)
    finally:
        # `-X pycache_prefix=/dev/null` is for what pytest reads before this; for torch it would cost 3 s.
        sys.pycache_prefix = prefix if prefix != os.devnull else os.environ.get("PYTHONPYCACHEPREFIX") or None
    try:
        from paritygate.harness import plugin
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "paritygate":
            raise
        raise pytest.UsageError(f"{error.name} is not installed: pip install 'paritygate[harness]'") from error
    plugin.read_no_cached_tests(folders)
    pluginmanager.register(plugin, "paritygate-harness")
