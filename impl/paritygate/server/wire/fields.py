"""JSON bodies read field by field, and the checks that every id and name gets."""

from typing import cast

import numpy as np

from paritygate.server.errors import RequestError
from paritygate.server.model.shape import Shape


class Fields:
    """A JSON object read field by field; every complaint names the field."""

    def __init__(self, data: object, where: str = "body") -> None:
        if not isinstance(data, dict):
            raise RequestError(f"{where} must be a JSON object, found {type(data).__name__}", 422)
        self.data = cast(dict[str, object], data)
        self.where = where

    def text(self, name: str) -> str:
        value = self.data.get(name)
        if not isinstance(value, str) or not value:
            raise RequestError(f"{self.where}.{name} must be a non-empty string, found {value!r}", 422)
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self.data.get(name) is None else self.text(name)

    def integer(self, name: str, default: int | None = None, *, low: int, high: int = 2**63 - 1) -> int:
        value = self.data.get(name, default)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{self.where}.{name} must be an integer in [{low}, {high}], found {value!r}", 422)
        return value

    def optional_integer(self, name: str, *, low: int, high: int = 2**63 - 1) -> int | None:
        return None if self.data.get(name) is None else self.integer(name, low=low, high=high)

    def number(self, name: str, default: float, *, low: float, high: float = float("inf")) -> float:
        value = self.data.get(name, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise RequestError(f"{self.where}.{name} must be a number in [{low}, {high}], found {value!r}", 422)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise RequestError(f"{self.where}.{name} must be true or false, found {value!r}", 422)
        return value

    def strings(self, name: str) -> dict[str, str] | None:
        """An object of strings that can be sent back; None where the field is absent."""
        value = self.data.get(name)
        if value is None:
            return None
        items = list(cast(dict[str, object], value).items()) if isinstance(value, dict) else [("", None)]
        if not all(isinstance(text, str) and _is_unicode(key + text) for key, text in items):
            raise RequestError(f"{self.where}.{name} must be an object of strings", 422)
        return cast(dict[str, str], value)

    def child(self, name: str) -> "Fields":
        return Fields(self.data.get(name), f"{self.where}.{name}")

    def items(self, name: str) -> list[object]:
        value = self.data.get(name)
        if not isinstance(value, list):
            raise RequestError(f"{self.where}.{name} must be a list, found {type(value).__name__}", 422)
        return cast(list[object], value)


def _is_unicode(text: str) -> bool:
    """Whether it can be encoded: JSON may hold half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_tokens(tokens: np.ndarray, shape: Shape, where: str) -> "list[int]":
    """Ids inside the vocabulary, at most a context of them; returns them as a list."""
    if tokens.size == 0:
        raise RequestError(f"{where}: no tokens")
    if tokens.size > shape.context:
        raise RequestError(f"{where}: {tokens.size} tokens, but the model's context is {shape.context}")
    bad = np.flatnonzero((tokens < 0) | (tokens >= shape.vocabulary))
    if bad.size:
        raise RequestError(
            f"{where}: token {int(tokens[bad[0]])} at position {int(bad[0])} is outside the vocabulary of "
            f"{shape.vocabulary}"
        )
    return cast(list[int], tokens.tolist())


def dense_rows(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, ...], fill: int, where: str
) -> np.ndarray:
    """Lay out a CSR matrix; RequestError where its indices do not describe one of that shape."""
    if len(shape) != 2 or shape[0] * shape[1] > 2**25:
        raise RequestError(f"{where}: sparse values need a two-axis shape of at most 2^25 cells, found {list(shape)}")
    good = (
        rows.size == shape[0] + 1
        and (rows.size == 0 or (rows[0] == 0 and rows[-1] == values.size))
        and bool((np.diff(rows) >= 0).all())
        and columns.size == values.size
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not good:
        raise RequestError(f"{where}: the sparse indices do not describe a matrix of shape {list(shape)}")
    out = np.full(shape, fill, values.dtype)
    out[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return out
