"""JSON data that a schema has accepted -> frozen dataclasses of the same field names."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def build(cls: type[T], data: Mapping[str, Any], **extra: object) -> T:
    """`cls` from the keys of `data` that it has fields for; a key that is absent becomes None."""
    hints = typing.get_type_hints(cls)
    values: dict[str, object] = {
        field.name: _convert(hints[field.name], data.get(field.name))
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in extra
    }
    return cls(**values, **extra)


def _convert(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _convert(next(one for one in arguments if one is not type(None)), value)
    if origin is tuple:
        return tuple(_convert(arguments[0], item) for item in value)
    if origin is Mapping:
        return types.MappingProxyType({key: _convert(arguments[1], item) for key, item in value.items()})
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return build(kind, value)
    return float(value) if kind is float else value
