"""The synthetic component as frozen data (spec/schema/synthetic.schema.json)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A validated synthetic component; `frozen` is the whole file with every default written out (JSON data)."""

    path: Path
    frozen: Mapping[str, Any]
    unresolved: tuple[str, ...]
    recipe: str

    @property
    def losses(self) -> tuple[str, ...]:
        """Names in spec/losses.json that the component stands on."""
        return ("spod",)
