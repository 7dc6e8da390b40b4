"""The losses under test: the configured package, or the module of --implementation, which may lack some."""

import importlib
from collections.abc import Collection
from types import ModuleType
from typing import Any

import pytest


class Implementation:
    """The implementation under test, or a submodule of it: a name of the spec that it lacks is not tested for."""

    def __init__(self, module: Any, names: frozenset[str]) -> None:
        self._module, self._names = module, names

    @classmethod
    def of(cls, package: str, names: frozenset[str]) -> "Implementation":
        """The importable module `package`, of which `names` may be missing."""
        return cls(importlib.import_module(package), names)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name, None)
        if value is None and name in self._names:
            value = self._submodule(f"{self._module.__name__}.{name}")
        if value is None and name in self._names:
            pytest.skip(f"{self._module.__name__} has no {name}")
        if value is None:
            raise AttributeError(name)
        return Implementation(value, self._names) if isinstance(value, ModuleType) else value

    def _submodule(self, name: str) -> ModuleType | None:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, self._module.__name__):
                raise
            return None


def losses_under_test(package: str, declared: Collection[str]) -> ModuleType:
    """`package` with a submodule for each declared loss imported."""
    for name in declared:
        importlib.import_module(f"{package}.{name}")
    return importlib.import_module(package)
