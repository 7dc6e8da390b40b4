"""What a run was asked for on its command line, and what a fallback may change."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run was asked for; none of it may change a result.

    prices: a price table (schema/prices.schema.json) other than the one that the spec names.
    """

    root: Path
    device: str = "cpu"
    tau_bench: Path | None = None
    trust_receipt: bool = False
    environment: str = "own"
    prices: Path | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a fallback of the activation pilot may change, for both arms."""

    max_turns: int
    teacher: str
