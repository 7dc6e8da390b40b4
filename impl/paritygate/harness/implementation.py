"""The losses under test: the configured package, or the module of --implementation, which may lack some."""

import functools
import importlib
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import pytest

from paritygate.harness import Unsupported


class Implementation:
    """The implementation under test, or a loss of it: what it lacks or calls Unsupported is not tested for.

    A loss is a submodule, or anything else that has the functions as attributes.
    """

    def __init__(self, module: Any, names: frozenset[str], label: str = "") -> None:
        self._module, self._names, self._label = module, names, label or module.__name__

    @classmethod
    def of(cls, package: str, names: frozenset[str]) -> "Implementation":
        """The importable module `package`, of which `names` may be missing."""
        return cls(importlib.import_module(package), names)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name, None)
        if value is None and name in self._names:
            value = self._submodule(f"{self._label}.{name}")
        if value is None and name in self._names:
            pytest.skip(f"{self._label} has no {name}")
        if value is None:
            raise AttributeError(name)
        if isinstance(value, ModuleType | type) or (name in self._names and not callable(value)):
            return Implementation(value, self._names, f"{self._label}.{name}")
        return skipping(value) if callable(value) else value

    def _submodule(self, name: str) -> ModuleType | None:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, self._label):
                raise
            return None


def skipping(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose Unsupported skips the test that asked for it."""

    @functools.wraps(function)
    def asked(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Unsupported as reason:
            pytest.skip(f"unsupported: {reason}")

    return asked


class LossMissingError(ModuleNotFoundError):
    """A loss of the spec without a module."""


def losses_under_test(package: str, declared: Collection[str]) -> ModuleType:
    """`package` with a submodule for each declared loss imported; LossMissingError: one is not there."""
    for name in declared:
        try:
            importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            message = f"{name} is declared in the spec, and {error.name} is not there (--losses shows others alone)."
            raise LossMissingError(message, name=error.name) from None
    return importlib.import_module(package)
