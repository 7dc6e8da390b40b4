"""Binding a tool call's arguments to a tool's parameters, with CPython's rules and messages."""

from collections.abc import Mapping, Sequence
from typing import Any


class BindingError(Exception):
    """Arguments that do not fit; the text is what CPython 3.11 says for upstream's static method."""


def bind(class_name: str, module: str, parameters: Sequence[str], arguments: Mapping[str, Any]) -> list[Any]:
    """The arguments in the order of `parameters`; BindingError for an extra, a missing or the reserved one.

    `module` and `class_name` name upstream's tool, since its error texts do: tau_bench/envs/retail/tools at 59a200c6.
    """
    if "data" in arguments:
        raise BindingError(f"{module}.{class_name}.invoke() got multiple values for keyword argument 'data'")
    for name in arguments:
        if name not in parameters:
            raise BindingError(f"{class_name}.invoke() got an unexpected keyword argument {name!r}")
    missing = [repr(name) for name in parameters if name not in arguments]
    if missing:
        plural = "" if len(missing) == 1 else "s"
        raise BindingError(
            f"{class_name}.invoke() missing {len(missing)} required positional argument{plural}: {_listed(missing)}"
        )
    return [arguments[name] for name in parameters]


def _listed(names: list[str]) -> str:
    if len(names) <= 2:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"
