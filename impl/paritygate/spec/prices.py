"""A dated price table: what a service asks for, in money per million tokens, by model and kind of token."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paritygate.spec.error import SpecError
from paritygate.spec.loading import build, read_json
from paritygate.spec.schema import spec_folder, violations


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """Of one model, per million tokens: of prompts and scorings, of what is sampled, of what is trained on (or None).

    source: where the numbers were read. as_of: the day on which they were the service's, None where that is not known.
    """

    prefill: float
    sampled: float
    trained: float | None
    source: str
    as_of: str | None


@dataclass(frozen=True, slots=True)
class Prices:
    """A table made on the day `as_of`; gpu_hour: of a held GPU, None where a service is paid by the token."""

    as_of: str
    currency: str
    models: Mapping[str, ModelPrice]
    gpu_hour: float | None

    def of(self, model: str, kind: str) -> float | None:
        """The price of a million tokens of a kind (prefill, sampled, trained); None where the table has none."""
        row = self.models.get(model)
        return None if row is None else {"prefill": row.prefill, "sampled": row.sampled, "trained": row.trained}[kind]

    def day(self, model: str) -> str:
        """The day of a model's prices, for a person."""
        row = self.models.get(model)
        return "unknown date" if row is None or row.as_of is None else row.as_of


def find_prices(name: str | None, spec: Path) -> Path | None:
    """Where the table that a spec names lies: beside the spec, else beside the project's own specs; None without one.

    Raises SpecError (exit 2) where there is no such file.
    """
    if name is None:
        return None
    beside = spec.parent / name
    return beside if beside.is_file() else spec_folder() / name


def load_prices(path: Path) -> Prices:
    """The table in a file; SpecError (exit 2) with a JSON pointer for everything that is wrong with it."""
    document = read_json(path)
    findings = violations("prices", document)
    if findings:
        raise SpecError(path, findings)
    return build(Prices, document)
